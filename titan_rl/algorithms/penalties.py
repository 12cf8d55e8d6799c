"""Terms of the loss beside the policy loss: KL to the reference, entropy, distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt

from titan_rl.errors import ConfigError
from titan_rl.functional import kl
from titan_rl.functional.kl_controller import adapt_coefficient

_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
}


class KLPenalty:
    """A penalty per token on KL(policy || reference), in the loss or in the reward.

    In the reward every estimator is only a value, so the unbiased k1 is the usual one. In the loss its
    gradient counts, and that of k1 has expectation 0 (:mod:`titan_rl.functional.kl`): refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength, place and estimator of the penalty, and how its strength follows a target."""

        coefficient: Annotated[float, Ge(0)] = 0.0
        """Factor of the penalty (beta); 0 is off and needs no reference model."""
        placement: Literal["loss", "reward"] = "loss"
        """Added to the loss per token (GRPO), or subtracted from the reward per token (PPO)."""
        estimator: Literal["k1", "k2", "k3"] = "k3"
        """k3: GRPO's; as a loss it has the gradient of KL(reference || policy). k2: as a loss that of
        KL(policy || reference). k1: in the reward only."""
        target: Annotated[float, Ge(0)] = 0.0
        """Mean KL per token, in nats, that an adaptive controller steers to; 0: the coefficient is fixed."""
        horizon_samples: Annotated[int, Gt(0)] = 10_000
        """Samples over which the adaptive controller changes the coefficient by at most 20 percent."""

    def __init__(self, config: Config) -> None:
        if not config.coefficient >= 0:
            raise ConfigError(
                "loss.kl.coefficient", "be 0 or more", config.coefficient, "Set 0 to train without a penalty."
            )
        if config.estimator not in _ESTIMATORS:
            raise ConfigError(
                "loss.kl.estimator", f"be one of {sorted(_ESTIMATORS)}", config.estimator, "Take k3."
            )
        if config.estimator == "k1" and config.placement == "loss":
            raise ConfigError(
                "loss.kl.estimator",
                'be "k2" or "k3" with loss.kl.placement = "loss": the gradient of k1 has expectation 0',
                config.estimator,
                'Set it to "k3", or loss.kl.placement = "reward".',
            )
        if config.target > 0 and config.coefficient == 0:
            raise ConfigError(
                "loss.kl.coefficient",
                "be above 0 with loss.kl.target, because the controller multiplies it",
                config.coefficient,
                "Set a starting value such as 0.01, or remove loss.kl.target.",
            )
        self.config = config
        self.coefficient = config.coefficient

    @property
    def is_in_reward(self) -> bool:
        """Whether it is subtracted from the reward rather than added to the loss."""
        return self.config.placement == "reward"

    def __call__(self, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """``[B, T]`` estimate in nats, without the coefficient."""
        return _ESTIMATORS[self.config.estimator](policy_logprobs, ref_logprobs)

    def adapted(self, measured: float, num_samples: int) -> float:
        """The coefficient after a mean KL per token of ``measured`` over ``num_samples`` samples."""
        config = self.config
        if config.target == 0:
            return self.coefficient
        return adapt_coefficient(
            self.coefficient,
            measured,
            target=config.target,
            num_samples=num_samples,
            horizon_samples=config.horizon_samples,
        )


class EntropyBonus:
    """Entropy of the policy, which the loss rewards: ``-coefficient * aggregate(entropy)``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength of the bonus."""

        coefficient: Annotated[float, Ge(0)] = 0.0
        """Factor of the entropy per token, in nats; 0 is off."""

    def __init__(self, config: Config) -> None:
        if not config.coefficient >= 0:
            raise ConfigError("loss.entropy.coefficient", "be 0 or more", config.coefficient, "0 is off.")
        self.coefficient = config.coefficient


class Distillation:
    """Distance to a teacher's distribution at the tokens that the policy sampled, in the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength of the term. What is compared is set in ``[teacher]``."""

        coefficient: Annotated[float, Ge(0)] = 0.0
        """Factor of KL(policy || teacher) per token; 0 is off and needs no teacher."""

    def __init__(self, config: Config) -> None:
        if not config.coefficient >= 0:
            raise ConfigError(
                "loss.distillation.coefficient", "be 0 or more", config.coefficient, "0 is off."
            )
        self.coefficient = config.coefficient
