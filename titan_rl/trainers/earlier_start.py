"""What an earlier start left in ``dump_folder``: a run to continue, one that is done, or one to protect.

All of it is decided before anything is written, so that a start that is refused changes nothing.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.choice import owner_of
from titan_rl.config.differences import diff
from titan_rl.errors import ConfigError
from titan_rl.observability.summary import read_json
from titan_rl.resilience import manifest, shelf
from titan_rl.resilience.state import RunState
from titan_rl.titan.api import logger
from titan_rl.trainers import resume_rules


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
    summary = read_json(folder / "summary.json")
    paths = [Path(path) for path in summary.get("paths", {}).values()]
    if config.checkpoint.enable:
        paths.append(folder / config.checkpoint.folder / f"step-{status['step']}")
    if config.model.export:
        paths.append(folder / "export")
        paths += [folder / "adapter"] if getattr(config, "lora", None) is not None else []
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
    """The checkpoint that a run will load: the newest complete one, or the one asked for.

    Names and sizes are looked at, not yet the hashes: that takes all ranks.

    Args:
        config: A trainer's configuration.

    Raises:
        ConfigError: ``checkpoint.load_step`` names one that is missing or damaged, or there are checkpoints
            and none is complete.
    """
    section = config.checkpoint
    if not section.enable:
        return None
    folder = Path(config.dump_folder) / section.folder
    if section.load_step != -1:
        asked = shelf.entry(folder / f"step-{section.load_step}")
        if asked.fault is not None:
            raise shelf.no_such_checkpoint(section.load_step, asked.fault)
        return asked.path
    found = shelf.entries(folder)
    newest = shelf.newest_first(found)
    if found and not newest:
        raise shelf.none_complete(folder, found)
    return newest[0][0] if newest else None


def check_changes(config: Any, config_text: str) -> None:
    """Say what changed since the checkpoint that is about to be resumed, and refuse what may not.

    Args:
        config: A trainer's configuration.
        config_text: The same, as it is written.

    Raises:
        ConfigError: a key may not change, or another trainer wrote the checkpoint.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return
    said, trainer = manifest.read(path), getattr(owner_of(type(config)), "kind", "")
    if said.facts.trainer and said.facts.trainer != trainer:
        raise ConfigError(
            "trainer",
            f"stay {said.facts.trainer} when a run is resumed",
            trainer,
            "Choose another dump_folder; to start from the weights of this checkpoint, name it in "
            "checkpoint.initial_load_path.",
        )
    stored = path / "config.toml"
    if not stored.is_file():
        return
    changes = resume_rules.judge(
        diff(tomllib.loads(stored.read_text(encoding="utf-8")), tomllib.loads(config_text))
    )
    if os.environ.get("RANK", "0") == "0":
        for change in changes:
            logger.warning(
                "%s is %r, and was %r in the checkpoint of step %d: %s.",
                change.key,
                change.new,
                change.old,
                said.step,
                change.rule.why,
            )


def check_resume(config: Any, state: RunState, *, name: str) -> None:
    """Refuse to continue a run with another seed or other prompts, before anything is built.

    Args:
        config: A trainer's configuration.
        state: Of this start.
        name: Of the state in checkpoints.

    Raises:
        ConfigError: the checkpoint belongs to another run.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return
    stored = manifest.read(path).facts.state.get(name, {})
    missing = sorted(set(state.numbers()) - set(stored))
    if missing:
        raise ConfigError(
            "dump_folder",
            f"hold checkpoints with all of the {name}, or none",
            f"{path} without {', '.join(missing)}",
            "Choose another dump_folder; to start from the weights of this checkpoint, name it in "
            "checkpoint.initial_load_path.",
        )
    state.check(stored)


def _held_out(summary: Mapping[str, Any]) -> Iterator[str]:
    """What was measured before and after, by whichever trainer."""
    for name in (key.removesuffix("_before") for key in summary if key.endswith("_before")):
        before, after = summary[f"{name}_before"], summary.get(f"{name}_after")
        if before is not None and after is not None:
            yield f"Held-out {name}: {before:.3f} before, {after:.3f} after."


def _status(folder: Path) -> Mapping[str, Any]:
    return read_json(folder / "status.json")


def _is_same(folder: Path, config_text: str) -> bool:
    path = folder / "config.toml"
    return path.is_file() and path.read_text(encoding="utf-8") == config_text
