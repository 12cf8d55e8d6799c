"""The checkpoints of a folder: which are complete, which is the newest and the best, and which may go.

Standard library only.

A checkpoint is ``step-N``. It is written as ``saving-N`` and renamed when it is complete; one that goes is
renamed to ``removing-...`` first. So whatever is called ``step-N`` was complete once, and no crash can make
it look whole when it is not.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience.manifest import DamagedCheckpointError, Manifest, sync_directory

_STEP = re.compile(r"step-(\d+)")
_LEFTOVERS = ("saving-*", "removing-*")
FAILURES = "failed-saves.jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``step-N`` directory.

    Attributes:
        path: Where it is.
        step: Of its name.
        manifest: What it says it holds; None if it does not say.
        fault: Why it does not count; None for a complete one. By names and sizes; hashes are not computed.
    """

    path: Path
    step: int
    manifest: Manifest | None
    fault: str | None


def entry(path: Path) -> Entry:
    """Look at one checkpoint, by names and sizes.

    Args:
        path: A ``step-N`` directory, which may be missing.
    """
    match = _STEP.fullmatch(path.name)
    step = int(match[1]) if match else -1
    if not path.is_dir():
        return Entry(path, step, None, f"{path.name} does not exist")
    try:
        manifest = manifests.read(path)
    except DamagedCheckpointError as error:
        return Entry(path, step, None, str(error))
    fault = manifests.find_fault(path, manifest)
    if fault is None and manifest.step != step:
        fault = f"{path.name} says that it is of step {manifest.step}: it was renamed"
    return Entry(path, step, manifest, fault)


def entries(folder: Path) -> list[Entry]:
    """All ``step-N`` directories: those with a manifest in the order of writing, the others before them."""
    found = [entry(path) for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda e: (-1 if e.manifest is None else e.manifest.sequence, e.step))


def complete(found: Sequence[Entry]) -> list[tuple[Path, Manifest]]:
    """The complete ones, oldest first."""
    return [(e.path, e.manifest) for e in found if e.manifest is not None and e.fault is None]


def newest_first(found: Sequence[Entry]) -> list[tuple[Path, Manifest]]:
    """The complete ones that a run can be resumed from, newest first."""
    return [(path, manifest) for path, manifest in reversed(complete(found)) if manifest.is_resumable]


def best(found: Sequence[Entry], count: int = 1) -> list[Path]:
    """The complete checkpoints with the best held-out scores, best first; of equal ones the newer.

    Args:
        found: From :func:`entries`.
        count: How many at most.
    """
    scored = []
    for path, manifest in complete(found):
        held_out = manifest.facts.held_out
        if held_out is not None:
            sign = 1.0 if held_out.is_higher_better else -1.0
            scored.append((sign * held_out.value, manifest.sequence, path))
    return [path for *_, path in sorted(scored, reverse=True)[:count]]


def to_remove(found: Sequence[Entry], *, keep_latest: int, keep_best: int) -> list[Path]:
    """The complete checkpoints that retention takes away, oldest first.

    What is not complete is neither counted nor removed: a person may want to look at it.

    Args:
        found: From :func:`entries`.
        keep_latest: How many of those written last stay; 0: all.
        keep_best: How many with the best held-out score stay besides.
    """
    if keep_latest == 0:
        return []
    kept = {path for path, _ in newest_first(found)[:keep_latest]} | set(best(found, keep_best))
    kept |= {path for path, _ in complete(found)[-keep_latest:]}
    return [path for path, _ in complete(found) if path not in kept]


def saving_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder / f"saving-{step}"


def put_in_place(folder: Path, step: int) -> Path | None:
    """Turn a complete ``saving-N`` into ``step-N``.

    Returns:
        What an older one of that step is called now, to be deleted.
    """
    target = folder / f"step-{step}"
    replaced = discard(target) if target.exists() else None
    saving_path(folder, step).rename(target)
    sync_directory(folder)
    return replaced


def discard(path: Path) -> Path:
    """Take a checkpoint off the shelf, to be deleted; returns its new name.

    Once its name is gone it can be deleted piece by piece: no half of it is ever taken for a checkpoint.
    """
    name, number = path.name.removeprefix("step-"), 0  # TorchTitan takes any name with step-N in it for one
    while (target := path.with_name(f"removing-{name}.{number}")).exists():
        number += 1
    path.rename(target)
    return target


def clean_up(folder: Path) -> list[str]:
    """Delete what an interrupted save or removal left behind; returns the names."""
    left = [path for pattern in _LEFTOVERS for path in sorted(folder.glob(pattern))]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def note_failure(folder: Path, step: int, cause: str) -> None:
    """Remove what there is of a checkpoint that could not be saved, and write down that it failed."""
    shutil.rmtree(saving_path(folder, step), ignore_errors=True)
    # On a full or read-only file system this may fail as well; the log has it.
    with contextlib.suppress(OSError), (folder / FAILURES).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"step": step, "cause": cause}) + "\n")


def failures(folder: Path) -> list[tuple[int, str]]:
    """Step and cause of every save that failed, oldest first."""
    path = folder / FAILURES
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one may have been cut off on a full disk
            record = json.loads(line)
            found.append((int(record["step"]), str(record["cause"])))
    return found


def no_such_checkpoint(step: int, fault: str) -> ConfigError:
    """For ``checkpoint.load_step`` that names one that is missing or damaged."""
    return ConfigError(
        "checkpoint.load_step",
        "name a complete checkpoint of this run",
        f"{step}: {fault}",
        "Name another one (titan-rl checkpoints lists them), or leave it out for the newest complete one.",
    )


def none_complete(folder: Path, found: Sequence[Entry]) -> ConfigError:
    """For a folder with checkpoints of which none can be used: no reason to begin again unasked."""
    newest = max(found, key=lambda entry: entry.step)
    return ConfigError(
        "dump_folder",
        "hold a complete checkpoint to resume from, or none at all",
        newest.fault or f"{newest.path.name}, which holds the model alone",
        f"Delete {folder} to begin again; to start from the weights of one, name it in "
        "checkpoint.initial_load_path of a run in another dump_folder.",
    )
