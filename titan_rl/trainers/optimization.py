"""The batch of one optimiser step: aligned over ranks, scored, forward-backward, metrics reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.algorithms.loss import Loss
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.correction import effective_sample_fraction
from titan_rl.policy.teacher import Teacher
from titan_rl.policy.token_scores import LogprobScorer, token_scores
from titan_rl.resilience import faults
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.sharded_model import Hidden, ShardedModel
from titan_rl.trainers.deal import Deal
from titan_rl.types import Sample

_EMPTY_LENGTH = 8
_LOSSES = ("loss/mean", "policy_loss/mean")


@dataclass(slots=True)
class StepBatch:
    """This rank's micro-batches of one optimiser step, as many as every other rank has.

    Attributes:
        micro_batches: On the training device.
        num_loss_tokens: Trained tokens of the step over all ranks.
        num_samples: Samples of the step over all ranks.
        num_computed_tokens: Trained tokens that are in a micro-batch, over all ranks; fewer than
            ``num_loss_tokens`` when samples without a gradient are left out.
        samples: Those that this rank trains, which ``sample_index`` of the micro-batches counts.
        deal: How they came here; None where each rank trains what it generated.
        old_logprobs: One ``[B, T]`` per micro-batch, or empty when the policy itself is the old policy.
        ref_logprobs: One ``[B, T]`` per micro-batch, or empty without a reference.
        values: One ``[B, T]`` per micro-batch, or empty without a critic.
        returns: The same, what the critic is trained towards.
    """

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    num_samples: int
    num_computed_tokens: int = 0
    samples: Sequence[Sample] = ()
    deal: Deal | None = None
    old_logprobs: list[torch.Tensor] = field(default_factory=list)
    ref_logprobs: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    returns: list[torch.Tensor] = field(default_factory=list)

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        """Everything that a micro-batch was trained on, by name.

        Args:
            number: Of the micro-batch.
        """
        found = self.micro_batches[number].tensors()
        for name in ("old_logprobs", "ref_logprobs", "values", "returns"):
            rows = getattr(self, name)
            if rows:
                found[name] = rows[number]
        return found


def align_ranks(
    micro_batches: Sequence[MicroBatch],
    *,
    num_samples: int,
    collectives: Collectives,
    device: torch.device,
    num_loss_tokens: int | None = None,
    empty_shape: tuple[int, int] = (1, _EMPTY_LENGTH),
) -> StepBatch:
    """Give every rank the same number of micro-batches and the global counts of the step.

    A rank with fewer gets empty ones, whose loss is zero, so that all collectives of the model match.

    Args:
        micro_batches: This rank's, possibly none.
        num_samples: This rank's samples.
        collectives: Of the run.
        device: Where training happens.
        num_loss_tokens: This rank's trained tokens, those left out of ``micro_batches`` included; by default
            nothing is left out.
        empty_shape: Rows and tokens of an empty micro-batch.
    """
    computed = sum(batch.num_loss_tokens for batch in micro_batches)
    tokens = computed if num_loss_tokens is None else num_loss_tokens
    sums = collectives.reduce({"tokens": tokens, "computed": computed, "samples": num_samples}, "sum")
    count = int(collectives.reduce_scalar(len(micro_batches), "max"))
    if sums["tokens"] and not count:
        count = 1  # a step whose gradient is zero is still a step: moments decay, the schedule goes on
    padded = [*micro_batches] + [MicroBatch.empty(*empty_shape) for _ in range(count - len(micro_batches))]
    return StepBatch(
        micro_batches=[batch.to(device) for batch in padded],
        num_loss_tokens=int(sums["tokens"]),
        num_samples=int(sums["samples"]),
        num_computed_tokens=int(sums["computed"]),
    )


def score_batch(batch: StepBatch, *, old: LogprobScorer | None, reference: LogprobScorer | None) -> None:
    """Fill in old and reference log-probabilities, without grad. Collective.

    Args:
        batch: Changed in place.
        old: Scores under the policy as it is now, or None if not needed.
        reference: Scores under the reference, or None.
    """
    if old is not None:
        batch.old_logprobs = old(batch.micro_batches)
    faults.at("old_logprobs", values=batch.old_logprobs)
    if reference is not None:
        batch.ref_logprobs = reference(batch.micro_batches)
    faults.at("ref_logprobs", values=batch.ref_logprobs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimiser step did.

    Attributes:
        is_applied: False when weights, schedule and version are unchanged: no trained token, a gradient that
            is not finite, or the critic's warm-up.
        grad_norm: Global gradient norm before clipping.
        metrics: The loss's metrics over all ranks, by name (``loss/...``).
    """

    is_applied: bool
    grad_norm: float
    metrics: dict[str, float]


def forward_backward(
    model: ShardedModel,
    loss_fn: Loss,
    batch: StepBatch,
    *,
    temperature: float,
    max_tokens: int,
    teacher: Teacher | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Accumulate the gradient of the step's loss over this rank's micro-batches.

    FSDP sums gradients over ranks and autograd over micro-batches; each micro-batch's loss is divided by the
    global count, so the sum is the global mean.

    Args:
        model: The policy.
        loss_fn: The loss.
        batch: Scored micro-batches.
        temperature: Of sampling and scoring.
        max_tokens: Longest completion that can be sampled.
        teacher: What the loss distils from, or None.

    Returns:
        The loss's metrics of each micro-batch: this rank's parts of sums, or maxima.
    """

    with nullcontext() if teacher is None else teacher.comparing(batch.micro_batches) as compare:

        def loss(index: int, hidden: Hidden) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            micro_batch = batch.micro_batches[index]
            scores = token_scores(
                model,
                hidden,
                micro_batch,
                temperature=temperature,
                with_entropy=True,
                divergence=None if compare is None else compare(index),
            )
            faults.at("forward_backward", index, values=[scores.logprobs])
            output = loss_fn(
                LossInputs(
                    policy_logprobs=scores.logprobs,
                    advantages=micro_batch.advantages,
                    loss_mask=micro_batch.loss_mask,
                    sample_index=micro_batch.sample_index,
                    generator_logprobs=micro_batch.generator_logprobs,
                    num_loss_tokens=batch.num_loss_tokens,
                    num_samples=batch.num_samples,
                    max_tokens=max_tokens,
                    old_logprobs=batch.old_logprobs[index] if batch.old_logprobs else None,
                    ref_logprobs=batch.ref_logprobs[index] if batch.ref_logprobs else None,
                    entropy=_entropy(scores.entropy, with_grad=loss_fn.entropy.coefficient > 0),
                    teacher_kl=scores.teacher_kl,
                )
            )
            return output.loss, output.metrics

        return model.forward_backward(batch.micro_batches, loss)


def _entropy(entropy: torch.Tensor | None, *, with_grad: bool) -> torch.Tensor | None:
    """Detached, its share of the backward pass is skipped."""
    return entropy if entropy is None or with_grad else entropy.detach()


def reduce_metrics(
    parts: Sequence[dict[str, torch.Tensor]], batch: StepBatch, collectives: Collectives
) -> dict[str, float]:
    """Put the metrics of all micro-batches and ranks together.

    ``name/mean`` holds parts of a mean over all trained tokens, which are added up; ``name/max`` holds
    maxima. The losses stay means over all trained tokens. The other means are taken over the tokens that were
    computed, because of those left out nothing is known.

    Args:
        parts: One dict per micro-batch, all with the same names.
        batch: The step, for its counts.
        collectives: Of the run.

    Returns:
        ``loss/name`` for means and ``loss/name_max`` for maxima; empty when nothing was computed.
    """
    if not batch.num_computed_tokens:
        return {}
    over_computed = batch.num_loss_tokens / batch.num_computed_tokens
    stacked: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            stacked.setdefault(name, []).append(float(value))
    sums = {
        name: math.fsum(values) * (1.0 if name in _LOSSES else over_computed)
        for name, values in stacked.items()
        if name.endswith("/mean")
    }
    maxima = {name: max(values) for name, values in stacked.items() if name.endswith("/max")}
    reduced: dict[str, Any] = collectives.reduce(sums, "sum") | collectives.reduce(maxima, "max")
    square = reduced.pop("correction_weight_square/mean", None)
    if square is not None:
        effective = effective_sample_fraction(reduced["correction_weight/mean"], square)
        reduced["effective_sample_fraction/mean"] = effective
    return {
        f"loss/{name.removesuffix('/mean').replace('/max', '_max')}": value for name, value in reduced.items()
    }
