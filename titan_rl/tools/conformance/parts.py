"""Losses and advantages that other frameworks have and that we can compute, but offer in no registry.

They exist to be compared; an algorithm of a run can name them like a user's own part all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from titan_rl.algorithms.advantages import per_group
from titan_rl.algorithms.interfaces import GroupRewards, LossInputs, Needs, SurrogateOutput, required
from titan_rl.algorithms.ratios import SequenceRatio
from titan_rl.algorithms.surrogates import Clipped
from titan_rl.functional.advantages import best_of_group
from titan_rl.functional.divergence_surrogate import (
    binary_kl_masked,
    quadratic_surrogate,
    total_variation_masked,
)
from titan_rl.functional.ratio import Ratio
from titan_rl.functional.sample_surrogate import gamma_weighted_surrogate


class DualClipped(Clipped):
    """The clipped surrogate with the dual bound on."""

    @dataclass(kw_only=True, slots=True)
    class Config(Clipped.Config):
        """Bounds of the ratio."""

        clip_dual: Annotated[float, Gt(1)] = 3.0
        """Largest ratio that a token with a negative advantage is pushed down from."""


class SequenceProduct(SequenceRatio):
    """The importance weight of a whole sample: the product of its token ratios."""

    @dataclass(kw_only=True, slots=True)
    class Config(SequenceRatio.Config):
        """How the ratio of a sequence is formed."""

        length_normalise: bool = False
        """Divide the sequence's log-ratio by its number of tokens."""
        token_gradient: bool = False
        """The sequence's value with each token's own gradient."""


class SequenceWholeGradient(SequenceRatio):
    """The geometric mean of a sample's ratios, with its own gradient at every token (GSPO's first form)."""

    @dataclass(kw_only=True, slots=True)
    class Config(SequenceRatio.Config):
        """How the ratio of a sequence is formed."""

        token_gradient: bool = False
        """The sequence's value with each token's own gradient."""


class TotalVariationMasked:
    """:func:`~titan_rl.functional.divergence_surrogate.total_variation_masked` with all its arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How far a token's probability may move."""

        max_decrease: Annotated[float, Ge(0), Le(1)] = 0.2
        """Largest decrease of a probability that is still pushed further."""
        max_increase: Annotated[float, Ge(0), Le(1)] = 0.2
        """Largest increase of a probability that is still pushed further."""
        max_weight: Annotated[float, Gt(0)] = 20.0
        """Cap of the importance weight."""
        objective: Literal["log_probability", "ratio"] = "log_probability"
        """What stands behind the weight."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and which tokens are dropped."""
        return SurrogateOutput(
            *total_variation_masked(
                inputs.policy_logprobs,
                required(inputs.old_logprobs, "old_logprobs"),
                inputs.advantages,
                max_decrease=self.config.max_decrease,
                max_increase=self.config.max_increase,
                max_weight=self.config.max_weight,
                objective=self.config.objective,
            )
        )


class BinaryKLMasked:
    """:func:`~titan_rl.functional.divergence_surrogate.binary_kl_masked` (DPPO, binary KL)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How far a token's probability may move."""

        max_kl_decrease: Annotated[float, Ge(0)] = 0.2
        """Bound where a probability fell, in nats."""
        max_kl_increase: Annotated[float, Ge(0)] = 0.2
        """Bound where a probability rose, in nats."""
        max_weight: Annotated[float, Gt(0)] = 20.0
        """Cap of the importance weight."""
        objective: Literal["log_probability", "ratio"] = "log_probability"
        """What stands behind the weight."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and which tokens are dropped."""
        return SurrogateOutput(
            *binary_kl_masked(
                inputs.policy_logprobs,
                required(inputs.old_logprobs, "old_logprobs"),
                inputs.advantages,
                max_kl_decrease=self.config.max_kl_decrease,
                max_kl_increase=self.config.max_kl_increase,
                max_weight=self.config.max_weight,
                objective=self.config.objective,
            )
        )


class Quadratic:
    """:func:`~titan_rl.functional.divergence_surrogate.quadratic_surrogate` (DRO)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength of the pull to the old policy."""

        beta: Annotated[float, Ge(0)] = 0.5
        """Factor of half the squared log-ratio."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad; nothing is clipped."""
        old = required(inputs.old_logprobs, "old_logprobs")
        return SurrogateOutput(
            *quadratic_surrogate(inputs.policy_logprobs, old, inputs.advantages, beta=self.config.beta)
        )


class GammaWeighted:
    """:func:`~titan_rl.functional.sample_surrogate.gamma_weighted_surrogate` (VESPO)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Shape of the weight."""

        k_positive: float = 2.0
        """Power of the sample's weight where the advantage is not negative."""
        lambda_positive: float = 3.0
        """Decay rate there."""
        k_negative: float = 3.0
        """Power of the sample's weight where the advantage is negative."""
        lambda_negative: float = 2.0
        """Decay rate there."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad; nothing is clipped."""
        config = self.config
        return SurrogateOutput(
            *gamma_weighted_surrogate(
                inputs.policy_logprobs,
                ratio.log_ratio,
                inputs.advantages,
                loss_mask=inputs.loss_mask,
                sample_index=inputs.sample_index,
                k_positive=config.k_positive,
                lambda_positive=config.lambda_positive,
                k_negative=config.k_negative,
                lambda_negative=config.lambda_negative,
            )
        )


class BestOfGroup:
    """:func:`~titan_rl.functional.advantages.best_of_group` (verl's "grpo_passk")."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """At least two siblings."""
        return Needs(smallest_group=2)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantages in the order of the rewards, the groups joined."""
        return per_group(groups, best_of_group)


_HERE = "titan_rl.tools.conformance.parts"

MORE_RATIOS = {
    "sequence_product": f"{_HERE}:SequenceProduct",
    "sequence_whole_gradient": f"{_HERE}:SequenceWholeGradient",
}
MORE_SURROGATES = {
    "dual_clipped": f"{_HERE}:DualClipped",
    "total_variation_masked": f"{_HERE}:TotalVariationMasked",
    "binary_kl_masked": f"{_HERE}:BinaryKLMasked",
    "quadratic": f"{_HERE}:Quadratic",
    "gamma_weighted": f"{_HERE}:GammaWeighted",
}
MORE_ADVANTAGES = {"best_of_group": f"{_HERE}:BestOfGroup"}


# ----------------------------------------------------------------- options of functions that are no parts


@dataclass(kw_only=True, slots=True)
class Constant:
    """Table ``sample_mean_over_constant``."""

    max_tokens: Annotated[int, Ge(1)] = 1
    """Longest completion that can be sampled; T of the fixture by default."""


@dataclass(kw_only=True, slots=True)
class Whitening:
    """Table ``whiten``."""

    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the variance."""


@dataclass(kw_only=True, slots=True)
class LengthAdaptive:
    """Table ``length_adaptive_lambda``."""

    alpha: Annotated[float, Gt(0)] = 0.05
    """Share of a sample's tokens that its temporal differences reach over."""


@dataclass(kw_only=True, slots=True)
class ValueClip:
    """Table ``clipped_value_loss``."""

    clip: Annotated[float, Ge(0)] = 0.2
    """How far a value may move, in units of reward; 0 for no bound."""


@dataclass(kw_only=True, slots=True)
class SoftOverlong:
    """Table ``soft_overlong``."""

    max_tokens: Annotated[int, Ge(1)] = 1
    """Longest completion that can be sampled; T of the fixture by default."""
    overlong_buffer_tokens: Annotated[int, Ge(0)] = 0
    """Tokens before the limit from which on the reward falls; 0 is off."""
    overlong_penalty: Annotated[float, Ge(0)] = 1.0
    """Largest punishment, in units of reward."""


@dataclass(kw_only=True, slots=True)
class Baseline:
    """Table ``kto_loss``."""

    kl_baseline: Annotated[float, Ge(0)] = 0.0
    """z_0, in nats: the mean log-ratio of completions under other prompts, which a fixture does not have."""
