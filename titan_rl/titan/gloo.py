"""gloo's process groups with one worker thread each, because two corrupt the heap.

A ``ProcessGroupGloo`` of torch 2.14 has two threads. When a collective is done, whoever waits for it goes on,
and *then* its thread writes the collective's name into a string of the group, without a lock
(``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). The other thread may be doing the same
for another collective: one that is under way too, or the next. A name of more than 15 characters lies on the
heap, as that of ``all_gather_into_tensor`` does, which FSDP and DTensor use: its memory is then freed twice,
and the rank aborts wherever it allocates next (``malloc(): unaligned tcache chunk detected``).

With one thread the collectives of a group are done in the order in which they were begun, which is the same
on all ranks. Those of different groups still overlap.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

_INTERFACES = "GLOO_SOCKET_IFNAME"
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_original: Any = ProcessGroupGloo.__init__


def install() -> None:
    """Give every group that is made from now on one thread; repeating is free."""
    ProcessGroupGloo.__init__ = _init  # pyrefly: ignore[bad-assignment]


def _init(
    self: ProcessGroupGloo,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta = _DEFAULT_TIMEOUT,
    enable_reconfigure: bool = False,
) -> None:
    """As torch's constructor of these arguments, which leaves no choice of the number of threads."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    devices = [kind.create_device(interface=name) for name in names]
    options._devices = devices or [kind.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    options.enable_reconfigure = enable_reconfigure
    _original(self, store, rank, size, options)
