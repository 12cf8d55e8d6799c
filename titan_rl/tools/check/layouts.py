"""Which layouts a check runs, and the ways in which each lays out its rows. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

REFERENCE = "one rank, one padded micro-batch"
SPLITS, ROWS, RANKS, LAYOUT = "micro-batches", "rows", "data parallel", "layout"
"""What a comparison is about."""
AXES = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "context": "context_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
}
"""Name of an axis and its key; the first two are data parallel."""
DEGREE = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One step that is computed, to be compared with the reference.

    Attributes:
        name: Unique in a check.
        about: What the comparison is about.
        rows: ``padded``: one sample a row; ``packed``: as a run would; ``joined``: packed rows, all of them
            in one micro-batch.
        sizes: Rows of the padded micro-batches, in order, the last repeated; 0 for all that are left.
        is_lopsided: The first data-parallel rank has all samples, the other none.
    """

    name: str
    about: str
    rows: str = "padded"
    sizes: tuple[int, ...] = (0,)
    is_lopsided: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes that have degree 2, and the steps computed under them."""

    axes: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def world_size(self) -> int:
        """Ranks of it."""
        return DEGREE ** len(self.axes)

    @property
    def degrees(self) -> dict[str, int]:
        """``[parallelism]`` keys and values."""
        return {key: DEGREE if axis in self.axes else 1 for axis, key in AXES.items()}


_ONE_RANK = (
    Case(REFERENCE, ""),
    Case("a micro-batch for each row", SPLITS, sizes=(1,)),
    Case("micro-batches of 1, 3, 1, 2, 2, ... rows", SPLITS, sizes=(1, 3, 1, 2)),
    Case("packed rows, one micro-batch", ROWS, rows="joined"),
    Case("packed rows, a micro-batch for each", ROWS, rows="packed"),
)
_TWO_RANKS = (
    Case("2 data-parallel ranks, a micro-batch on each", RANKS),
    Case("2 data-parallel ranks, one without samples", RANKS, is_lopsided=True),
)


def axes_in_use(parallelism: Any) -> list[str]:
    """Axes whose degree may be above 1: ``data_parallel_shard_degree = -1`` takes the ranks that are left.

    Args:
        parallelism: TorchTitan's section.
    """
    return [axis for axis, key in AXES.items() if getattr(parallelism, key) not in (0, 1)]


def layouts_of(parallelism: Any) -> list[Layout]:
    """All layouts of a check, by number of ranks: each axis alone, and each pair.

    Args:
        parallelism: TorchTitan's section of the user's run.
    """
    axes = axes_in_use(parallelism)
    data = "replicate" if "replicate" in axes and "shard" not in axes else "shard"
    singles = [(axis,) for axis in axes]
    chosen: list[Layout] = [Layout((), _ONE_RANK)]
    if (data,) not in singles:
        chosen.append(Layout((data,), _TWO_RANKS))
    for names in (*singles, *combinations(axes, 2)):
        cases = _TWO_RANKS if names == (data,) else ()
        title = " x ".join(f"{axis} {DEGREE}" for axis in names)
        chosen.append(Layout(names, (*cases, Case(title, LAYOUT, rows="packed"))))
    return chosen


def not_covered(parallelism: Any) -> list[str]:
    """What of the user's layout is not checked, and why.

    Args:
        parallelism: TorchTitan's section.
    """
    notes = []
    axes = axes_in_use(parallelism)
    if len(axes) > 2:
        notes.append(
            f"{' x '.join(axes)} together: at most two axes on at most 4 ranks; every pair is checked"
        )
    large = [
        f"{key} = {getattr(parallelism, key)}" for key in AXES.values() if getattr(parallelism, key) > DEGREE
    ]
    if large:
        notes.append(f"{', '.join(large)}: each is {DEGREE} here")
    if parallelism.module_fqns_per_model_part or parallelism.pipeline_parallel_layers_per_stage:
        notes.append("the layers of each stage: the small model spreads its own")
    return notes
