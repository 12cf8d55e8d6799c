"""Where a rank is: phase, step and time of its last sign of life, in memory that another process can read.

One board per process, like its signals: whoever makes progress says so with :func:`beat`, and what may take
long or wait for others stands in a :func:`phase`. Without a board both cost next to nothing. Only the main
thread writes. Standard library only: the process that watches reads with the same code.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = (
    "start",
    "data",
    "reference",
    "generate",
    "reward",
    "score",
    "train",
    "sync",
    "evaluate",
    "checkpoint",
    "collective",
    "end",
)
"""What a rank can be at. ``collective`` is everything between the others, where the ranks agree."""

_SIZE = 4096
_LAYOUT = struct.Struct("=QIqqd")
_READS = 100


class Sign(NamedTuple):
    """A sign of life.

    Attributes:
        number: Grows with every sign.
        phase: One of :data:`PHASES`.
        step: Optimiser step that is being worked on; 0 before the first.
        saved: Step of the newest complete checkpoint; 0 if there is none.
        time: ``time.monotonic()`` of the sign, which all processes of a machine share.
    """

    number: int
    phase: str
    step: int
    saved: int
    time: float


class Board:
    """Shared memory with one sign of life."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory.

        Args:
            descriptor: From :func:`memory`, here or in the process that it was made in.
        """
        self._memory = mmap.mmap(descriptor, _SIZE)

    def write(self, number: int, *, phase: str, step: int, saved: int) -> None:
        """Put a sign of life.

        Args:
            number: Of the sign, from 1.
            phase: One of :data:`PHASES`.
            step: See :class:`Sign`.
            saved: See :class:`Sign`.
        """
        content = (PHASES.index(phase), step, saved, time.monotonic())
        # An odd first number says that the rest is being written.
        _LAYOUT.pack_into(self._memory, 0, 2 * number - 1, *content)
        _LAYOUT.pack_into(self._memory, 0, 2 * number, *content)

    def read(self) -> Sign:
        """The newest sign of life."""
        first = _LAYOUT.unpack_from(self._memory)
        for _ in range(_READS):
            again = _LAYOUT.unpack_from(self._memory)
            if first == again and first[0] % 2 == 0:
                break
            first = again
        # A process that was stopped in the middle of writing is read as it is.
        number, phase, step, saved, at = first
        return Sign((number + 1) // 2, PHASES[phase % len(PHASES)], step, saved, at)


def memory(name: str) -> int:
    """Descriptor of new memory without a name in any file system; it goes with the last who has it.

    Args:
        name: For people who look at ``/proc``.
    """
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, _SIZE)
    return descriptor


_board: Board | None = None
_number, _phase, _step, _saved = 0, "start", 0, 0


def show_on(board: Board | None) -> None:
    """Give signs of life on a board from now on; None: on none.

    Args:
        board: Takes the place of an earlier one.
    """
    global _board, _phase, _step, _saved
    _board, _phase, _step, _saved = board, "start", 0, 0
    beat()


def beat() -> None:
    """Say that this rank makes progress in what it is at."""
    global _number
    if _board is not None:
        _number += 1
        _board.write(_number, phase=_phase, step=_step, saved=_saved)


def enter(name: str, *, step: int | None = None, saved: int | None = None) -> None:
    """Be at something else from now on.

    Args:
        name: One of :data:`PHASES`.
        step: See :class:`Sign`; None: as before.
        saved: See :class:`Sign`; None: as before.
    """
    global _phase, _step, _saved
    _phase = name
    _step = _step if step is None else step
    _saved = _saved if saved is None else saved
    beat()


@contextmanager
def phase(name: str) -> Generator[None]:
    """Be at something for a block, and afterwards at what was before.

    >>> with phase("train"):
    ...     current()
    'train'
    >>> current()
    'start'

    Args:
        name: One of :data:`PHASES`.
    """
    before = _phase
    enter(name)
    try:
        yield
    finally:
        enter(before)


def current() -> str:
    """The phase that this process is in."""
    return _phase
