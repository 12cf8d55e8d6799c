"""Split an iteration's samples over its optimiser steps. Packing a step's samples is in ``pack``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_rl.types import Sample


def split_into_steps(
    samples: Sequence[Sample], num_steps: int, *, group_indices: Iterable[int] | None = None
) -> list[list[int]]:
    """Assign whole groups to the K optimiser steps of an iteration, in the order of their indices.

    Numbers of groups differ by at most one, the earlier steps having the larger share. Siblings stay
    together, so that each step has the positive and the negative advantages of a prompt.

    Args:
        samples: One rank's samples of an iteration.
        num_steps: K, at least 1.
        group_indices: Of the groups of all ranks, so that a step has the same groups on any number of ranks;
            by default those of ``samples``.

    Returns:
        K lists of indices into ``samples``, rising; together they hold each index once. A list is empty when
        there are fewer groups than steps.

    >>> def sample(group_index):
    ...     return Sample([0, 1], [False, True], [0.0, -1.0], 0.0, group_index, 0, False)
    >>> split_into_steps([sample(7), sample(7), sample(9), sample(4), sample(9)], 2)
    [[0, 1, 3], [2, 4]]
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1; got {num_steps}.")
    of_samples = (sample.group_index for sample in samples)
    groups = sorted(set(of_samples if group_indices is None else group_indices))
    share, left_over = divmod(len(groups), num_steps)
    step_of_group: dict[int, int] = {}
    start = 0
    for step in range(num_steps):
        stop = start + share + (step < left_over)
        step_of_group.update(dict.fromkeys(groups[start:stop], step))
        start = stop
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for index, sample in enumerate(samples):
        steps[step_of_group[sample.group_index]].append(index)
    return steps
