"""Sums, differences and products of two whole numbers: a task that needs no files and no network."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from titan_rl.data.datasets import Split, fingerprint_prompts
from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Message, Prompt

Operation = Literal["add", "subtract", "multiply"]

_SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}
_MAX_PROMPTS = 4_000_000

_Problem = tuple[str, int, int]


class Arithmetic:
    """All problems ``a <operation> b`` with both operands in a range, ordered by operation, a, b.

    The unit of the split is the operation with the *unordered* pair: 12 + 30 and 30 + 12 are in the same
    split (for subtraction too, although 12 - 30 and 30 - 12 differ). Pairs are held out in the order of a
    hash of (split_seed, operation, smaller, larger) until ``num_held_out`` problems are. The run's seed has
    no part in it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Which problems there are."""

        operation: Operation | list[Operation] = "add"
        """One operation or a list of different ones."""

        minimum: int = 2
        """Smallest operand, inclusive."""

        maximum: int = 49
        """Largest operand, inclusive."""

        num_held_out: Annotated[int, Ge(0)] = 200
        """Problems in the held-out split; the others are in the train split."""

        template: str = "{a} {op} {b} ="
        """Text of the user message. ``{a}`` and ``{b}`` are the operands, ``{op}`` the sign (+, - or *)."""

        digits: Literal["usual", "reversed"] = "usual"
        """How the answer is written: as usual, or with its last digit first ("24" for 42). Two sources that
        differ in this make a corpus with two habits, of which a reward can favour one."""

        split_seed: int = 0
        """Another value holds out other problems. Independent of the run's seed."""

    def __init__(self, config: Config, split: Split) -> None:
        """List the problems of one split.

        Raises:
            ConfigError: The range, the operations, the template or the number held out make no sense.
        """
        operations = [config.operation] if isinstance(config.operation, str) else list(config.operation)
        _check(config, operations)
        self.name = "arithmetic"
        self._template = config.template
        self._is_reversed = config.digits == "reversed"
        held_out = _held_out(config, operations)
        wanted = split == "held_out"
        self._problems = [
            problem
            for problem in _problems(config, operations)
            if (_unordered(problem) in held_out) == wanted
        ]
        self.fingerprint = fingerprint_prompts(self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int, /) -> Prompt:
        operation, a, b = self._problems[index]
        answer = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
        text = self._template.format(a=a, b=b, op=_SYMBOLS[operation])
        return Prompt(
            id=f"arithmetic/{operation}/{a}/{b}",
            messages=(Message("user", text),),
            answer=str(answer)[::-1] if self._is_reversed else str(answer),
            metadata={"operation": operation, "a": a, "b": b},
        )


def _unordered(problem: _Problem) -> _Problem:
    operation, a, b = problem
    return operation, min(a, b), max(a, b)


def _problems(config: Arithmetic.Config, operations: list[Operation]) -> Iterator[_Problem]:
    operands = range(config.minimum, config.maximum + 1)
    return ((operation, a, b) for operation in operations for a in operands for b in operands)


def _held_out(config: Arithmetic.Config, operations: list[Operation]) -> set[_Problem]:
    """The held-out unordered pairs; together they make exactly ``num_held_out`` problems."""
    pairs = [problem for problem in _problems(config, operations) if problem[1] <= problem[2]]
    pairs.sort(key=lambda pair: derive_seed("arithmetic", config.split_seed, *pair))
    chosen: list[_Problem] = []
    missing = config.num_held_out
    for pair in pairs:
        num_problems = 1 if pair[1] == pair[2] else 2
        if num_problems <= missing:
            chosen.append(pair)
            missing -= num_problems
    if missing:
        # One problem is missing, only pairs of two are left, and every double (a, a) is chosen: swap the last
        # double for the next pair of two.
        doubles = [pair for pair in chosen if pair[1] == pair[2]]
        chosen.remove(doubles[-1])
        chosen.append(next(pair for pair in pairs if pair[1] != pair[2] and pair not in chosen))
    return set(chosen)


def _check(config: Arithmetic.Config, operations: list[Operation]) -> None:
    if not operations or len(set(operations)) != len(operations) or not set(operations) <= set(_SYMBOLS):
        raise ConfigError(
            "data.source.operation",
            'be "add", "subtract", "multiply" or a list of different ones',
            config.operation,
            'Write operation = "add".',
        )
    if config.minimum > config.maximum:
        raise ConfigError(
            "data.source.minimum",
            f"be at most data.source.maximum, {config.maximum}",
            config.minimum,
            "Swap the two.",
        )
    num_problems = len(operations) * (config.maximum - config.minimum + 1) ** 2
    if num_problems > _MAX_PROMPTS:
        raise ConfigError(
            "data.source.maximum",
            f"give at most {_MAX_PROMPTS} problems",
            f"{num_problems} problems",
            "Bring minimum and maximum closer together.",
        )
    if not 0 <= config.num_held_out < num_problems:
        raise ConfigError(
            "data.source.num_held_out",
            f"be at least 0 and less than the number of problems, {num_problems}",
            config.num_held_out,
            "Set num_held_out lower, or widen minimum and maximum.",
        )
    _check_template(config.template, needs_op=len(operations) > 1)


def _check_template(template: str, *, needs_op: bool) -> None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
        template.format(a=1, b=1, op="+")
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        fields, problem = [], error
    else:
        problem = None
    needed = {"a", "b", "op"} if needs_op else {"a", "b"}
    if problem is not None or not needed <= set(fields):
        raise ConfigError(
            "data.source.template",
            "contain {a} and {b}, {op} when there are several operations, and no other braces",
            template,
            'Write template = "{a} {op} {b} =".',
        ) from problem
