"""The losses of ``trainer = "reward_model"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from titan_rl.algorithms.interfaces import LossOutput
from titan_rl.algorithms.preference_interfaces import (
    PreferenceInputs,
    PreferenceNeeds,
    over,
    pair_metrics,
)
from titan_rl.functional.preference import bradley_terry_loss


class BradleyTerry:
    """Likelihood that the chosen completion wins (Ouyang et al. 2022, arXiv 2203.02155, eq. 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Margin and centring."""

        use_margins: bool = True
        """Subtract the data's margins, where it has any (Touvron et al. 2023, arXiv 2307.09288, eq. 2)."""

        centring: Annotated[float, Ge(0)] = 0.0
        """Weight of the square of the sum of a pair's rewards, which keeps rewards around 0 (Eisenstein et
        al. 2023, arXiv 2312.09244). 0.01 is usual."""

    needs = PreferenceNeeds()

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's pairs."""
        chosen, rejected = inputs.chosen.values, inputs.rejected.values
        loss = bradley_terry_loss(
            chosen,
            rejected,
            margins=inputs.margins if self.config.use_margins else None,
            centring=self.config.centring,
        )
        total = over(loss.sum(), inputs.num_chosen)
        return LossOutput(total, {"loss/mean": total.detach()} | pair_metrics(chosen, rejected, inputs))


DEFAULT = BradleyTerry.Config
"""The loss of a reward-model run that names none."""
