"""An asynchronous save that takes little from training: its copy, its writer, and their priority.

Training waits while the state is copied, and from then on shares the machine with what is written and hashed.
Memory that is new is mapped and cleared by the kernel page by page, so the copy goes to the same memory every
time; and where cores are scarce, the threads that write and hash come after those that train.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

_LOWEST = 19


def yield_to_training() -> None:
    """Give this thread the lowest priority, for good. Linux alone has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)


def stager() -> DefaultStager:
    """Copies a state into host memory, while the caller waits, and into the same memory the next time."""
    plain = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return DefaultStager(plain)


def save(state: dict[str, Any], directory: str, *, group: Any, copies: DefaultStager) -> Future[Any]:
    """DCP's asynchronous save, written by a thread that comes after training. Collective.

    Args:
        state: What is saved; may change when this returns.
        directory: Of the checkpoint.
        group: Over which the ranks agree on what each writes.
        copies: From :func:`stager`; no earlier save of it is under way.

    Returns:
        Done when this rank's files are written.
    """
    pending = dcp.async_save(
        state,
        checkpoint_id=directory,
        storage_writer=_YieldingWriter(directory),
        process_group=group,
        async_stager=copies,
    )
    return cast("Future[Any]", pending)  # not the two futures of staging that does not wait


class _YieldingWriter(FileSystemWriter):
    """DCP's writer; it writes in a thread that DCP makes for each save."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files."""
        yield_to_training()
        return super().write_data(plan, planner)
