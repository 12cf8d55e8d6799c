"""SIGTERM, SIGINT (Ctrl-C) and SIGUSR1, seen at once whatever the main thread is doing.

A Python handler runs between two instructions of the main thread, so it waits for as long as that thread
waits in a collective. Here the interpreter's own handler writes to a pipe, and a thread reads it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Callback = Callable[[signal.Signals], None]
_callback: Callback | None = None  # signals belong to the process, and so does who is told
_descriptors: tuple[int, int] | None = None


def listen(callback: Callback) -> None:
    """Have a function called, in a thread of its own, whenever one of ``SIGNALS`` arrives.

    Children that are forked and children that are executed do not inherit this.

    Args:
        callback: Takes the place of an earlier one. It may end the process.
    """
    global _callback, _descriptors
    _callback = callback
    if _descriptors is None:
        _descriptors = os.pipe()
        os.set_blocking(_descriptors[1], False)
        threading.Thread(target=_read, args=(_descriptors[0],), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget)
    signal.set_wakeup_fd(_descriptors[1], warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _noted)


def stop_listening() -> None:
    """Let signals do again what they do in a process that never listened."""
    global _callback
    _callback = None
    if _descriptors is not None:
        for number in SIGNALS:
            # Python raises KeyboardInterrupt by a handler of its own.
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


def _noted(number: int, frame: object) -> None:
    """Nothing: the pipe has it. Without a handler the signal would end the process."""


def _read(descriptor: int) -> None:
    while byte := os.read(descriptor, 1):
        if byte[0] not in SIGNALS or _callback is None:
            continue
        try:
            _callback(signal.Signals(byte[0]))
        except Exception:
            traceback.print_exc(file=sys.stderr)


def _forget() -> None:
    """In a forked child: it would write into the parent's pipe, and survive SIGTERM."""
    global _descriptors
    if _descriptors is not None:
        stop_listening()
        _descriptors = None
