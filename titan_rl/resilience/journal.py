"""The journal of an RL run: what every iteration did, bit for bit, however often the run was interrupted.

Two runs that did the same have equal journals, so it is what an exact resume is measured by. Each rank that
has rows of its own appends to ``<dump_folder>/journal/rank-R.jsonl``; a line is synced before the checkpoint
of its step can be complete, so every step that a checkpoint holds stands in the journal.

**Merging.** Every start of the run writes a line that says from which step it goes on. What earlier starts
wrote about later steps is *superseded* by it: those steps are executed again, or were rolled back. Of a step
that is left, all lines of one start belong together, one a rank, and hold different groups; a step of which a
rank's line is missing was cut off. So each step counts once, whatever was interrupted, and on whatever number
of ranks it was executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_rl.resilience.manifest import sync_directory
from titan_rl.titan.collectives import Collectives
from titan_rl.types import Group, Rollout

FOLDER = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One iteration, over all ranks. Two that are equal did the same, bit for bit.

    Attributes:
        step: Optimiser steps done after it.
        policy_version: After it.
        prompts: Index in the global draw and id of every prompt, by index; those of dropped groups too.
        rollouts: SHA-256 of the tokens of all rollouts, in the order of ``prompts`` and of the samples.
        rewards: Total rewards in the same order, as hexadecimal floats; None where one failed.
        losses: Of its optimiser steps, as hexadecimal floats; ``nan`` for one that was skipped.
        grad_norms: The same, global and before clipping.
        parameters: :func:`parameters_digest` after it; None unless ``resilience.journal_parameters`` is on.
    """

    step: int
    policy_version: int
    prompts: tuple[tuple[int, str], ...]
    rollouts: str
    rewards: tuple[str | None, ...]
    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    parameters: str | None


class Journal:
    """This rank's file, open for appending."""

    def __init__(self, dump_folder: Path, *, collectives: Collectives, resumed_step: int) -> None:
        """Begin a start. Collective.

        Args:
            dump_folder: Of the run.
            collectives: Of the run.
            resumed_step: Optimiser steps that are done: what earlier starts wrote about later ones is
                superseded.
        """
        folder = dump_folder / FOLDER
        self._path = folder / f"rank-{collectives.rank}.jsonl"
        self._writes = collectives.is_first_of_its_rows
        numbers = _starts(folder) if collectives.rank == 0 else {}
        number = str(max(numbers, default=-1) + 1) if collectives.rank == 0 else None
        self._start = int((collectives.first(number) or (0, "0"))[1])
        if self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            begins = {"resumed_step": resumed_step, "writers": collectives.data_size}
            begins |= {"world_size": collectives.world_size}
            begins |= {"attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
            self._append(begins)
            sync_directory(folder)

    def iteration(
        self,
        *,
        step: int,
        policy_version: int,
        groups: Sequence[Group],
        losses: Sequence[float],
        grad_norms: Sequence[float],
        parameters: str | None,
    ) -> None:
        """Append what an iteration did, and wait until it is on the disk.

        Args:
            step: Optimiser steps done.
            policy_version: After it.
            groups: This rank's, dropped ones included.
            losses: Of its optimiser steps, over all ranks.
            grad_norms: The same.
            parameters: :func:`parameters_digest`, or None.
        """
        if not self._writes:
            return
        self._append(
            {
                "step": step,
                "policy_version": policy_version,
                "groups": [_group(group) for group in groups],
                "losses": [loss.hex() for loss in losses],
                "grad_norms": [norm.hex() for norm in grad_norms],
                "parameters": parameters,
            }
        )

    def _append(self, content: Mapping[str, Any]) -> None:
        line = json.dumps({"start": self._start, "time": time.time(), **content}) + "\n"
        with self._path.open("ab") as stream:
            if stream.tell() and not _ends_with_newline(self._path):
                stream.write(b"\n")  # the process was killed in the middle of the line before
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())


def read(dump_folder: Path) -> list[Entry]:
    """The journal of a run, merged: one entry for each iteration, in their order.

    Args:
        dump_folder: Of the run.
    """
    return [entry for entry, is_superseded in _entries(dump_folder / FOLDER) if not is_superseded]


def differing_repeats(dump_folder: Path) -> list[tuple[Entry, Entry]]:
    """Steps that were executed more than once, and not alike each time.

    Args:
        dump_folder: Of the run.

    Returns:
        What was superseded, and what counts. Empty after interruptions on one number of ranks.
    """
    counting = {entry.step: entry for entry in read(dump_folder)}
    superseded = (entry for entry, is_superseded in _entries(dump_folder / FOLDER) if is_superseded)
    pairs = [(entry, counting[entry.step]) for entry in superseded if entry.step in counting]
    return [(before, after) for before, after in pairs if before != after]


def parameters_digest(tensors: Iterable[tuple[str, torch.Tensor]], *, is_computed: bool = True) -> str | None:
    """SHA-256 of a model, from the SHA-256 of each tensor by name, dtype and shape, in the order of names.

    Args:
        tensors: Names with full tensors; consumed one at a time, in any order. Gathering them may be
            collective, so all of it is consumed.
        is_computed: Whether this rank wants to know. The others only help to gather.
    """
    found = {}
    for name, tensor in tensors:
        if is_computed:
            content = tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data
            digest = hashlib.sha256(content).hexdigest()
            found[name] = f"{name} {tensor.dtype} {list(tensor.shape)} {digest}\n"
    together = "".join(found[name] for name in sorted(found))
    return hashlib.sha256(together.encode()).hexdigest() if is_computed else None


# ------------------------------------------------------------------------------------------------- writing


def _group(group: Group) -> dict[str, Any]:
    rollouts = [*group.rollouts, *([] if group.baseline is None else [group.baseline])]
    digest = hashlib.sha256()
    for rollout in rollouts:
        digest.update(_tokens(rollout))
    totals = [None if rollout.reward is None else float(rollout.reward.total).hex() for rollout in rollouts]
    return {
        "index": group.index,
        "prompt_id": group.prompt.id,
        "sha256": digest.hexdigest(),
        "rewards": totals,
    }


def _tokens(rollout: Rollout) -> bytes:
    """Sample, seed, and the tokens of every prompt and completion, each with its length before it."""
    numbers = array("q", [rollout.sample_index, rollout.seed])
    for turn in rollout.turns:
        for token_ids in (turn.prompt_token_ids, turn.completion.token_ids):
            numbers.extend([len(token_ids), *token_ids])
    return numbers.tobytes()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


# ------------------------------------------------------------------------------------------------- reading


def _read_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # cut off by a kill
            found.append(json.loads(line))
    return found


def _starts(folder: Path) -> dict[int, dict[str, Any]]:
    """The line that each start began with, by its number."""
    lines = _read_lines(folder / "rank-0.jsonl")
    return {line["start"]: line for line in lines if "resumed_step" in line}


def _entries(folder: Path) -> Iterator[tuple[Entry, bool]]:
    """Every iteration that was not cut off, by start and step, and whether it is superseded."""
    starts = _starts(folder)
    lines: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for path in folder.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for line in _read_lines(path):
            if "step" in line:
                lines.setdefault((line["start"], line["step"]), {})[rank] = line
    for (start, step), by_rank in sorted(lines.items()):
        later = (begun["resumed_step"] for number, begun in starts.items() if number > start)
        if start in starts and 0 in by_rank and len(by_rank) == starts[start]["writers"]:
            yield _merged(by_rank), any(step > resumed for resumed in later)


def _merged(by_rank: Mapping[int, dict[str, Any]]) -> Entry:
    groups = sorted((g for line in by_rank.values() for g in line["groups"]), key=lambda g: g["index"])
    together = "".join(f"{group['sha256']}\n" for group in groups)
    first = by_rank[0]
    return Entry(
        step=first["step"],
        policy_version=first["policy_version"],
        prompts=tuple((group["index"], group["prompt_id"]) for group in groups),
        rollouts=hashlib.sha256(together.encode()).hexdigest(),
        rewards=tuple(total for group in groups for total in group["rewards"]),
        losses=tuple(first["losses"]),
        grad_norms=tuple(first["grad_norms"]),
        parameters=first["parameters"],
    )
