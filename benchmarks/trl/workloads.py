"""What is run: sizes, prompts and sampling, as one JSON file per workload that every side reads. No torch."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan_rl.data.arithmetic import Arithmetic

TINY_TEXT = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?"
SMOLLM2 = "models/smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A random Llama over the tiny tokenizer.

    Attributes:
        layers: Number of them.
        dim: Width; heads have 32 dimensions and two share a key head.
        end_probability: Of the end token at every position, before any training.
    """

    layers: int
    dim: int
    end_probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same work for every side.

    Attributes:
        name: Of the workload.
        lengths: Whether every completion has ``max_tokens``, or ends where the model ends it.
        shape: Of the random model, or None for SmolLM2-135M.
        reward: A key of :data:`benchmarks.trl.rewards.REWARDS`.
        prompts: Prompts of a step.
        group_size: Completions of a prompt.
        prompt_tokens: Shortest and longest prompt of a random model, which are drawn log-uniformly.
        max_tokens: Longest completion.
        temperature: Of sampling and scoring.
        lr: Learning rate, constant.
        steps: Optimiser steps; one per batch of rollouts. The first is not counted.
        row_tokens: titan_rl's row budget (``training.seq_len``).
        micro_rows: Completions of a micro-batch in the plain loop.
        system_prompt: In front of every prompt of a chat model.
    """

    name: str
    lengths: Literal["equal", "natural"]
    shape: Shape | None
    reward: str = "digit_fraction"
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (128, 128)
    max_tokens: int = 64
    temperature: float = 1.0
    lr: float = 1e-3
    steps: int = 6
    row_tokens: int = 2048
    micro_rows: int = 16
    system_prompt: str = ""

    @property
    def samples(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size

    def write(self, folder: Path, model: Path) -> Path:
        """Write ``workload.json`` and ``prompts.jsonl``.

        Args:
            folder: Where.
            model: The model's directory, which the file names too.

        Returns:
            The first file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.rows()
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = folder / "workload.json"
        content = dataclasses.asdict(self) | {
            "model": str(model.resolve()),
            "prompts_path": str((folder / "prompts.jsonl").resolve()),
            "samples": self.samples,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def rows(self) -> list[dict[str, str]]:
        """Prompts and answers of all steps, in the order in which every side takes them."""
        count = self.prompts * self.steps
        if self.shape is None:
            train = Arithmetic(Arithmetic.Config(), split="train")
            chosen = random.Random(0).sample(range(len(train)), count)
            return [_row(train[i].messages[-1].content, str(train[i].answer)) for i in chosen]
        draw, shortest, longest = random.Random(0), *self.prompt_tokens
        rows = []
        for _ in range(count):
            length = round(shortest * (longest / shortest) ** draw.random())
            rows.append(_row("".join(draw.choice(TINY_TEXT) for _ in range(length)), ""))
        return rows


def _row(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": prompt, "answer": answer}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What :meth:`Workload.write` wrote.

    Args:
        path: ``workload.json``.

    Returns:
        Its content, and the rows.
    """
    spec: dict[str, Any] = json.loads(path.read_text())
    return spec, [json.loads(line) for line in Path(spec["prompts_path"]).read_text().splitlines()]


def of_step(rows: list[dict[str, str]], step: int, count: int) -> list[dict[str, str]]:
    """The prompts of a step, counted from 0.

    >>> [row["prompt"] for row in of_step([_row(name, "") for name in "abcd"], 1, 2)]
    ['c', 'd']
    """
    return rows[step * count : (step + 1) * count]


_NEVER, _ONE_IN_64 = 0.0, 1 / 64
_1M = {"layers": 5, "dim": 128}
_10M = {"layers": 8, "dim": 320}
_SLOWER: dict[str, Any] = {"prompts": 4, "lr": 1e-4, "steps": 4}
_NATURAL: dict[str, Any] = {"lengths": "natural", "prompt_tokens": (16, 128), "max_tokens": 256}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="1m-equal", lengths="equal", shape=Shape(**_1M, end_probability=_NEVER), lr=5e-4),
        Workload(name="1m-natural", shape=Shape(**_1M, end_probability=_ONE_IN_64), **_NATURAL),
        Workload(name="10m-equal", lengths="equal", shape=Shape(**_10M, end_probability=_NEVER), **_SLOWER),
        Workload(name="10m-natural", shape=Shape(**_10M, end_probability=_ONE_IN_64), **_SLOWER, **_NATURAL),
        Workload(
            name="quickstart",
            lengths="natural",
            shape=None,
            reward="last_number",
            prompts=12,
            max_tokens=8,
            temperature=0.7,
            lr=2e-5,
            steps=4,
            row_tokens=512,
            system_prompt="Reply with the number only.",
        ),
    )
}
