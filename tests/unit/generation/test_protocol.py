"""The contract's checks, with a generator that returns what it is told to."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.errors import GeneratorError
from titan_rl.generation.protocol import GeneratorStatus, check_completion, generate, name_some
from titan_rl.generation.registry import GENERATORS
from titan_rl.types import Completion, FinishReason, GenerationRequest, SamplingParams


def request(name: str = "p/0/0", max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingParams(max_tokens=max_tokens), seed=1)


def completion(name: str = "p/0/0") -> Completion:
    return Completion(name, (5, 6), (-0.5, -0.25), FinishReason.LENGTH, ((0, 7),))


class FakeGenerator:
    """Serves version 7, and yields the given completions in reverse order of submission."""

    def __init__(self, answers: dict[str, Completion], *, num_in_flight: int = 0) -> None:
        self.answers = answers
        self.in_flight = [f"other{i}" for i in range(num_in_flight)]
        self.aborted: list[str] = []
        self.fails_after: int | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> list[str]:
        self.in_flight += [r.id for r in requests]
        return [r.id for r in requests]

    def completions(self, timeout_seconds: float) -> Iterator[Completion]:
        ready = [name for name in reversed(self.in_flight) if name in self.answers]
        for count, name in enumerate(ready):
            if count == self.fails_after:
                raise GeneratorError(f"Completions must finish within {timeout_seconds} s.")
            self.in_flight.remove(name)
            yield self.answers[name]

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids
        self.in_flight = [name for name in self.in_flight if name not in ids]

    def status(self) -> GeneratorStatus:
        return GeneratorStatus(policy_version=7, num_in_flight=len(self.in_flight), is_paused=False)


def fake(*names: str, num_in_flight: int = 0) -> FakeGenerator:
    return FakeGenerator({name: completion(name) for name in names}, num_in_flight=num_in_flight)


def test_generate_returns_completions_in_request_order_whatever_finishes_first() -> None:
    found = generate(fake("a", "b", "c"), [request("c"), request("a"), request("b")], 1.0)
    assert [c.request_id for c in found] == ["c", "a", "b"]


def test_generate_of_nothing_is_nothing() -> None:
    assert generate(fake(), [], 1.0) == []


def test_generate_refuses_a_busy_generator_and_submits_nothing() -> None:
    generator = fake("a", num_in_flight=3)
    with pytest.raises(GeneratorError, match="got 3 requests in flight"):
        generate(generator, [request("a")], 1.0)
    assert "a" not in generator.in_flight


def test_generate_aborts_its_unfinished_requests_when_the_deadline_passes() -> None:
    generator = fake("a", "b", "c")
    generator.fails_after = 1
    with pytest.raises(GeneratorError, match="must finish within"):
        generate(generator, [request("a"), request("b"), request("c")], 1.0)
    assert generator.aborted == ["a", "b"]
    assert generator.in_flight == []


def test_generate_names_the_requests_that_got_no_completion() -> None:
    generator = fake("a")
    with pytest.raises(GeneratorError, match="got none for 'b', 'c'"):
        generate(generator, [request("b"), request("a"), request("c")], 1.0)
    assert generator.aborted == ["b", "c"]


def test_generate_refuses_a_completion_that_nobody_asked_for() -> None:
    with pytest.raises(GeneratorError, match="got 'stranger'"):
        generate(
            FakeGenerator({"a": completion("stranger")}),
            [request("a")],
            1.0,
        )


def test_generate_refuses_a_bad_completion_and_names_its_request() -> None:
    bad = dataclasses.replace(completion("b"), logprobs=(-1.0,))
    generator = FakeGenerator({"a": completion("a"), "b": bad})
    with pytest.raises(GeneratorError, match="Completion of 'b' must have one log-probability"):
        generate(generator, [request("a"), request("b")], 1.0)
    assert generator.in_flight == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": FinishReason.ABORT}, "must be finished"),
        ({"token_ids": (), "logprobs": ()}, "must have 1 to 4 tokens; got 0"),
        ({"token_ids": (1,) * 5, "logprobs": (-1.0,) * 5}, "must have 1 to 4 tokens; got 5"),
        ({"logprobs": (-0.5,)}, "each of its 2 tokens; got 1"),
        ({"logprobs": (-0.5, -0.5, -0.5)}, "each of its 2 tokens; got 3"),
        ({"logprobs": (-0.5, float("nan"))}, "got nan at token 1"),
        ({"logprobs": (float("-inf"), -0.5)}, "got -inf at token 0"),
        ({"logprobs": (-0.5, 0.01)}, "got 0.01 at token 1"),
        ({"policy_versions": ((0, 6),)}, "version 7 alone"),
        ({"policy_versions": ((0, 6), (1, 7))}, "version 7 alone"),
        ({"policy_versions": ()}, "version 7 alone"),
    ],
)
def test_each_fault_of_a_completion_is_refused_with_its_own_message(
    change: dict[str, object], message: str
) -> None:
    check_completion(completion(), request(), policy_version=7)  # it is the change that is refused
    with pytest.raises(GeneratorError, match=message):
        check_completion(dataclasses.replace(completion(), **change), request(), policy_version=7)


@given(logprobs=st.lists(st.floats(-1e4, 0.0), min_size=1, max_size=4))
def test_any_finite_logprobs_up_to_zero_are_accepted(logprobs: list[float]) -> None:
    good = dataclasses.replace(completion(), token_ids=(3,) * len(logprobs), logprobs=tuple(logprobs))
    check_completion(good, request(), policy_version=7)


def test_long_lists_of_ids_are_shortened() -> None:
    assert name_some(["a", "b"]) == "'a', 'b'"
    assert name_some([str(i) for i in range(20)]) == "'0', '1', '2', '3', '4', '5', '6', '7' and 12 more"


def test_every_registered_generator_lives_in_a_module_of_this_package() -> None:
    for target in GENERATORS.values():
        module, _, name = target.partition(":")
        assert importlib.util.find_spec(module) is not None
        assert name.endswith("Generator")
