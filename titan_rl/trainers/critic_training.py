"""The critic in the loop: values before the advantages, the value loss after them, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.value import (
    RunningMoments,
    clipped_value_loss,
    denormalised,
    normalised,
    updated_moments,
)
from titan_rl.functional.whitening import whitening_sums
from titan_rl.policy.critic import Critic, ValueInputs
from titan_rl.titan.collectives import Collectives
from titan_rl.trainers.optimization import StepBatch, reduce_metrics


class CriticTraining:
    """Scores and trains a critic on the batches of an iteration.

    With ``critic.normalise_values`` the model predicts returns in their running standard deviations from
    their running mean. The moments of the iterations before are used throughout an iteration, for values and
    targets alike; this iteration's returns enter them at its end.

    Attributes:
        critic: The model with its optimiser.
        moments: Of all returns of the iterations before.
    """

    def __init__(self, critic: Critic, collectives: Collectives) -> None:
        """Bind a critic.

        Args:
            critic: With its initial weights.
            collectives: Of the run.
        """
        self.critic, self.moments, self._collectives = critic, RunningMoments.empty(), collectives
        self._normalises = critic.config.normalise_values

    def score(self, batch: StepBatch) -> None:
        """Fill in the values of a batch, in units of reward. Collective."""
        batch.values = [self._in_rewards(self.critic(m)) for m in batch.micro_batches]

    def train_step(self, batch: StepBatch) -> dict[str, float]:
        """One optimiser step of the critic towards the batch's returns. Collective.

        Args:
            batch: With values of the start of the iteration, and returns.

        Returns:
            Metrics over all ranks.
        """
        result = self.critic.train_step(
            batch.micro_batches,
            returns=[self._in_model_units(r) for r in batch.returns],
            old_values=[self._in_model_units(v) for v in batch.values],
            num_loss_tokens=batch.num_loss_tokens,
            loss=self._loss,
        )
        reduced = reduce_metrics(result.metrics, batch, self._collectives)
        metrics = {name.replace("loss/", "critic/", 1): value for name, value in reduced.items()}
        return metrics | {"critic/grad_norm": result.grad_norm}

    def end_iteration(self, batches: Sequence[StepBatch]) -> dict[str, float]:
        """Let the returns of an iteration enter the moments. Collective.

        Args:
            batches: All of the iteration.

        Returns:
            ``critic/explained_variance``: 1 minus the variance of what the values missed over that of the
            returns, for the values of the start of the iteration; and the mean return and value.
        """
        sums: dict[str, float] = {}
        for batch in batches:
            for m, returns, values in zip(batch.micro_batches, batch.returns, batch.values, strict=True):
                for name, tensor in (("return", returns), ("value", values), ("error", returns - values)):
                    for part, value in zip(
                        ("count", "sum", "square"), whitening_sums(tensor, m.loss_mask), strict=True
                    ):
                        sums[f"{name}/{part}"] = sums.get(f"{name}/{part}", 0.0) + value
        total = self._collectives.reduce(sums, "sum")
        if not total.get("return/count"):
            return {}
        self.moments = updated_moments(
            self.moments,
            count=total["return/count"],
            total=total["return/sum"],
            total_of_squares=total["return/square"],
        )
        count = total["return/count"]

        def variance(name: str) -> float:
            return total[f"{name}/square"] / count - (total[f"{name}/sum"] / count) ** 2

        return {
            "critic/explained_variance": 1.0 - variance("error") / max(variance("return"), 1e-12),
            "critic/return_mean": total["return/sum"] / count,
            "critic/value_mean": total["value/sum"] / count,
        }

    def state_dict(self) -> dict[str, Any]:
        """The moments; the critic's own state is beside them in the checkpoint."""
        return dict(self.moments._asdict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the moments."""
        self.moments = RunningMoments(**{name: state_dict[name] for name in RunningMoments._fields})

    def _loss(self, inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        clip = self.critic.config.clip_range or None
        loss, is_clipped = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, clip=clip)
        mean = token_mean(loss, inputs.loss_mask, inputs.num_loss_tokens)
        fraction = token_mean(is_clipped.float(), inputs.loss_mask, inputs.num_loss_tokens)
        return mean, {"loss/mean": mean.detach(), "clipped_fraction/mean": fraction}

    def _in_rewards(self, values: torch.Tensor) -> torch.Tensor:
        return denormalised(values, self.moments) if self._normalises else values

    def _in_model_units(self, values: torch.Tensor) -> torch.Tensor:
        return normalised(values, self.moments) if self._normalises else values
