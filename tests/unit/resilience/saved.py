"""Checkpoints as the manager leaves them, without torch."""

from __future__ import annotations

from pathlib import Path

from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf
from titan_rl.resilience.manifest import Facts, HeldOut, Manifest

FILES = {
    ".metadata": b"names and shapes",
    "__0_0.distcp": b"shard of rank 0",
    "__1_0.distcp": b"and of rank 1",
}


def write_checkpoint(
    folder: Path,
    step: int,
    *,
    sequence: int | None = None,
    score: float | None = None,
    is_resumable: bool = True,
    state: dict | None = None,
    is_higher_better: bool = True,
) -> Path:
    """A complete ``step-N``, the newest of its folder unless ``sequence`` says otherwise."""
    directory = shelf.saving_path(folder, step)
    directory.mkdir(parents=True)
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    manifests.write(
        directory,
        Manifest(
            step=step,
            sequence=sequence or len(shelf.entries(folder)) + 1,
            files={name: manifests.hash_file(directory / name) for name in manifests.file_names(directory)},
            is_resumable=is_resumable,
            world_size=2,
            created="2026-12-01T05:23:41+00:00",
            titan_rl="0.1.0",
            model="",
            config="",
            facts=Facts(
                trainer="rl",
                reward=0.25,
                held_out=None if score is None else HeldOut("evaluation/score", score, is_higher_better),
                state=state or {},
            ),
        ),
    )
    shelf.put_in_place(folder, step)
    return folder / f"step-{step}"
