"""What generators in the trainer's own process share: the life of requests and the version of the weights.

Here: a request from :meth:`InProcessGenerator.submit` until its completion is yielded or it is aborted. Not
here: engines, which say how a request begins, how all are brought a token further, and how one is dropped.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set

from titan_rl import heartbeat
from titan_rl.errors import GeneratorError, StopRequestedError
from titan_rl.generation.protocol import GeneratorStatus, name_some
from titan_rl.types import Completion, GenerationRequest, WeightUpdate


class InProcessGenerator(ABC):
    """Requests in flight. What the methods promise: :class:`titan_rl.generation.protocol.Generator`."""

    def __init__(
        self,
        max_model_len: int,
        *,
        agree: Callable[[bool], bool] | None = None,
        is_stopping: Callable[[], bool] | None = None,
    ) -> None:
        """Begin with nothing in flight and no weights.

        Args:
            max_model_len: Most tokens of prompt and completion together.
            agree: Decides deadlines for a generator group; None: this rank alone.
            is_stopping: Whether to give up what is in flight; None: never.
        """
        self._max_model_len = max_model_len
        self._agree, self._is_stopping = agree or _own_decision, is_stopping or _never
        self._policy_version: int | None = None
        self._written: dict[str, int] = {}
        self._is_paused = False
        self._in_flight: dict[str, GenerationRequest] = {}
        self._finished: deque[Completion] = deque()

    @abstractmethod
    def _begin(self, request: GenerationRequest) -> None:
        """Queue a request that was checked."""

    @abstractmethod
    def _step(self) -> None:
        """Compute one token of every running request; what is finished is appended to ``_finished``."""

    @abstractmethod
    def _drop(self, ids: Set[str]) -> None:
        """Forget requests that are queued or computed."""

    @abstractmethod
    def _checksums(self) -> dict[str, int]:
        """Checksums of the engine's own parameters, as far as they can be looked at."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """See :meth:`titan_rl.generation.protocol.Generator.submit`."""
        self._require_weights()
        seen = set(self._in_flight)
        for request in requests:
            if request.id in seen:
                raise GeneratorError(
                    f"Request ids must be distinct among those in flight; got {request.id!r} twice. "
                    "Give each sample and turn its own id."
                )
            seen.add(request.id)
            self._check_request(request)
        for request in requests:
            self._begin(request)
            self._in_flight[request.id] = request
        return [request.id for request in requests]

    def completions(self, timeout_seconds: float) -> Iterator[Completion]:
        """See :meth:`titan_rl.generation.protocol.Generator.completions`."""
        deadline = time.monotonic() + timeout_seconds
        while self._in_flight and not self._is_paused:
            if not self._finished:
                # One rank's clock decides: a rank that stepped alone would wait for the others for ever.
                is_stopping = self._is_stopping()
                if self._agree(is_stopping or time.monotonic() >= deadline):
                    self._give_up(is_stopping)
                    raise GeneratorError(
                        f"Completions must finish within {timeout_seconds:g} s; got {len(self._in_flight)} "
                        f"unfinished: {name_some(list(self._in_flight))}. Raise sampling.timeout_seconds or "
                        "lower sampling.max_tokens."
                    )
                heartbeat.beat()
                self._step()
                continue
            completion = self._finished.popleft()
            del self._in_flight[completion.request_id]
            yield completion

    def _give_up(self, is_stopping: bool) -> None:
        """Abort everything if it is a stop that ends the wait: again one rank of a group decides."""
        if self._agree(is_stopping):
            number = len(self._in_flight)
            self.abort(list(self._in_flight))
            raise StopRequestedError(f"{number} completions were given up: the run was asked to stop.")

    def abort(self, ids: Sequence[str]) -> None:
        """See :meth:`titan_rl.generation.protocol.Generator.abort`."""
        dropped = {name for name in ids if self._in_flight.pop(name, None) is not None}
        finished = {completion.request_id for completion in self._finished}
        self._finished = deque(c for c in self._finished if c.request_id not in dropped)
        self._drop(dropped - finished)

    def pause(self) -> None:
        """See :meth:`titan_rl.generation.protocol.Generator.pause`."""
        self._is_paused = True

    def resume(self) -> None:
        """See :meth:`titan_rl.generation.protocol.Generator.resume`."""
        self._is_paused = False

    def status(self) -> GeneratorStatus:
        """See :meth:`titan_rl.generation.protocol.Generator.status`."""
        return GeneratorStatus(self._policy_version, len(self._in_flight), self._is_paused)

    def altered_weights(self) -> tuple[str, ...]:
        """See :meth:`titan_rl.generation.protocol.Generator.altered_weights`."""
        if not self._written:
            return ()
        held = self._checksums()
        return tuple(name for name, value in self._written.items() if held.get(name) != value)

    def _require_weights(self) -> None:
        if self._policy_version is None:
            raise GeneratorError(
                "The generator must hold a complete set of weights before it is used; got none. "
                "Call load_weights, and look at the receipt's unwritten parameters."
            )

    def _require_base(self, update: WeightUpdate) -> None:
        """A delta must apply to what is served."""
        if update.kind == "delta" and update.base_version != self._policy_version:
            raise GeneratorError(
                f"A delta must apply to the served version {self._policy_version}; got one to "
                f"{update.base_version}. Send all weights."
            )

    def _require_idle(self, method: str) -> None:
        if self._in_flight:
            raise GeneratorError(
                f"{method} must find nothing in flight; got {name_some(list(self._in_flight))}. "
                "Iterate completions() or abort them first."
            )

    def _check_request(self, request: GenerationRequest) -> None:
        num_prompt, num_new = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt < 1 or num_new < 1 or num_prompt + num_new > self._max_model_len:
            raise GeneratorError(
                f"Request {request.id!r} must have at least one prompt token and one new token, and at most "
                f"{self._max_model_len} together; got {num_prompt} and {num_new}. "
                "Drop longer prompts, lower sampling.max_tokens or raise training.seq_len."
            )


def _own_decision(flag: bool) -> bool:
    return flag


def _never() -> bool:
    return False
