"""Pack samples that must be in one micro-batch, such as both completions of a pair."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import PadTo, first_fit_decreasing, pack
from titan_rl.types import Sample


def pack_together(
    units: Sequence[Sequence[Sample]],
    *,
    token_budget: int,
    rows_per_micro_batch: int,
    length_multiple: int = 1,
    pad_to: PadTo = "longest",
) -> list[tuple[list[int], MicroBatch]]:
    """Pack units of samples into micro-batches; a unit is never divided, its samples may be in several rows.

    Units go, in order of falling length, into the first micro-batch in which their samples and those already
    there fit into ``rows_per_micro_batch`` rows. The result depends on the arguments alone.

    Args:
        units: One or more samples each. None gives no micro-batch.
        token_budget: Most tokens of a row.
        rows_per_micro_batch: Most rows of a micro-batch.
        length_multiple: As for :func:`titan_rl.batching.pack.pack`.
        pad_to: The same.

    Returns:
        For each micro-batch the indices of its units, and its tensors. ``sample_index`` counts the samples of
        these units, in the order of the indices.

    Raises:
        ConfigError: a sample is longer than the budget.
        ValueError: a unit does not fit into a micro-batch of its own.
    """
    lengths = [[len(sample.token_ids) for sample in unit] for unit in units]
    chosen: list[list[int]] = []
    taken: list[list[int]] = []
    capacity = token_budget * rows_per_micro_batch
    for index in sorted(range(len(units)), key=lambda i: (-sum(lengths[i]), i)):
        mine = lengths[index]
        for indices, others in zip(chosen, taken, strict=True):
            together = others + mine
            if sum(together) <= capacity and _fits(together, token_budget, rows_per_micro_batch):
                indices.append(index)
                others.extend(mine)
                break
        else:
            if not _fits(mine, token_budget, rows_per_micro_batch):
                raise ValueError(
                    f"units[{index}] must fit into {rows_per_micro_batch} row(s) of {token_budget} tokens; "
                    f"got samples of {mine} tokens."
                )
            chosen.append([index])
            taken.append(list(mine))
    packed = []
    for indices in chosen:
        samples = [sample for index in indices for sample in units[index]]
        (micro_batch,) = pack(
            samples,
            [0.0] * len(samples),
            token_budget=token_budget,
            rows_per_micro_batch=rows_per_micro_batch,
            length_multiple=length_multiple,
            pad_to=pad_to,
        )
        packed.append((indices, micro_batch))
    return packed


def _fits(lengths: list[int], budget: int, rows: int) -> bool:
    return len(first_fit_decreasing(lengths, budget)) <= rows
