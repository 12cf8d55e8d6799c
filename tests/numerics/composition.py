"""Losses written as compositions of the pure functions, for the tests that compare them with a fixture.

A :class:`Loss` names functions of ``titan_rl.functional`` and their arguments; :func:`evaluate` runs it on a
:class:`Batch`. Nothing of ``titan_rl.algorithms`` takes part.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from titan_rl.functional import (
    aggregate,
    correction,
    divergence_surrogate,
    kl,
    ratio,
    sample_surrogate,
    surrogate,
)


@dataclass(frozen=True)
class Part:
    """A function by name and its hyperparameters."""

    name: str
    arguments: dict = field(default_factory=dict)

    def __str__(self):
        values = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({values})" if values else self.name


def part(name, **arguments):
    return Part(name, arguments)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """``aggregate(weights * surrogate(ratio, advantages)) + coefficient * aggregate(kl)``."""

    surrogate: Part
    aggregation: Part
    ratio: Part = Part("token_ratio")
    corrections: tuple[Part, ...] = ()
    kl: Part | None = None
    coefficient: float = 0.0
    old: str = "old"
    """Whose log-probabilities are the old policy's in the ratio: "old" or "generator"."""
    kl_to: str = "ref"
    """From whom the penalty keeps the policy: "ref" or "generator"."""

    def __str__(self):
        parts = [self.ratio, self.surrogate, *self.corrections, self.aggregation]
        text = " / ".join(str(one) for one in parts)
        if self.old != "old":
            text += f" / old policy: {self.old}"
        return f"{text} / + {self.coefficient} {self.kl} to {self.kl_to}" if self.kl else text


class Batch(NamedTuple):
    """One micro-batch that is the whole step; ``[B, T]`` tensors."""

    policy: torch.Tensor
    old: torch.Tensor
    generator: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sample_index: torch.Tensor
    num_samples: int
    num_loss_tokens: int | None = None
    """Of the step; None when this is all of it."""

    def masked(self):
        """0 where a token is not trained: the product selects before any arithmetic too."""
        names = ("policy", "old", "generator", "ref", "advantages")
        return self._replace(**{n: torch.where(self.loss_mask, getattr(self, n), 0.0) for n in names})

    @property
    def segments(self):
        return {"loss_mask": self.loss_mask, "sample_index": self.sample_index}


class Outcome(NamedTuple):
    loss: torch.Tensor
    gradient: torch.Tensor
    fired: dict[str, torch.Tensor]
    """By the name of a flag, ``[B, T]`` bool."""


_SURROGATES = {
    "clipped_surrogate": lambda f, b, r, a: f(r.ratio, b.advantages, **a),
    "dual_clipped_surrogate": lambda f, b, r, a: f(r.ratio, b.advantages, **a),
    "soft_gated_surrogate": lambda f, b, r, a: f(r.ratio, b.advantages, **a),
    "reinforce_surrogate": lambda f, b, r, a: f(b.policy, b.advantages, **a),
    "clipped_weight_surrogate": lambda f, b, r, a: f(b.policy, r.ratio, b.advantages, **a),
    "geometric_mean_surrogate": lambda f, b, r, a: f(r.log_ratio, b.advantages, **b.segments, **a),
    "gamma_weighted_surrogate": lambda f, b, r, a: f(b.policy, r.log_ratio, b.advantages, **b.segments, **a),
    "total_variation_masked": lambda f, b, r, a: f(b.policy, b.old, b.advantages, **a),
    "binary_kl_masked": lambda f, b, r, a: f(b.policy, b.old, b.advantages, **a),
    "quadratic_surrogate": lambda f, b, r, a: f(b.policy, b.old, b.advantages, **a),
}


def evaluate(loss, batch):
    """Loss, its gradient with respect to the policy's log-probabilities, and which bounds were at work."""
    policy = batch.policy.clone().requires_grad_()
    total, fired = value(loss, batch._replace(policy=policy))
    (gradient,) = torch.autograd.grad(total, policy)
    return Outcome(total.detach(), gradient, fired)


def value(loss, batch):
    """The loss with grad, and which bounds were at work."""
    batch = batch._replace(old=batch.generator if loss.old == "generator" else batch.old).masked()
    ratios = _ratio(loss.ratio, batch)
    name = loss.surrogate.name
    function = next(
        getattr(module, name)
        for module in (surrogate, sample_surrogate, divergence_surrogate)
        if hasattr(module, name)
    )
    tokens = _SURROGATES[name](function, batch, ratios, loss.surrogate.arguments)
    fired = dict(zip(tokens._fields[1:], tokens[1:], strict=True))
    values = tokens.loss
    for one in loss.corrections:
        weights = correct(one, batch)
        values = values * weights.weights
        fired[f"{one.name}.is_truncated"] = weights.is_truncated
        fired[f"{one.name}.is_rejected"] = weights.is_rejected
    total = _aggregate(loss.aggregation, batch, values)
    if loss.kl is not None:
        estimate = getattr(kl, loss.kl.name)(batch.policy, getattr(batch, loss.kl_to))
        total = total + loss.coefficient * _aggregate(loss.aggregation, batch, estimate)
    return total, fired


def correct(one, batch):
    """Weights of one correction; a rejection is a correction whose weights are 0 and 1."""
    mask, arguments = batch.loss_mask, dict(one.arguments)
    log_ratio = correction.mismatch_log_ratio(batch.old, batch.generator, mask)
    function = getattr(correction, one.name)
    if "sample" in one.name:
        arguments["sample_index"] = batch.sample_index
    if one.name == "reject_negative_samples_by_mean_k1":
        log_ratio = correction.mismatch_log_ratio(batch.policy, batch.old, mask)
        arguments["advantages"] = batch.advantages
    result = function(log_ratio, mask, **arguments)
    if isinstance(result, torch.Tensor):
        return correction.Weights((mask & ~result).to(batch.old.dtype), torch.zeros_like(mask), result)
    return result


def _ratio(one, batch):
    segments = batch.segments if one.name != "token_ratio" else {}
    return getattr(ratio, one.name)(batch.policy, batch.old, **segments, **one.arguments)


def _aggregate(one, batch, values):
    mask, name = batch.loss_mask, one.name
    if name == "token_mean":
        return aggregate.token_mean(values, mask, batch.num_loss_tokens or mask.sum())
    if name == "sample_mean_of_token_sums":
        return aggregate.sample_mean_of_token_sums(values, mask, batch.num_samples)
    extra = {"sample_index": batch.sample_index} if name == "sample_mean_of_token_means" else one.arguments
    return getattr(aggregate, name)(values, mask, num_samples=batch.num_samples, **extra)
