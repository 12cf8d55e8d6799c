"""``titan-rl checkpoints DIR``: what a run has saved, and what of it can be used. No torch."""

from __future__ import annotations

from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf

_COLUMNS = ("step", "reward", "held-out", "size", "ranks", "saved", "")


def report(directory: Path, *, verify: bool = False) -> tuple[str, bool]:
    """The table of a run's checkpoints.

    Args:
        directory: A run's ``dump_folder``, the folder of its checkpoints, or a single checkpoint.
        verify: Also read every file and compare its hash; otherwise names and sizes only.

    Returns:
        The text, and whether every checkpoint is complete.

    Raises:
        ConfigError: there are no checkpoints.
    """
    folder, found = _find(directory)
    newest, best = shelf.newest_first(found), shelf.best(found)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    is_sound = True
    for entry in found:
        fault = entry.fault
        if fault is None and verify and entry.manifest is not None:
            fault = manifests.find_fault(entry.path, entry.manifest, hashes=True)
        is_sound = is_sound and fault is None
        notes = [fault] if fault else ["verified" if verify else "complete"]
        if entry.manifest is not None and not entry.manifest.is_resumable:
            notes.append("model only")
        notes += ["newest"] if newest and entry.path == newest[0][0] else []
        notes += ["best"] if entry.path in best else []
        rows.append((str(entry.step), *_numbers(entry.manifest), ", ".join(notes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"step {step} could not be saved: {cause}" for step, cause in shelf.failures(folder)]
    return "\n".join(line.rstrip() for line in lines), is_sound


def _find(directory: Path) -> tuple[Path, list[shelf.Entry]]:
    if directory.name.startswith("step-"):
        return directory.parent, [shelf.entry(directory)]
    for folder in (directory, directory / "checkpoint"):
        found = shelf.entries(folder)
        if found or shelf.failures(folder):
            return folder, found
    raise ConfigError(
        "The directory",
        "hold checkpoints: step-N directories, in it or in its checkpoint/",
        str(directory),
        "Name a run's dump_folder, or its checkpoint.folder.",
    )


def _numbers(manifest: manifests.Manifest | None) -> tuple[str, ...]:
    if manifest is None:
        return ("-",) * 5
    reward, held_out = manifest.facts.reward, manifest.facts.held_out
    return (
        "-" if reward is None else f"{reward:.4f}",
        "-" if held_out is None else f"{held_out.value:.4f}",
        _size(manifest.num_bytes),
        str(manifest.world_size),
        manifest.created.removesuffix("+00:00").replace("T", " "),
    )


def _size(num_bytes: int) -> str:
    """In the unit that a person would choose.

    >>> _size(10_688_769)
    '10.2 MiB'
    """
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and units[1:]:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
