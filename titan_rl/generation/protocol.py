"""What a generator is, and how a batch of completions is asked of one.

Here: the :class:`Generator` contract, the check that every completion passes before anything may be trained
on it, and :func:`generate`. Not here: engines (:mod:`titan_rl.generation.vllm`,
:mod:`titan_rl.generation.local`), and the decision what to ask for (:mod:`titan_rl.rollout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titan_rl.errors import GeneratorError
from titan_rl.types import Completion, FinishReason, GenerationRequest, WeightReceipt, WeightUpdate

LOGPROB_SLACK = 1e-4
"""How far above 0 the rounding of a log-softmax may put the log-probability of a certain token."""


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """What a generator is doing.

    Attributes:
        policy_version: Version of the weights that it serves; None before the first complete
            :meth:`Generator.load_weights`, and after one that failed or left a parameter unwritten.
        num_in_flight: Requests submitted, and neither yielded by :meth:`Generator.completions` nor aborted.
        is_paused: Whether :meth:`Generator.pause` is in force.
    """

    policy_version: int | None
    num_in_flight: int
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorContext:
    """What a run tells the generator that it has chosen; an engine ignores what it has no use for.

    Every generator is built as ``GeneratorClass(config, context)``.

    Attributes:
        model_dir: Hugging Face directory with ``config.json``; weights in it are not read. Empty when the
            model has no Hugging Face counterpart.
        model_config: TorchTitan's configuration of the policy's model; not modified.
        adapter: TorchTitan's state-dict adapter of the model. None: weights come under TorchTitan's names.
        max_model_len: Most tokens of prompt and completion together.
        dtype: ``"float32"`` or ``"bfloat16"``, of weights and activations.
        seed: Of the engine's own draws; completions depend on their request's seed only.
        device_type: ``"cpu"`` or ``"cuda"``.
        run_threads: Threads of this process for CPU kernels, to be kept.
        lora_rank: Rank of the adapters that updates of kind ``"lora"`` will bring; None: none will come.
        is_stopping: Whether this rank was asked to give up what is in flight; None: it never is.
        agree: Broadcasts the value of the first rank of a generator group to the group; it decides deadlines.
            Required by groups of several ranks.
    """

    model_dir: str
    model_config: Any
    adapter: Any
    max_model_len: int
    dtype: str
    seed: int
    device_type: str
    run_threads: int
    agree: Callable[[bool], bool] | None = None
    is_stopping: Callable[[], bool] | None = None
    lora_rank: int | None = None


class Generator(Protocol):
    """The engine that samples completions: token ids in; token ids and log-probabilities out.

    A log-probability is the natural logarithm of the probability under the distribution that the token was
    drawn from, temperature and truncation included; a greedy token (temperature 0) has the log-probability
    of temperature 1. What a request yields depends on its prompt, sampling parameters, seed and the weights
    alone: not on its order, nor on the requests beside it. (On CUDA and for the local generator that holds up
    to the batch-dependent rounding of the kernels.)

    In a generator group of several ranks (tensor parallelism), all ranks call the same methods with equal
    arguments in the same order, and all of them see the same completions.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Queue requests and return their ids; nothing is computed until :meth:`completions` is iterated.

        Args:
            requests: Each with an id that is not in flight, a prompt of at least one token, and room for
                ``prompt + max_tokens`` tokens in the model's length.

        Raises:
            GeneratorError: A request cannot be served (all of them are refused then), or no complete set of
                weights has been loaded.
        """
        ...

    def completions(self, timeout_seconds: float) -> Iterator[Completion]:
        """Yield completions in finishing order until nothing is in flight, or until paused.

        A consumer may submit and abort between two completions. One that stops early loses nothing: the next
        iterator goes on where this one was left.

        Args:
            timeout_seconds: From the first ``next()`` on. What is unfinished when it passes stays in flight.

        Raises:
            GeneratorError: The deadline passed; the message names the unfinished requests.
            StopRequestedError: The run was asked to stop; what was in flight is aborted.
        """
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Drop these requests; they yield nothing. Ids that are not in flight are ignored."""
        ...

    def pause(self) -> None:
        """Stop computing: :meth:`completions` ends before its next step. Requests stay in flight."""
        ...

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        ...

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace the weights: all of them, those of a delta, or the adapters. All tensors are consumed.

        Cached keys and values are dropped.

        A tensor must keep its contents until the stream ends: an engine may read it later than it arrives.

        Returns:
            What arrived. If ``unwritten`` is not empty, the generator serves nothing until a complete load.

        Raises:
            GeneratorError: Requests are in flight, a name arrived twice, or a delta applies to what is not
                served.
        """
        ...

    def altered_weights(self) -> tuple[str, ...]:
        """Names of the generator's own parameters that do not hold what the last :meth:`load_weights` wrote.

        What an engine keeps out of sight (vLLM packs linear weights on a CPU) cannot be looked at. Reads
        every weight once.
        """
        ...

    def status(self) -> GeneratorStatus:
        """Return the current state; cheap."""
        ...

    def prompt_logprobs(
        self, token_ids: Sequence[tuple[int, ...]], temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        r"""Score given tokens under the served weights, for the weight handshake.

        Args:
            token_ids: Sequences of at least two tokens each; N tokens.
            temperature: Logits are divided by it. An engine may support 1 only.

        Returns:
            For each sequence N - 1 values :math:`\log p(x_t \mid x_{<t})` of its tokens 1 to N - 1.

        Raises:
            GeneratorError: Requests are in flight, no weights are loaded, or the temperature is unsupported.
        """
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back while a colocated trainer works. Nothing may be in flight."""
        ...

    def wake_up(self) -> None:
        """Undo :meth:`sleep`. Required before anything else is called."""
        ...

    def close(self) -> None:
        """Release the engine. Nothing may be called afterwards."""
        ...


def generate(
    generator: Generator, requests: Sequence[GenerationRequest], timeout_seconds: float
) -> list[Completion]:
    """Sample one completion per request, and check each one.

    Args:
        generator: With nothing in flight.
        requests: Any number; their ids are distinct.
        timeout_seconds: For all of them together.

    Returns:
        Completions in the order of ``requests``.

    Raises:
        GeneratorError: Other requests were in flight, the deadline passed, or a completion fails
            :func:`check_completion`. The requests of this call are aborted then.

    """
    status = generator.status()
    if status.num_in_flight:
        raise GeneratorError(
            f"The generator must be idle before generate(); got {status.num_in_flight} requests in flight. "
            "Iterate completions() or abort them first."
        )
    by_id = {request.id: request for request in requests}
    found: dict[str, Completion] = {}
    ids = generator.submit(requests)
    try:
        for completion in generator.completions(timeout_seconds):
            request = by_id.get(completion.request_id)
            if request is None:
                raise GeneratorError(
                    f"generate() must receive its own completions only; got {completion.request_id!r}. "
                    "Submit nothing while it runs."
                )
            check_completion(completion, request, policy_version=status.policy_version)
            found[completion.request_id] = completion
    finally:
        generator.abort([request_id for request_id in ids if request_id not in found])
    missing = [request.id for request in requests if request.id not in found]
    if missing:
        raise GeneratorError(
            f"generate() must return every completion; got none for {name_some(missing)}. "
            "Was the generator paused, or were they aborted?"
        )
    return [found[request.id] for request in requests]


def check_completion(
    completion: Completion, request: GenerationRequest, *, policy_version: int | None
) -> None:
    """Refuse a completion that must not be trained on.

    Args:
        completion: As a generator returned it.
        request: What was asked.
        policy_version: The version that the generator serves, confirmed by its weight receipt.

    Raises:
        GeneratorError: It is empty, aborted, longer than asked, has another number of log-probabilities than
            tokens, a log-probability that is not finite or above 0, or was sampled by other weights.

    >>> from titan_rl.types import SamplingParams
    >>> request = GenerationRequest("p/0/0", (5,), SamplingParams(max_tokens=2), seed=1)
    >>> done = Completion("p/0/0", (7,), (float("nan"),), FinishReason.STOP, ((0, 3),))
    >>> check_completion(done, request, policy_version=3)  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ...
    titan_rl.errors.GeneratorError: Completion of 'p/0/0' must have finite log-probabilities of at most 0;
    got nan at token 0. Check the weights for NaN.
    """
    fault = _fault(completion, request, policy_version=policy_version)
    if fault is not None:
        constraint, got, remedy = fault
        raise GeneratorError(f"Completion of {request.id!r} must {constraint}; got {got}. {remedy}.")


def _fault(
    completion: Completion, request: GenerationRequest, *, policy_version: int | None
) -> tuple[str, object, str] | None:
    """Return the constraint that a completion breaks, what it has instead, and the remedy; or None."""
    num_tokens, limit = len(completion.token_ids), request.sampling.max_tokens
    if completion.finish_reason is FinishReason.ABORT:
        return "be finished", "an aborted one", "Only finished completions may be trained on"
    if not 1 <= num_tokens <= limit:
        return f"have 1 to {limit} tokens", num_tokens, "This is a fault of the generator"
    if len(completion.logprobs) != num_tokens:
        constraint = f"have one log-probability for each of its {num_tokens} tokens"
        return constraint, len(completion.logprobs), "This is a fault of the generator"
    if completion.policy_versions != ((0, policy_version),):
        constraint = f"come from the weights of version {policy_version} alone"
        return constraint, completion.policy_versions, "Load weights only while nothing is in flight"
    for index, logprob in enumerate(completion.logprobs):
        if not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
            got = f"{logprob} at token {index}"
            return "have finite log-probabilities of at most 0", got, "Check the weights for NaN"
    return None


def name_some(ids: Sequence[str], limit: int = 8) -> str:
    """List the first ids, and how many more there are.

    >>> name_some(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(request_id) for request_id in ids[:limit])
    return shown if len(ids) <= limit else f"{shown} and {len(ids) - limit} more"
