"""The TorchTitan model itself as a generator: small and exact.

For tests, for machines without vLLM, and for architectures that vLLM does not know. Here: the batch that is
decoded. Not here: the model and its cache
(:mod:`titan_rl.titan.cached_model`), and the choice of tokens (:mod:`titan_rl.generation.sampling`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge

from titan_rl.errors import GeneratorError
from titan_rl.functional.checksum import parameter_checksums, tensor_checksum
from titan_rl.generation.in_process import InProcessGenerator
from titan_rl.generation.protocol import GeneratorContext
from titan_rl.generation.sampling import draw, processed_logprobs
from titan_rl.titan.cached_model import build_cached_model
from titan_rl.titan.weight_sink import WeightSink
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    WeightReceipt,
    WeightUpdate,
)


@dataclass(slots=True)
class _Sequence:
    """One request and what was sampled for it so far."""

    request: GenerationRequest
    noise: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def finish_reason(self) -> FinishReason | None:
        """Why it is finished, or None."""
        sampling = self.request.sampling
        if self.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == sampling.max_tokens else None


class LocalGenerator(InProcessGenerator):
    """The policy's architecture with a KV cache; see :class:`titan_rl.generation.protocol.Generator`.

    Each rank holds a whole copy and serves its own requests; ranks need not step together. Requests join the
    batch when a row is free and leave it when they finish. Every request has its own source of noise, so its
    tokens depend on no other request, with one reservation: matrix kernels round differently for different
    batch sizes. Log-probabilities can therefore differ in their last bits (measured: 3e-6 in fp32, 1e-2 in
    bf16), and a token when its draw falls within that distance of a boundary between two tokens: never seen
    in fp32, in a third of all 16-token completions in bf16. The same calls in the same order give the same
    bits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """``[generator]`` with ``type = "local"``."""

        max_num_seqs: Annotated[int, Ge(1)] = 64
        """Most requests that are decoded together; further ones wait. The KV cache grows with it."""
        max_num_batched_tokens: Annotated[int, Ge(1)] = 8192
        """Most tokens, padding included, of one forward pass over prompts; a longer prompt goes alone."""

    def __init__(self, config: Config, context: GeneratorContext) -> None:
        """Build the model; no communication. It serves nothing until the first :meth:`load_weights`.

        Args:
            config: ``[generator]``.
            context: The run. Used are ``model_config``, ``adapter``, ``max_model_len`` and ``dtype``.

        Raises:
            ConfigError: The model's attention is not plainly causal.
        """
        super().__init__(context.max_model_len, is_stopping=context.is_stopping)
        self._config = config
        self._adapter = context.adapter
        self._vocab_size = context.model_config.vocab_size
        self._model = build_cached_model(
            context.model_config,
            dtype=context.dtype,
            max_rows=config.max_num_seqs,
            max_tokens=context.max_model_len,
        )
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []  # index = row of the cache

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See :meth:`titan_rl.generation.protocol.Generator.load_weights`.

        A model that ties its head to the embedding may receive either name or both.

        Raises:
            GeneratorError: Requests are in flight, or a name arrived twice, is unknown to the model, or came
                with another shape.
        """
        self._require_idle("load_weights")
        self._require_base(update)
        if update.kind == "lora":
            raise GeneratorError("The local generator must get merged weights; got adapters alone.")
        self._policy_version, self._written = None, {}
        self._model.drop_cache()
        sink = WeightSink(self._model.model, self._adapter, is_partial=update.kind == "delta")
        checksums: dict[str, int] = {}
        for name, tensor in update.tensors:
            checksums[name] = tensor_checksum(tensor)
            sink.write(name, tensor)
        unwritten = sink.finish()
        self._written = self._checksums()
        if not unwritten:
            self._policy_version = update.version
        return WeightReceipt(version=update.version, checksums=checksums, unwritten=unwritten)

    def prompt_logprobs(
        self, token_ids: Sequence[tuple[int, ...]], temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """See :meth:`titan_rl.generation.protocol.Generator.prompt_logprobs`; any temperature above 0."""
        self._require_weights()
        self._require_idle("prompt_logprobs")
        for tokens in token_ids:
            if not 2 <= len(tokens) <= self._max_model_len or temperature <= 0:
                raise GeneratorError(
                    f"A scored sequence must have 2 to {self._max_model_len} tokens and a temperature above "
                    f"0; got {len(tokens)} tokens at {temperature:g}. Choose another probe."
                )
        return [tuple(self._model.score(tokens, temperature=temperature).tolist()) for tokens in token_ids]

    def sleep(self) -> None:
        """Drop the KV cache; the weights stay where they are."""
        self._require_idle("sleep")
        self._model.drop_cache()

    def wake_up(self) -> None:
        """Undo :meth:`sleep`: nothing to do, the cache grows again when it is needed."""

    def close(self) -> None:
        """Release the model. Nothing may be called afterwards."""
        self._policy_version = None
        del self._model

    def _begin(self, request: GenerationRequest) -> None:
        # Not torch.Generator: on a CPU it keeps 32 bits of the seed.
        self._waiting.append(_Sequence(request, random.Random(request.seed)))

    def _drop(self, ids: Set[str]) -> None:
        self._waiting = deque(s for s in self._waiting if s.request.id not in ids)
        self._release([row for row, s in enumerate(self._active) if s.request.id in ids])

    def _checksums(self) -> dict[str, int]:
        return parameter_checksums(self._model.model)

    def _step(self) -> None:
        """Sample one token: of waiting requests if there is a free row, otherwise of every active one."""
        version = self._policy_version
        if version is None:
            raise GeneratorError("Weights must be loaded before a step; got none. Call load_weights first.")
        joining = self._next_to_join()
        if joining:
            first_row = len(self._active)
            prompts = [sequence.request.prompt_token_ids for sequence in joining]
            logits = self._model.prefill(prompts, first_row=first_row)
            self._active.extend(joining)
        else:
            first_row = 0
            tokens = [sequence.token_ids[-1] for sequence in self._active]
            lengths = [len(s.request.prompt_token_ids) + len(s.token_ids) - 1 for s in self._active]
            logits = self._model.decode(tokens, lengths)
        _append_tokens(self._active[first_row:], logits)
        done = []
        for row, sequence in enumerate(self._active[first_row:], start=first_row):
            reason = sequence.finish_reason()
            if reason is not None:
                done.append(row)
                self._finished.append(_completion(sequence, reason, version=version))
        self._release(done)

    def _next_to_join(self) -> list[_Sequence]:
        """Take waiting requests, oldest first, for as many rows and tokens as one pass may have."""
        joining: list[_Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        while self._waiting and len(self._active) + len(joining) < self._config.max_num_seqs:
            with_next = prompts | {self._waiting[0].request.prompt_token_ids}
            width = max(len(prompt) for prompt in with_next)
            if joining and width * len(with_next) > self._config.max_num_batched_tokens:
                break
            joining.append(self._waiting.popleft())
            prompts = with_next
        return joining

    def _release(self, rows: Sequence[int]) -> None:
        """Free rows (ascending); the last row moves into each hole."""
        for row in reversed(rows):
            last = self._active.pop()
            if row < len(self._active):
                self._model.move(len(self._active), target=row)
                self._active[row] = last

    def _check_request(self, request: GenerationRequest) -> None:
        super()._check_request(request)
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._vocab_size:
            raise GeneratorError(
                f"Request {request.id!r} must have prompt tokens below {self._vocab_size}; got "
                f"{max(request.prompt_token_ids)}. The tokenizer belongs to another model."
            )
        _check_sampling(request.id, request.sampling)


def _check_sampling(request_id: str, sampling: SamplingParams) -> None:
    in_range = {
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_p": 0 <= sampling.min_p <= 1,
    }
    for name, is_fine in in_range.items():
        if not is_fine:
            raise GeneratorError(
                f"Request {request_id!r} must have a {name} in its range; got {getattr(sampling, name)}. "
                f"See SamplingParams.{name}."
            )


def _append_tokens(sequences: Sequence[_Sequence], logits: torch.Tensor) -> None:
    """Choose a token for each sequence from its row of ``logits [M, V]``."""
    sampling = [sequence.request.sampling for sequence in sequences]
    logprobs = processed_logprobs(logits, sampling)
    is_greedy = [params.temperature == 0 for params in sampling]
    tokens = logprobs.argmax(-1)
    if not all(is_greedy):
        drawn = draw(logprobs, [sequence.noise.random() for sequence in sequences])
        tokens = torch.where(torch.tensor(is_greedy, device=logits.device), tokens, drawn)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    for sequence, token, logprob in zip(sequences, tokens.tolist(), chosen.tolist(), strict=True):
        sequence.token_ids.append(token)
        sequence.logprobs.append(logprob)


def _completion(sequence: _Sequence, reason: FinishReason, *, version: int) -> Completion:
    return Completion(
        request_id=sequence.request.id,
        token_ids=tuple(sequence.token_ids),
        logprobs=tuple(sequence.logprobs),
        finish_reason=reason,
        policy_versions=((0, version),),
    )
