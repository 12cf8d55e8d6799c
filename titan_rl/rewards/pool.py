"""Rewards in worker processes, each call with a deadline.

One thread and one ``selectors`` loop, which turns while :meth:`RewardPool.results` or
:meth:`RewardPool.submit` runs; no call waits on a pipe. A worker that hangs, crashes or breaks the protocol
is ended with all that it started, and replaced; spares that stand by ready make that cheap. No torch here.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any

from annotated_types import Ge, Gt

from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.spec import RewardSpec, check_specs
from titan_rl.rewards.wire import (
    FailureReason,
    FrameError,
    FrameTooLargeError,
    RewardFailure,
    encode_frame,
    reward_from_json,
    rollout_to_json,
)
from titan_rl.rewards.worker_process import WorkerProcess
from titan_rl.types import Reward, Rollout

_TICK_SECONDS = 0.1
_MAX_ATTEMPTS = 2
_MAX_FAILED_STARTS = 3
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(slots=True)
class RewardPoolStats:
    """What happened since the pool was made."""

    num_jobs: int = 0
    """Rollouts submitted."""
    num_failures: Counter[FailureReason] = field(default_factory=Counter)
    """Rollouts without a reward, by reason."""
    num_workers_replaced: int = 0
    """Workers that hung, crashed or broke the protocol."""


@dataclass(slots=True)
class _Job:
    key: int
    frame: bytes
    num_attempts: int = 0


class RewardPool:
    """Scores rollouts in worker processes.

    >>> with RewardPool(RewardPool.Config(num_workers=1), [RewardSpec(type="exact_match")]) as pool:
    ...     list(pool.results(1.0))
    []
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Size and limits of the pool, per trainer process."""

        num_workers: Annotated[int, Ge(1)] = 2
        """Rollouts scored at the same time."""

        num_spares: Annotated[int, Ge(0)] = 1
        """Further workers that stand by, ready to take the place of one that is ended."""

        deadline_seconds: Annotated[float, Gt(0)] = 10.0
        """Longest time for all rewards of one rollout, from when a worker starts on it."""

        startup_seconds: Annotated[float, Gt(0)] = 60.0
        """Longest time for a worker to import and construct the rewards, or to pick up a rollout."""

        memory_limit_bytes: Annotated[int, Ge(0)] = 4 * 1024**3
        """Address space of one worker process in bytes (RLIMIT_AS, Linux only); 0 is no limit."""

        max_reply_bytes: Annotated[int, Ge(1024)] = 1024**2
        """Largest reply of a worker in bytes of JSON."""

    def __init__(self, config: Config, specs: Sequence[RewardSpec]) -> None:
        """Start the workers, and wait until the first has built the rewards.

        Workers die with the thread that makes the pool: make it in the main thread.

        Args:
            config: See :class:`Config`.
            specs: All rewards of the run; see :class:`titan_rl.rewards.spec.WeightedSum`.

        Raises:
            ConfigError: The configuration or the specifications are wrong, or the first worker to answer
                could not build the rewards.
        """
        _check_config(config)
        check_specs(specs)
        self.config = config
        self.stats = RewardPoolStats()
        self._first_frame = encode_frame(
            {
                "specs": [spec.to_json() for spec in specs],
                "sys_path": sys.path,
                "memory_limit_bytes": config.memory_limit_bytes,
                "max_reply_bytes": config.max_reply_bytes,
            }
        )
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._jobs: dict[int, _Job] = {}
        self._keys: set[int] = set()
        self._queue: deque[int] = deque()
        self._answers: deque[tuple[int, Reward | RewardFailure]] = deque()
        self._finished: list[tuple[float, int, Reward | RewardFailure]] = []
        self._has_been_ready = False
        self._num_failed_starts = 0
        self._no_start_before = 0.0
        self._next_job_id = 0
        self._is_closed = False
        try:
            while not self._has_been_ready:
                self._turn(_TICK_SECONDS)
        except BaseException:
            self.close()
            raise

    def submit(self, key: int, rollout: Rollout) -> None:
        """Queue a rollout, and start it if a worker is free. Never waits for a reward.

        Args:
            key: Comes back with the result. Any integer that is not in flight.
            rollout: What to score; it may change afterwards.

        Raises:
            ConfigError: The prompt's metadata is not JSON.
            ValueError: ``key`` is in flight.
        """
        if key in self._keys:
            raise ValueError(f"key must not be in flight; got {key}. Use another key.")
        job_id = self._next_job_id
        self._next_job_id += 1
        try:
            frame = encode_frame({"id": job_id, "rollout": rollout_to_json(rollout)})
        except TypeError as error:
            where = f"metadata of prompt {rollout.prompt.id!r}"
            raise ConfigError(where, "be JSON", str(error), "Convert that column of the dataset.") from error
        self.stats.num_jobs += 1
        self._jobs[job_id] = _Job(key=key, frame=frame)
        self._keys.add(key)
        self._queue.append(job_id)
        self._turn(0.0)

    def results(self, timeout_seconds: float) -> Iterator[tuple[int, Reward | RewardFailure]]:
        """Yield results in the order in which they finish.

        It ends when everything submitted has been answered, or after ``timeout_seconds``, whichever is first.
        A rollout that hangs is answered at its deadline.

        Args:
            timeout_seconds: Longest time to wait in total; 0 yields what is there.

        Yields:
            Pairs of the key and a ``Reward`` or a :class:`RewardFailure`.

        Raises:
            RewardError: Workers cannot be started any more.
        """
        end = time.monotonic() + timeout_seconds
        is_last = False
        self._turn(0.0)
        while True:
            while self._answers:
                yield self._answers.popleft()
            if is_last or not self._jobs:
                return
            remaining = end - time.monotonic()
            is_last = remaining <= 0
            self._turn(max(remaining, 0.0))

    def close(self) -> None:
        """End all workers and what they started. What was not answered is forgotten."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _turn(self, wait_seconds: float) -> None:
        """Turn the loop once: wait for a pipe or a deadline, read, judge, replace, and hand out work."""
        if self._is_closed:
            raise RewardError("the reward pool must be open; it was closed. Make a new one.")
        self._replenish()
        self._hand_out()
        for selected, _ in self._selector.select(self._next_wait(wait_seconds)):
            worker, channel = selected.data
            if channel == "request":
                worker.flush()
            elif channel == "log":
                worker.keep_output()
        # Every worker, not only those selected: what has arrived must be read before it is called late.
        for worker in tuple(self._workers):
            self._read(worker)
            if worker.state != "ended":
                self._judge(worker, time.monotonic())
        self._replenish()
        self._hand_out()
        self._finished.sort(key=lambda entry: entry[0])
        self._answers.extend((key, result) for _, key, result in self._finished)
        self._finished.clear()

    def _next_wait(self, wait_seconds: float) -> float:
        # A tick bounds the wait: a child of a crashed worker may hold its pipe open and hide that it ended.
        started = [worker.job_started_at for worker in self._workers if worker.job_started_at is not None]
        deadline = min(started, default=float("inf")) + self.config.deadline_seconds
        return max(0.0, min(wait_seconds, _TICK_SECONDS, deadline - time.monotonic()))

    def _read(self, worker: WorkerProcess) -> None:
        try:
            has_exited = worker.has_exited()  # before reading, so that nothing it wrote is missed
            for message in worker.receive():
                self._handle(worker, message)
        except FrameTooLargeError as error:
            self._end(worker, "too_large", f"the worker broke the protocol: {error}")
        except FrameError as error:
            self._end(worker, "crashed", f"the worker broke the protocol: {error}")
        else:
            if has_exited and worker.state != "ended":
                self._end(worker, "crashed", "the worker process ended")

    def _handle(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if worker.state == "starting" and "ready" in message:
            worker.state = "idle"
            self._has_been_ready = True
            self._num_failed_starts = 0
        elif worker.state == "starting" and "failed" in message:
            if not self._has_been_ready:
                raise ConfigError(*message["failed"])
            self._end(worker, "crashed", f"the worker could not build the rewards: {message['failed']}")
        elif worker.state == "busy" and message.get("started") == worker.job_id:
            worker.job_started_at = float(message["at"])
        elif (
            worker.state == "busy"
            and message.get("id") == worker.job_id
            and worker.job_started_at is not None
        ):
            self._accept(worker, message)
        else:
            raise FrameError(f"unexpected message with keys {sorted(message)} while {worker.state}")

    def _accept(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        job_id, seconds = worker.job_id, float(message["at"]) - (worker.job_started_at or 0.0)
        worker.state, worker.job_id, worker.job_started_at = "idle", None, None
        if seconds > self.config.deadline_seconds:  # it came back by itself before anyone looked
            result: Reward | RewardFailure = RewardFailure("timeout", self._late(seconds))
        elif "failure" in message:
            result = RewardFailure(**message["failure"])
        else:
            result = reward_from_json(message["reward"])
        self._finish(job_id, result, at=float(message["at"]))

    def _judge(self, worker: WorkerProcess, now: float) -> None:
        if worker.job_started_at is not None:
            seconds = now - worker.job_started_at
            if seconds > self.config.deadline_seconds:
                self._end(worker, "timeout", self._late(seconds))
        elif worker.state != "idle" and now - worker.progress_at > self.config.startup_seconds:
            self._end(worker, "timeout", f"the worker did not react for {self.config.startup_seconds:g} s")

    def _late(self, seconds: float) -> str:
        return f"the rewards took {seconds:.1f} s, past the deadline of {self.config.deadline_seconds:g} s"

    def _end(self, worker: WorkerProcess, reason: FailureReason, why: str) -> None:
        """End a worker, and answer, retry or report what it was doing."""
        state, job_id, had_started = worker.state, worker.job_id, worker.job_started_at is not None
        worker.kill()
        worker.job_id = worker.job_started_at = None
        self._workers.remove(worker)
        self.stats.num_workers_replaced += 1
        message = f"{why}; {worker.describe_end()}"
        if state == "starting":
            self._failed_to_start(message)
        elif job_id is not None:
            if had_started or self._jobs[job_id].num_attempts >= _MAX_ATTEMPTS:
                self._finish(job_id, RewardFailure(reason, message), at=time.monotonic())
            else:  # it never got to this rollout, which is therefore not to blame
                self._queue.appendleft(job_id)

    def _failed_to_start(self, message: str) -> None:
        """Start another after a pause; raise when it is hopeless."""
        self._num_failed_starts += 1
        self._no_start_before = time.monotonic() + min(2.0**self._num_failed_starts, _LONGEST_PAUSE_SECONDS)
        if not self._has_been_ready:
            remedy = "Import and construct your rewards by hand to see why."
            raise ConfigError("a reward worker", "start and build the rewards", message, remedy)
        is_any_left = any(worker.state in ("idle", "busy") for worker in self._workers)
        if self._num_failed_starts >= _MAX_FAILED_STARTS and not is_any_left:
            raise RewardError(
                f"reward workers must start; {self._num_failed_starts} in a row did not: {message}"
            )

    def _finish(self, job_id: int | None, result: Reward | RewardFailure, *, at: float) -> None:
        if job_id is None:
            raise RewardError("a worker without a job gave an answer")
        if isinstance(result, RewardFailure):
            self.stats.num_failures[result.reason] += 1
        key = self._jobs.pop(job_id).key
        self._keys.remove(key)
        self._finished.append((at, key, result))

    def _replenish(self) -> None:
        if time.monotonic() < self._no_start_before:
            return
        while len(self._workers) < self.config.num_workers + self.config.num_spares:
            self._workers.append(
                WorkerProcess(
                    self._first_frame, selector=self._selector, max_reply_bytes=self.config.max_reply_bytes
                )
            )

    def _hand_out(self) -> None:
        num_busy = sum(worker.state == "busy" for worker in self._workers)
        idle = [worker for worker in self._workers if worker.state == "idle"]
        for worker in idle[: max(0, self.config.num_workers - num_busy)]:
            if not self._queue:
                return
            worker.job_id = self._queue.popleft()
            job = self._jobs[worker.job_id]
            job.num_attempts += 1
            worker.state = "busy"
            worker.send(job.frame)


def _check_config(config: RewardPool.Config) -> None:
    for key, least in (
        ("num_workers", 1),
        ("num_spares", 0),
        ("memory_limit_bytes", 0),
        ("max_reply_bytes", 1024),
    ):
        if getattr(config, key) < least:
            raise ConfigError(
                f"reward_workers.{key}", f"be at least {least}", getattr(config, key), "Raise it."
            )
    for key in ("deadline_seconds", "startup_seconds"):
        if not getattr(config, key) > 0:
            raise ConfigError(f"reward_workers.{key}", "be more than 0", getattr(config, key), "Raise it.")
