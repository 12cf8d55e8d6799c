"""What a trainer does about a step whose gradient must not be applied, by ``resilience.bad_step``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_rl.errors import NonFiniteError, RollBackError
from titan_rl.resilience import evidence
from titan_rl.resilience.guard import GradientGuard
from titan_rl.resilience.skip_limit import SkipLimit
from titan_rl.titan.api import logger

if TYPE_CHECKING:
    from titan_rl.trainers.resilient import ResilientTrainer


class BadSteps:
    """Finds bad steps, keeps what caused them, and says what happens then: the same on all ranks.

    Attributes:
        guard: Judges gradient norms. Part of the checkpoint.
    """

    def __init__(self, trainer: ResilientTrainer, *, look_at: str) -> None:
        """Know of no step yet.

        Args:
            trainer: After TorchTitan has built it.
            look_at: Where causes are to be found, for messages.
        """
        config: Any = trainer.config
        self._trainer, self._look_at = trainer, f"{look_at} and at optimizer.lr"
        self._section = config.resilience
        self.guard = GradientGuard(spike_factor=self._section.spike_factor, max_norm=config.training.max_norm)
        self._limit = SkipLimit(self._section.max_skipped_steps, look_at=self._look_at)
        self._returns: Counter[int] = Counter()

    def applied(self, grad_norm: float) -> None:
        """A step changed the weights.

        Args:
            grad_norm: Of its gradient, before clipping.
        """
        self._limit.applied()
        self.guard.applied(grad_norm)

    def leave_out(self, cause: str) -> None:
        """A step changes nothing.

        Args:
            cause: Why, as a clause.

        Raises:
            NonFiniteError: more steps in a row were left out than ``resilience.max_skipped_steps``.
        """
        logger.warning("Step %d is skipped: %s.", self._trainer.step, cause)
        self._limit.skipped(cause)

    def refuse(
        self,
        cause: str,
        *,
        losses: Sequence[float],
        tensors: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> None:
        """Leave out a step whose gradient must not be applied, and do what was configured. Collective.

        Args:
            cause: What is wrong with the gradient, as a clause.
            losses: Of this rank's micro-batches.
            tensors: From the number of a micro-batch to its contents.

        Raises:
            NonFiniteError: the run ends.
            RollBackError: it goes back to its newest checkpoint.
        """
        self._keep(cause, losses=losses, tensors=tensors)
        self.leave_out(cause)
        self.act(cause)

    def _keep(
        self,
        cause: str,
        *,
        losses: Sequence[float],
        tensors: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> None:
        """Write the micro-batch that looks worst, on the rank where it looks worst. Collective."""
        trainer = self._trainer
        badness = evidence.badness(losses)
        largest = trainer.control.largest(badness)
        if not losses or badness < largest:
            return
        number = evidence.worst(losses)
        facts = {
            "step": str(trainer.step),
            "micro_batch": str(number),
            "loss": str(losses[number]),
            "cause": cause,
        }
        try:
            path = evidence.keep(
                Path(trainer.config.dump_folder),
                step=trainer.step,
                rank=int(os.environ["RANK"]),
                tensors=tensors(number),
                facts=facts,
            )
        except OSError as error:
            logger.warning("The micro-batch of the bad step could not be kept: %s.", error)
        else:
            logger.warning("The micro-batch that looks worst is kept in %s.", path)

    def act(self, cause: str) -> None:
        """Leave the step out, or raise what ``resilience.bad_step`` asks for. Collective.

        Args:
            cause: Why the step is not applied, as a clause.

        Raises:
            NonFiniteError: the run ends.
            RollBackError: it goes back to its newest checkpoint.
        """
        policy, step = self._section.bad_step, self._trainer.step
        if policy == "abort":
            raise NonFiniteError(f'Step {step} ends the run, as resilience.bad_step = "abort" says: {cause}.')
        if policy == "roll_back":
            checkpointer = self._trainer.checkpointer
            checkpointer.maybe_wait_for_saving()
            if checkpointer.last_saved > 0:
                raise RollBackError(f"Step {step}: {cause}.")
            logger.warning("There is no checkpoint to go back to yet: step %d is left out.", step)

    def go_back(self) -> None:
        """Restore the newest checkpoint in place. Collective.

        Raises:
            NonFiniteError: this happened too often since that checkpoint was written.
        """
        trainer, checkpointer = self._trainer, self._trainer.checkpointer
        to, limit = checkpointer.last_saved, self._section.max_skipped_steps
        self._returns[to] += 1
        if self._returns[to] > limit:
            raise NonFiniteError(
                f"The run would go back to step {to} for the {self._returns[to]}th time, more often than "
                f"resilience.max_skipped_steps. Look at {self._look_at}."
            )
        logger.warning("Step %d was bad: going back to the checkpoint of step %d.", trainer.step, to)
        checkpointer.load(step=to)
