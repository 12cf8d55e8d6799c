"""What loading or saving a distributed checkpoint (DCP) raises: its own exception is no ``Exception``."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

CHECKPOINT_ERRORS: tuple[type[BaseException], ...] = (Exception, CheckpointException)
"""For an ``except`` around DCP: ``except Exception`` alone lets a damaged or foreign checkpoint through."""


def cause_of(error: BaseException) -> str:
    """Say in one line what went wrong, with the rank where DCP knows it: it collects those of all ranks.

    >>> cause_of(CheckpointException("load", {1: (KeyError("lm_head.weight"), None)}))
    "rank 1: KeyError: 'lm_head.weight'"
    >>> cause_of(FileNotFoundError(2, "No such file", "step-3"))
    "FileNotFoundError: [Errno 2] No such file: 'step-3'"
    """
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {cause_of(inner)}"
    return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
