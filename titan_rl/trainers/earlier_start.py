"""What an earlier start left in ``dump_folder``: a run to continue, one that is done, or one to protect.

All of it is decided before anything is written, so that a start that is refused changes nothing.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titan_rl.errors import ConfigError
from titan_rl.resilience.state import RunState

_STEP = re.compile(r"step-(\d+)")


def results(config: Any) -> Path | None:
    """One file or folder of an earlier run that a start from the beginning would replace, if there is any.

    Args:
        config: A trainer's configuration.
    """
    folder = Path(config.dump_folder)
    patterns = (f"{config.checkpoint.folder}/step-*", "rollouts/*", "export/*", "summary.json")
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


def finished(config: Any, config_text: str) -> str | None:
    """Say what a run did that was started with the same configuration before and is done.

    Args:
        config: A trainer's configuration.
        config_text: The same, as it is written.

    Returns:
        The text to print; None when there is something left to do, a file that was deleted for example.
    """
    folder = Path(config.dump_folder)
    status = _status(folder)
    if status.get("outcome") != "done" or not _is_same(folder, config_text):
        return None
    summary = _read(folder / "summary.json")
    paths = [Path(path) for path in summary.get("paths", {}).values()]
    if config.checkpoint.enable:
        paths.append(folder / config.checkpoint.folder / f"step-{status['step']}")
    if config.model.export:
        paths.append(folder / "export")
    if not all(path.exists() for path in paths):
        return None
    lines = [
        "An earlier start with the same configuration finished this run; nothing is left to do.",
        f"Done: {status['step']} steps.",
        *_held_out(summary),
        *(f"  {name + ':':<12} {path}" for name, path in summary.get("paths", {}).items()),
        f"To run it again, set another dump_folder or delete {folder}.",
    ]
    return "\n".join(lines)


def refuse_overwriting(config: Any, config_text: str) -> None:
    """Refuse to start from the beginning in a folder that holds the results of another run.

    The same run may begin again while it is not done: it repeats what it did.

    Args:
        config: A trainer's configuration.
        config_text: The same, as it is written.

    Raises:
        ConfigError: files would be lost.
    """
    folder = Path(config.dump_folder)
    if checkpoint_to_resume(config) is not None:
        return
    if _is_same(folder, config_text) and _status(folder).get("outcome") != "done":
        return
    found = results(config)
    if found is None:
        return
    raise ConfigError(
        "dump_folder",
        "hold nothing of another run, or a checkpoint to continue from"
        + ("" if config.checkpoint.enable else " with checkpoint.enable = true"),
        f"{folder} with {found.relative_to(folder)}",
        f"Choose another dump_folder, or delete {folder} if its results are not needed.",
    )


def checkpoint_to_resume(config: Any) -> Path | None:
    """The checkpoint that TorchTitan's checkpointer will load: the newest whole one, or the one asked for.

    Args:
        config: A trainer's configuration.

    Raises:
        ConfigError: ``checkpoint.load_step`` names one that does not exist.
    """
    section = config.checkpoint
    if not section.enable:
        return None
    folder = Path(config.dump_folder) / section.folder
    if section.load_step != -1:
        path = folder / f"step-{section.load_step}"
        if path.is_dir():
            return path
        raise ConfigError(
            "checkpoint.load_step",
            "name a checkpoint of this run",
            section.load_step,
            f"There is no {path}.",
        )
    steps = [int(match[1]) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    # Written last: without it a checkpoint is not whole.
    last = (".metadata", "model.safetensors.index.json")
    whole = [step for step in steps if any((folder / f"step-{step}" / name).is_file() for name in last)]
    return folder / f"step-{max(whole)}" if whole else None


def check_resume(config: Any, state: RunState, *, name: str) -> None:
    """Refuse to continue a run with another seed or other prompts, before anything is built.

    Args:
        config: A trainer's configuration.
        state: Of this start; it takes over the counters, as it will again when the checkpoint is restored.
        name: Of the state in checkpoints.

    Raises:
        ConfigError: the checkpoint belongs to another run.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return
    stored = {name: state.state_dict()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(stored, checkpoint_id=path, no_dist=True)
    except (CheckpointException, RuntimeError) as error:
        raise ConfigError(
            "dump_folder",
            f"hold checkpoints with all of the {name}, or none",
            str(path),
            "Choose another dump_folder; to start from the weights of this checkpoint, name it in "
            "checkpoint.initial_load_path.",
        ) from error
    state.load_state_dict(stored[name])


def _held_out(summary: Mapping[str, Any]) -> Iterator[str]:
    """What was measured before and after, by whichever trainer."""
    for name in (key.removesuffix("_before") for key in summary if key.endswith("_before")):
        before, after = summary[f"{name}_before"], summary.get(f"{name}_after")
        if before is not None and after is not None:
            yield f"Held-out {name}: {before:.3f} before, {after:.3f} after."


def _status(folder: Path) -> Mapping[str, Any]:
    return _read(folder / "status.json")


def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_same(folder: Path, config_text: str) -> bool:
    path = folder / "config.toml"
    return path.is_file() and path.read_text(encoding="utf-8") == config_text
