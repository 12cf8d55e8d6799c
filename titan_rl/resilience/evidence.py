"""The micro-batch of a step that was not applied, kept so that people can look at it.

Files are in the safetensors format: tensors and a few texts, no code, nothing of the environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = "bad_steps"
"""Below ``dump_folder``."""
MOST_KEPT = 20
"""Files of one rank; the oldest go first."""


def worst(losses: Sequence[float]) -> int:
    """The micro-batch to keep: the first whose loss is not finite, else the one with the largest.

    Args:
        losses: One a micro-batch, at least one.

    >>> worst([0.5, -3.0, 1.0]), worst([0.5, math.nan, math.inf])
    (1, 1)
    """
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            return number
    return max(range(len(losses)), key=lambda number: abs(losses[number]))


def badness(losses: Sequence[float]) -> int:
    """A number to compare ranks by: the larger, the likelier that this one's micro-batches are the cause.

    Args:
        losses: One a micro-batch; none: this rank has no part in it.

    >>> badness([]), badness([1e-3]), badness([1e-3, 2.0]) < badness([math.nan])
    (0, 1001, True)
    """
    if not losses:
        return 0
    largest = max(abs(loss) if math.isfinite(loss) else math.inf for loss in losses)
    return 1 + int(min(largest, 1e12) * 1e6)


def keep(
    dump_folder: Path, *, step: int, rank: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]
) -> Path:
    """Write a micro-batch.

    Args:
        dump_folder: The run's.
        step: That was not applied.
        rank: Whose micro-batch it is.
        tensors: By name.
        facts: What else is known, for the file's metadata.

    Returns:
        ``<dump_folder>/bad_steps/step-000007.rank-1.safetensors``.
    """
    folder = dump_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob(f"step-*.rank-{rank}.safetensors"))[: -MOST_KEPT + 1 or None]:
        old.unlink()
    path = folder / f"step-{step:06d}.rank-{rank}.safetensors"
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, str(path), metadata=dict(facts))
    return path
