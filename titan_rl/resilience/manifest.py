"""The manifest of a checkpoint: its files with sizes and SHA-256, and what it is a checkpoint of.

It is written last and atomically, so a checkpoint without one is not complete. Standard library only: the
listing needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
_SIDECAR = re.compile(r"\.hashes-\d+\.json")


class DamagedCheckpointError(Exception):
    """A checkpoint is not what its manifest says, or has none."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        size: In bytes.
        sha256: Of its contents, in hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out score measured with exactly the weights of a checkpoint.

    Attributes:
        name: Of the metric.
        value: What was measured.
        is_higher_better: Which way is better.
    """

    name: str
    value: float
    is_higher_better: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the trainer says about a checkpoint when it is saved.

    Attributes:
        trainer: ``rl``, ``supervised``, ``preference`` or ``reward_model``.
        reward: Mean training reward of the last iteration; None where there is none.
        held_out: Measured at this very step; None if nothing was.
        state: Whole numbers that decide how the run goes on, by the name of their part of the checkpoint.
    """

    trainer: str = ""
    reward: float | None = None
    held_out: HeldOut | None = None
    state: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands in ``manifest.json``.

    Attributes:
        step: Optimiser steps done.
        sequence: Counts the checkpoints of a folder in the order in which they were written. The newest has
            the highest; after a roll-back that is not the one with the highest step.
        files: By name relative to the checkpoint.
        is_resumable: False for one that holds the model alone.
        world_size: Ranks that wrote it.
        created: UTC, ISO 8601.
        titan_rl: Version of titan_rl.
        model: Fingerprint of names, shapes and dtypes of the model's tensors.
        config: SHA-256 of the resolved configuration, in ``config.toml`` beside it; empty without one.
        facts: What the trainer said.
    """

    step: int
    sequence: int
    files: Mapping[str, FileRecord]
    is_resumable: bool
    world_size: int
    created: str
    titan_rl: str
    model: str
    config: str
    facts: Facts

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(record.size for record in self.files.values())


def hash_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, read once."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return FileRecord(size=stream.tell(), sha256=digest.hexdigest())


def fingerprint(content: Any) -> str:
    """SHA-256 of anything that JSON can express, whatever the order of its keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_names(directory: Path) -> list[str]:
    """Names, relative to the checkpoint, of the files that its manifest lists. Sorted."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(NAME) and not _SIDECAR.fullmatch(name))


def share(names: Iterable[str], *, rank: int, world_size: int) -> list[str]:
    """The files that a rank hashes: those that it wrote, by their names, and a share of the others.

    DCP names a file ``__RANK_N.distcp``, so a rank mostly reads what is still in its machine's page cache.

    Args:
        names: Of all files, in one order on all ranks.
        rank: Of this process.
        world_size: Number of ranks.

    >>> share([".metadata", "__0_0.distcp", "__1_0.distcp"], rank=1, world_size=2)
    ['__1_0.distcp']
    """
    mine = []
    for index, name in enumerate(names):
        written = re.match(r"__(\d+)_", name)
        owner = int(written[1]) if written else index
        if owner % world_size == rank:
            mine.append(name)
    return mine


def write_sidecar(directory: Path, rank: int, records: Mapping[str, FileRecord]) -> None:
    """Leave what a rank has hashed for the rank that writes the manifest."""
    text = json.dumps({name: asdict(record) for name, record in records.items()})
    (directory / f".hashes-{rank}.json").write_text(text, encoding="utf-8")


def take_sidecars(directory: Path) -> dict[str, FileRecord]:
    """Read and remove what the ranks have hashed."""
    records = {}
    for path in sorted(directory.glob(".hashes-*.json")):
        records |= {name: FileRecord(**entry) for name, entry in _parse(path).items()}
        path.unlink()
    return records


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest: to another name, synced, then renamed. A crash leaves none or all of it."""
    body = asdict(manifest)
    text = json.dumps({"format": FORMAT, "sha256": fingerprint(body), **body}, indent=1) + "\n"
    partial = directory / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(directory / NAME)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: there is none, or it is not what was written.
    """
    path = directory / NAME
    if not path.is_file():
        raise DamagedCheckpointError(
            f"{directory.name} has no {NAME}: it was cut off while it was written, or not written by titan_rl"
        )
    content = _parse(path)
    if content.pop("format", None) != FORMAT:
        raise DamagedCheckpointError(f"{directory.name}/{NAME} is not of format {FORMAT}")
    expected, got = content.pop("sha256", None), fingerprint(content)
    if expected != got:
        raise DamagedCheckpointError(f"{directory.name}/{NAME}: expected SHA-256 {expected}, got {got}")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    facts = content.pop("facts")
    held_out = facts.pop("held_out")
    facts = Facts(**facts, held_out=None if held_out is None else HeldOut(**held_out))
    return Manifest(**content, files=files, facts=facts)


def find_fault(
    directory: Path, manifest: Manifest, *, names: Iterable[str] | None = None, hashes: bool = False
) -> str | None:
    """What is wrong with the files of a checkpoint: the first fault, or None.

    Args:
        directory: Of the checkpoint.
        manifest: From :func:`read`.
        names: Which files to look at; all by default.
        hashes: Also read and hash them.
    """
    for name in manifest.files if names is None else names:
        expected, path = manifest.files[name], directory / name
        shown = f"{directory.name}/{name}"
        try:
            size = path.stat().st_size
            if size != expected.size:
                return f"{shown}: expected {expected.size} bytes, got {size}"
            if hashes and (got := hash_file(path)).sha256 != expected.sha256:
                return f"{shown}: expected SHA-256 {expected.sha256}, got {got.sha256}"
        except FileNotFoundError:
            return f"{shown}: expected {expected.size} bytes, got no such file"
        except OSError as error:
            return f"{shown} cannot be read: {error.strerror}"
    return None


def _parse(path: Path) -> dict[str, Any]:
    shown = f"{path.parent.name}/{path.name}"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{shown} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{shown} is not a JSON object")
    return content
