"""What the parts of an algorithm receive and return, and what each kind of part must do.

A policy loss is advantage x ratio x surrogate x correction x aggregation x KL. Every part but the advantage
sees the same :class:`LossInputs`, whole rows, so a part that needs whole samples (a ratio per sequence, a
mean over sequences) has the same signature as one that does not. The maths is in :mod:`titan_rl.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch

from titan_rl.functional.ratio import Ratio


@dataclass(frozen=True, slots=True)
class Needs:
    """What a composition asks of the rest of the system.

    Attributes:
        old: Log-probabilities of the policy at the start of the iteration.
        reference: Log-probabilities of the frozen reference.
        critic: A value model.
        teacher: A model to distil from.
        greedy_baseline: One greedy rollout per prompt.
        smallest_group: Fewest rollouts with a reward that a group must have to be trained on.
    """

    old: bool = False
    reference: bool = False
    critic: bool = False
    teacher: bool = False
    greedy_baseline: bool = False
    smallest_group: int = 1

    def __or__(self, other: Needs) -> Needs:
        """What both need together.

        >>> Needs(old=True) | Needs(smallest_group=2)
        Needs(old=True, reference=False, critic=False, teacher=False, greedy_baseline=False, smallest_group=2)
        """
        return Needs(
            old=self.old or other.old,
            reference=self.reference or other.reference,
            critic=self.critic or other.critic,
            teacher=self.teacher or other.teacher,
            greedy_baseline=self.greedy_baseline or other.greedy_baseline,
            smallest_group=max(self.smallest_group, other.smallest_group),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """All that a policy loss may use of one micro-batch. ``[B, T]`` tensors on one device.

    Aligned with the prediction, as in :class:`titan_rl.batching.micro_batch.MicroBatch`. What stands at
    tokens that are not trained is never looked at, NaN and infinity included.

    Attributes:
        policy_logprobs: ``[B, T]`` fp32, with grad.
        advantages: ``[B, T]`` fp32, no grad.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, -1 in the padding; unique to a sample within the micro-batch.
        generator_logprobs: ``[B, T]`` fp32, as the generator reported them.
        num_loss_tokens: Trained tokens of the optimiser step over all ranks and micro-batches, counted from
            ``loss_mask`` before any correction: an int or a 0-d tensor.
        num_samples: Samples of the optimiser step over all ranks and micro-batches, the same way.
        max_tokens: Longest completion that can be sampled, ``sampling.max_tokens``.
        old_logprobs: ``[B, T]`` fp32, or None for the policy's own values, which is exact while the weights
            are still those of the start of the iteration.
        ref_logprobs: ``[B, T]`` fp32 under the reference, or None.
        entropy: ``[B, T]`` nats, with grad where an entropy bonus asks for it, or None.
        teacher_kl: ``[B, T]`` nats, with grad, distance to the teacher's distribution, or None without one.
    """

    policy_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sample_index: torch.Tensor
    generator_logprobs: torch.Tensor
    num_loss_tokens: torch.Tensor | int
    num_samples: torch.Tensor | int
    max_tokens: int
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    teacher_kl: torch.Tensor | None = None

    def check_shapes(self) -> None:
        """Raise ValueError unless all token tensors are ``[B, T]`` and ``loss_mask`` is bool."""
        if self.loss_mask.dtype != torch.bool or self.loss_mask.ndim != 2:
            got = f"{self.loss_mask.dtype} of shape {tuple(self.loss_mask.shape)}"
            raise ValueError(f"loss_mask must be bool of shape [B, T]; got {got}.")
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name in ("num_loss_tokens", "num_samples", "max_tokens"):
                if isinstance(value, torch.Tensor) and value.ndim != 0:
                    raise ValueError(f"{part.name} must be 0-d; got shape {tuple(value.shape)}.")
            elif value is not None and value.shape != self.loss_mask.shape:
                expected, got = tuple(self.loss_mask.shape), tuple(value.shape)
                raise ValueError(f"{part.name} must have the shape of loss_mask, {expected}; got {got}.")

    def masked(self) -> Self:
        """Zero every value outside ``loss_mask`` and fill in ``old_logprobs``.

        Selecting comes before any arithmetic: multiplying by the mask afterwards would turn an infinite
        log-probability into NaN, and its gradient too.
        """

        def select(values: torch.Tensor) -> torch.Tensor:
            return torch.where(self.loss_mask, values, 0.0)

        old = self.policy_logprobs if self.old_logprobs is None else self.old_logprobs
        return replace(
            self,
            policy_logprobs=select(self.policy_logprobs),
            advantages=select(self.advantages),
            generator_logprobs=select(self.generator_logprobs),
            old_logprobs=select(old.detach()),
            ref_logprobs=None if self.ref_logprobs is None else select(self.ref_logprobs.detach()),
            entropy=None if self.entropy is None else select(self.entropy),
            teacher_kl=None if self.teacher_kl is None else select(self.teacher_kl),
        )


def required(values: torch.Tensor | None, name: str) -> torch.Tensor:
    """The tensor, or a ValueError that names what the caller left out."""
    if values is None:
        raise ValueError(f"{name} must be given to this part; got None.")
    return values


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a policy loss returns.

    Attributes:
        loss: 0-d, with grad: this micro-batch's share of the loss of the step. Shares add up over
            micro-batches and ranks.
        metrics: 0-d tensors without grad. A name that ends in ``/mean`` is already divided by the global
            count: reduce it over micro-batches and ranks by a sum. ``/max``: by a maximum.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class SurrogateOutput(NamedTuple):
    """A policy loss per token."""

    loss: torch.Tensor
    """[B, T], with grad."""
    is_clipped_low: torch.Tensor
    """[B, T] bool, True where the lower bound took the gradient away."""
    is_clipped_high: torch.Tensor
    """[B, T] bool, True where the upper bound did."""
    is_dual_clipped: torch.Tensor | None = None
    """[B, T] bool, True where a dual bound did; None without one."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an advantage sees of one group: its rollouts that have a reward, in their order.

    Attributes:
        rewards: Total reward of each rollout, after ``[shaping]``; at least one.
        num_tokens: Sampled tokens of each rollout.
        baseline: Reward of the greedy rollout of the same prompt; None unless ``needs.greedy_baseline``.
    """

    rewards: Sequence[float]
    num_tokens: Sequence[int] = ()
    baseline: float | None = None


class Advantage(Protocol):
    """From the rewards of groups to one advantage per rollout, the same on all its tokens."""

    @property
    def needs(self) -> Needs:
        """What it asks of the rest of the system."""
        ...

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantages of all rollouts: in the order of the rewards, the groups joined. Groups are whole."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRewards:
    """What an advantage per token sees of one micro-batch. ``[B, T]``, aligned with the prediction.

    Attributes:
        rewards: ``[B, T]`` fp32. What ``__call__`` gave a rollout stands at its last trained token; a KL
            penalty in the reward is already subtracted at every trained token.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, -1 in the padding.
        values: ``[B, T]`` fp32 value of the state in which the token was sampled; None without a critic.
    """

    rewards: torch.Tensor
    loss_mask: torch.Tensor
    sample_index: torch.Tensor
    values: torch.Tensor | None = None


class TokenCredit(NamedTuple):
    """What an advantage per token gives to one micro-batch."""

    advantages: torch.Tensor
    """[B, T] fp32, 0 where not trained."""
    returns: torch.Tensor | None
    """[B, T] fp32, what the critic is trained towards; None for no critic."""


@runtime_checkable
class TokenAdvantage(Protocol):
    """An advantage that differs from token to token. It is assigned after scoring."""

    @property
    def needs(self) -> Needs:
        """What it asks of the rest of the system."""
        ...

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """What each rollout earns with its last token: its reward, perhaps against a baseline."""
        ...

    def over_tokens(self, tokens: TokenRewards) -> TokenCredit:
        """Advantages of all trained tokens of a micro-batch; whole samples, no grad."""
        ...


class RatioPart(Protocol):
    """The importance ratio of the policy against the old policy."""

    def __call__(self, inputs: LossInputs) -> Ratio:
        """``[B, T]`` ratio with grad, its logarithm, and where that had to be bounded."""
        ...


class Surrogate(Protocol):
    """The policy loss per token, before corrections and aggregation.

    One whose gradient does not account for what the weights have moved since the completions were sampled
    says so with an attribute ``is_on_policy_only = True``: several steps per iteration are then refused. One
    that gives a token of advantage 0 a loss and a gradient of 0 says so with
    ``is_zero_at_zero_advantage = True``: samples of groups with equal rewards then need not be computed.
    """

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and where it is clipped."""
        ...


class CorrectionOutput(NamedTuple):
    """Factors of the loss per token."""

    weights: torch.Tensor
    """[B, T] fp32, no grad; 0 rejects a token."""
    is_truncated: torch.Tensor
    """[B, T] bool, True where a weight was cut to its bound."""
    is_rejected: torch.Tensor
    """[B, T] bool, True where a token is rejected."""


class Correction(Protocol):
    """Weights, or a rejection, for the mismatch between the generator and the policy."""

    def __call__(self, inputs: LossInputs) -> CorrectionOutput | None:
        """Factors of the loss per token, or None for all ones."""
        ...


class Aggregation(Protocol):
    """From values per token to this micro-batch's share of one number of the optimiser step."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        """0-d; divided by a global count, so that shares add up over micro-batches and ranks."""
        ...


class KL(Protocol):
    """A penalty per token on the distance to the reference, in the loss or in the reward."""

    coefficient: float
    """Its factor, which a controller may change; at 0 from the start no reference is needed."""

    @property
    def is_in_reward(self) -> bool:
        """Whether it is subtracted from the reward rather than added to the loss."""
        ...

    def __call__(self, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """``[B, T]`` estimate, without the coefficient; with grad where ``policy_logprobs`` has."""
        ...

    def adapted(self, measured: float, num_samples: int) -> float:
        """The coefficient for the next iteration, after a mean KL per token over that many samples."""
        ...
