"""What every trainer of ours does about stopping and saving: one safe point per step or iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from titan_rl import heartbeat
from titan_rl.errors import StopRequestedError
from titan_rl.resilience import faults
from titan_rl.resilience.manifest import Facts
from titan_rl.resilience.saving import CheckpointManager, SavePolicy
from titan_rl.resilience.status import Outcome
from titan_rl.resilience.stopping import StopControl, Wish
from titan_rl.titan import waiting
from titan_rl.titan.api import Trainer, logger
from titan_rl.titan.collectives import HostGroup
from titan_rl.trainers.bad_steps import BadSteps

Work = TypeVar("Work")
_OUTCOMES: dict[Wish, Outcome] = {Wish.PREEMPT: "preempted", Wish.TIME_LIMIT: "time_limit"}


class ResilientTrainer(Trainer):
    """TorchTitan's trainer with a safe point: it saves and stops when it is asked to, on all ranks alike.

    Attributes:
        kind: The trainer's name in manifests: a value of the root key ``trainer``.
        look_at: Where the cause of a bad step is to be found, for messages.
        outcome: How the loop ended.
        control: What this rank knows about requests to save or to stop.
        at_safe_point: Called first at every safe point.
        bad_steps: What happens when a gradient must not be applied.
    """

    kind = ""
    look_at = "the data"
    outcome: Outcome = "done"
    control: StopControl
    at_safe_point: Callable[[], None] | None = None
    bad_steps: BadSteps
    # Narrower than TorchTitan declares it, because the configurations of our trainers are.
    checkpointer: CheckpointManager  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Any) -> None:
        """Let TorchTitan build, then begin to listen for requests.

        Args:
            config: The whole configuration, with ``[resilience]``.

        Raises:
            ConfigError: ``TITAN_RL_FAULT`` is set, and not to faults that can be planted.
        """
        faults.arm(Path(config.dump_folder))
        waiting.install()
        super().__init__(config)
        section, comm = config.resilience, config.comm
        # A rank may come to a safe point as much earlier than another as a generation may take.
        longest = 2 * getattr(getattr(config, "sampling", None), "timeout_seconds", 0.0)
        longest = max(longest, comm.train_timeout_seconds, comm.init_timeout_seconds)
        self.control = StopControl(
            grace_seconds=section.grace_seconds,
            stop_after_minutes=section.stop_after_minutes,
            group=HostGroup(timedelta(seconds=longest)),
        )
        self.bad_steps = BadSteps(self, look_at=self.look_at)
        if config.checkpoint.enable:
            self.checkpointer.states["guard"] = self.bad_steps.guard
            self.checkpointer.policy = SavePolicy(
                max_failed_saves=section.max_failed_saves, keep_best=section.keep_best
            )
            self.checkpointer.facts = self.facts

    def facts(self) -> Facts:
        """What the manifest of a checkpoint says about this run."""
        return Facts(trainer=self.kind)

    def has_work_left(self) -> bool:
        """Whether something of the steps that are done is still to be done."""
        return False

    def is_due(self, interval_steps: int) -> bool:
        """Whether what is done every so many steps, and after the last one, is to be done now.

        Args:
            interval_steps: How many; 0: after the last step only.
        """
        is_last = self.step >= self.config.training.steps
        return is_last or bool(interval_steps and self.step % interval_steps == 0)

    def should_continue_training(self) -> bool:
        """The safe point: do what was asked for, then say whether there is another step. Collective.

        Raises:
            SaveError: too many checkpoints in a row could not be written.
        """
        has_steps = super().should_continue_training()
        saved = max(self.checkpointer.last_saved, 0) if self.config.checkpoint.enable else 0
        heartbeat.enter("collective", step=self.step + has_steps, saved=saved)
        if self.at_safe_point is not None:
            self.at_safe_point()
        wish = self.control.decide()
        faults.begin_step(self.step + 1)
        if wish == Wish.NOTHING or not (has_steps or self.has_work_left()):
            return has_steps
        is_saved = self.checkpointer.save_now(self.step)
        if wish == Wish.SAVE:
            return has_steps
        self.outcome = _OUTCOMES[wish]
        reason = "it was asked to" if wish == Wish.PREEMPT else "resilience.stop_after_minutes is over"
        state = "saved" if is_saved else "nothing of it is saved"
        logger.info("The run stops at step %d because %s; %s.", self.step, reason, state)
        return False

    def give_up(self) -> None:
        """Say how a run ends that was asked to stop before its first step. Collective."""
        self.outcome = _OUTCOMES[self.control.decide()]

    def unless_stopping(self, work: Iterable[Work]) -> Iterator[Work]:
        """Go through what may take long, and give it up when any rank is asked to stop. Collective.

        Args:
            work: As many on every rank.

        Raises:
            StopRequestedError: on every rank, before the same piece.
        """
        for piece in work:
            if self.control.is_stopping_anywhere(self.control.should_interrupt()):
                raise StopRequestedError("An evaluation was given up: the run was asked to stop.")
            yield piece

    def close(self) -> None:
        """Stop listening, then release what TorchTitan holds."""
        if hasattr(self, "control"):
            self.control.close()
        super().close()
