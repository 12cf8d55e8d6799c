"""``status.json``: how a run ended, because torchrun hides the exit codes of its ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Literal

Outcome = Literal["running", "done", "preempted", "time_limit", "failed"]


def write_status(
    dump_folder: Path, outcome: Outcome, *, step: int, cause: str | None = None, requeue: bool = False
) -> None:
    """Write ``<dump_folder>/status.json``, whole or not at all, with host and process id of the writer.

    Args:
        dump_folder: The run's output directory.
        outcome: How it stands.
        step: Optimiser steps so far.
        cause: One line about the failure.
        requeue: Whether starting the same command again can help.
    """
    dump_folder.mkdir(parents=True, exist_ok=True)
    path = dump_folder / "status.json"
    partial = path.with_suffix(f".partial-{os.getpid()}")
    content = {"outcome": outcome, "step": step, "cause": cause, "requeue": requeue}
    content |= {"host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps(content, indent=2)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
