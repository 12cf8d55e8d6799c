"""A rank of :mod:`benchmarks.recovery`: ``titan_rl.train``, which notes when each part of its start was done.

The notes of a start are ``<dump_folder>/start_times/<attempt>-<rank>.json``, written when the checkpoint is
loaded: ``created``, ``imported`` and ``loaded`` in seconds since the epoch, and how long the parts in between
took (``process_group``, ``import_vllm``, ``engine``, ``load``).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "start_times"
_IMPORTS = ("titan_rl.train", "titan_rl.trainers.configuration", "titan_rl.trainers.session")

_notes: dict[str, float] = {}


def created() -> float:
    """When this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def main() -> int:
    """Run ``titan_rl.train`` with the arguments of this process; returns its exit code."""
    _notes["created"] = created()
    modules = [importlib.import_module(name) for name in _IMPORTS]
    _notes["imported"] = time.time()
    _time_parts()
    return modules[0].main(sys.argv[1:])


def _time_parts() -> None:
    _timed(importlib.import_module("torch.distributed"), "init_process_group", "process_group")
    vllm = importlib.import_module("titan_rl.generation.vllm")
    _timed(vllm, "import_engine", "import_vllm")
    _timed(vllm.VllmGenerator, "__init__", "engine")
    manager = importlib.import_module("titan_rl.resilience.saving").CheckpointManager
    _timed(manager, "load", "load", then=_write)


def _timed(owner: Any, name: str, part: str, *, then: Callable[[Any], None] = lambda _: None) -> None:
    """Add up the seconds of a function; ``then`` gets its first argument after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*arguments: Any, **given: Any) -> Any:
        started = time.time()
        found = original(*arguments, **given)
        _notes[part] = _notes.get(part, 0.0) + time.time() - started
        then(arguments[0] if arguments else None)
        return found

    setattr(owner, name, replaced)


def _write(manager: Any) -> None:
    folder = Path(manager.folder).parent / FOLDER
    folder.mkdir(exist_ok=True)
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ['RANK']}.json"
    (folder / name).write_text(json.dumps(_notes | {"loaded": time.time()}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
