"""How long this process has waited in collectives, to tell a slow rank from those that wait for it.

Counted is what blocks the main thread in ``Work.wait``: gloo's collectives on any device, but for DTensor's,
such as the gathers of a weight push, which wait in C++. NCCL's only queue up on the GPU, so that with them
the seconds of a training step say nothing about who was slow in it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.distributed import Work

_waited = 0.0
_is_installed = False


def install() -> None:
    """Begin to count; repeating is free."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    original = Work.wait

    def wait(self: Any, *arguments: Any, **named: Any) -> Any:
        global _waited
        started = time.perf_counter()
        try:
            return original(self, *arguments, **named)
        finally:
            if threading.current_thread() is threading.main_thread():
                _waited += time.perf_counter() - started

    Work.wait = wait


def waited_seconds() -> float:
    """Seconds that the main thread has waited since :func:`install`."""
    return _waited
