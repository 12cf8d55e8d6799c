"""Per-token log-probabilities and entropy of a model over a micro-batch, for trained tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.logprobs import chunked_logprobs
from titan_rl.policy.teacher import TokenDivergence
from titan_rl.titan.sharded_model import Hidden, ShardedModel


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of a micro-batch.

    Attributes:
        logprobs: ``[B, T]`` fp32, natural log-probability of ``targets`` at the sampling temperature; 0 where
            not trained. With grad when the model trains.
        entropy: ``[B, T]`` fp32 entropy of the distribution in nats, or None.
        teacher_kl: ``[B, T]`` fp32 divergence from the teacher in nats, 0 where not trained, or None.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    teacher_kl: torch.Tensor | None = None


def token_scores(
    model: ShardedModel,
    hidden: Hidden,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    with_entropy: bool = False,
    divergence: TokenDivergence | None = None,
) -> TokenScores:
    """Score the trained tokens of a micro-batch from its hidden states.

    Logits exist only in chunks, only for trained tokens, and only for this rank's part of the vocabulary; see
    :func:`titan_rl.functional.logprobs.chunked_logprobs`. Collective under tensor or context parallelism.

    Args:
        model: Whose head is applied; it gives hidden states (:meth:`ShardedModel.skip_head`).
        hidden: What it gave for the micro-batch.
        micro_batch: On the model's device.
        temperature: Logits are divided by it.
        with_entropy: Also return the entropy.
        divergence: What compares with a teacher (:meth:`titan_rl.policy.teacher.Teacher.comparing`), or None
            without one.
    """
    weight = model.unsharded_head().weight
    mask = hidden.local(micro_batch.loss_mask)
    trained = hidden.states[mask]
    logprobs, entropy = chunked_logprobs(
        trained,
        weight,
        hidden.local(micro_batch.targets)[mask],
        temperature=temperature,
        with_entropy=with_entropy,
        shard=model.vocabulary,
    )

    def rows(values: torch.Tensor) -> torch.Tensor:
        return model.whole_rows(_scatter(values, mask), hidden)

    return TokenScores(
        logprobs=rows(logprobs),
        entropy=None if entropy is None else rows(entropy),
        teacher_kl=None if divergence is None else rows(divergence(trained, weight, model.vocabulary)),
    )


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put ``[N]`` values back to where the mask ``[B, t]`` is True; 0 elsewhere."""
    empty = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return empty.masked_scatter(mask, values)


class LogprobScorer:
    """A frozen or momentarily frozen model as a scorer: log-probabilities without grad."""

    def __init__(self, model: ShardedModel, *, temperature: float, without_adapters: bool = False) -> None:
        """Bind a model.

        Args:
            model: Gives hidden states.
            temperature: Logits are divided by it.
            without_adapters: Score under its frozen weights alone: the model that LoRA started from.
        """
        self._model, self._temperature, self._without_adapters = model, temperature, without_adapters

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities ``[B, T]`` fp32 of the trained tokens of every micro-batch. Collective."""

        def score(number: int, hidden: Hidden) -> torch.Tensor:
            scores = token_scores(self._model, hidden, micro_batches[number], temperature=self._temperature)
            return scores.logprobs

        with self._model.adapters_off() if self._without_adapters else nullcontext():
            return self._model.scores(micro_batches, score)
