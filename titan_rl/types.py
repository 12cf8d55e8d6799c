"""The nouns of the project: what prompts, completions, rollouts, groups and samples are.

Plain data, standard library only: these travel between layers and into JSON. Tensors first appear in
:mod:`titan_rl.batching`. The words are those of docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """A length limit was reached: the completion is truncated."""
    ABORT = "abort"
    """The request was aborted. Such a completion is never trained on."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is first given to the policy.

    Attributes:
        id: Stable name, unique in its dataset and the same in every run and on every world size.
        messages: The chat messages, before the chat template.
        answer: The reference answer for rewards, if the dataset has one.
        metadata: Further columns of the dataset, for rewards.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``temperature == 0`` means greedy.

    Attributes:
        temperature: Logits are divided by it before the softmax; 0 is greedy decoding.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; 0 is off.
        min_p: Minimum probability relative to the most likely token; 0 is off.
        max_tokens: Most tokens of one completion.
        stop_token_ids: Sampling one of these ends the completion; it is kept as its last token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion asked of a generator.

    Attributes:
        id: Unique among the requests in flight, ``"<prompt id>/<sample index>/<turn>"``.
        prompt_token_ids: Tokens of the prompt, at least one.
        sampling: How to draw.
        seed: 63-bit seed of this request alone.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens sampled in one generator call.

    Attributes:
        request_id: ``GenerationRequest.id``.
        token_ids: Sampled tokens, the stop token included.
        logprobs: One natural-log probability per token, under the distribution that it was drawn from.
        finish_reason: Why it ended.
        policy_versions: Segments ``(first_token, version)``: from that token on, these weights sampled.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, its completion, and its text."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    text: str


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of a rollout.

    Attributes:
        total: What the algorithm sees.
        parts: Unweighted value of every part, by name; logged.
        per_turn: One value per turn, for algorithms that credit turns.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    per_turn: tuple[float, ...] | None = None


@dataclass(slots=True)
class Rollout:
    """A whole interaction from one prompt.

    Attributes:
        prompt: Where it started.
        sample_index: Its index in the group, 0 <= sample_index < group_size.
        seed: The seed of its first turn.
        turns: At least one.
        reward: None until scored, and when the reward failed (``reward_error`` says why).
        reward_error: Why there is no reward.
    """

    prompt: Prompt
    sample_index: int
    seed: int
    turns: list[Turn]
    reward: Reward | None = None
    reward_error: str | None = None

    @property
    def text(self) -> str:
        """Text of the last completion."""
        return self.turns[-1].text

    @property
    def is_truncated(self) -> bool:
        """True when the last completion ended by a length limit."""
        return self.turns[-1].completion.finish_reason is FinishReason.LENGTH


@dataclass(slots=True)
class Group:
    """Sibling rollouts of one prompt.

    Attributes:
        prompt: Their prompt.
        index: Its position in the global draw (the cursor).
        rollouts: The siblings, by ``sample_index``.
        prompt_token_ids: The prompt as the policy sees it, after the chat template.
        baseline: A greedy rollout of the same prompt, where the algorithm asks for one.
    """

    prompt: Prompt
    index: int
    rollouts: list[Rollout]
    prompt_token_ids: tuple[int, ...] = ()
    baseline: Rollout | None = None


@dataclass(slots=True)
class Sample:
    """One trainable token sequence cut from a rollout, N tokens long.

    Attributes:
        token_ids: Prompt and completion tokens, N of them.
        loss_mask: N booleans, True where a token is trained (never at index 0).
        generator_logprobs: N floats; 0.0 where ``loss_mask`` is False.
        reward: Total reward of the rollout.
        group_index: ``Group.index`` of its group; equal for siblings.
        sample_index: ``Rollout.sample_index``.
        is_truncated: Whether the rollout ended by a length limit.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    generator_logprobs: list[float]
    reward: float
    group_index: int
    sample_index: int
    is_truncated: bool


@dataclass(slots=True)
class WeightUpdate:
    """New weights for a generator, as a stream.

    Attributes:
        kind: ``"full"``: every tensor of the model, by its Hugging Face name. ``"delta"``: those that may
            differ from ``base_version``; the generator keeps its others. ``"lora"``: low-rank adapters under
            PEFT's names, B times its factor, to be added to the weights of the last full update.
        version: The ``policy_version`` of these weights.
        base_version: The version that a delta applies to; None for a full update.
        tensors: Pairs ``(name, full tensor)``. It is consumed once; every rank sees the same order of
            names and must consume all of it, because producing it takes collectives.
    """

    kind: Literal["full", "delta", "lora"]
    version: int
    base_version: int | None
    tensors: Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """What a generator received in one :class:`WeightUpdate`.

    Attributes:
        version: ``WeightUpdate.version``.
        checksums: Integer checksum (:func:`titan_rl.functional.checksum.tensor_checksum`) by name, as
            computed by the generator on what arrived.
        unwritten: Parameters of the generator's own model that nothing was written to, though the update
            should have: after a delta those that it reached in part.
    """

    version: int
    checksums: Mapping[str, int]
    unwritten: tuple[str, ...] = ()
