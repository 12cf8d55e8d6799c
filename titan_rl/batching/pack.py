"""Pack samples of uneven length into rows of a token budget, and rows into micro-batches.

Works on one rank's samples; nothing here communicates. What a row becomes in the model is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch

from titan_rl.batching.balance import largest_differencing
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.shared_prompts import Family, Part, families, num_tokens
from titan_rl.errors import ConfigError
from titan_rl.types import Sample

PadTo = Literal["longest", "token_budget"]


def pack(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    *,
    token_budget: int,
    rows_per_micro_batch: int,
    length_multiple: int = 1,
    pad_to: PadTo = "longest",
    share_prompts: bool = False,
    at_least: int = 1,
) -> list[MicroBatch]:
    """Pack whole samples into rows of at most ``token_budget`` tokens, filled alike (:func:`fill_rows`).

    With ``share_prompts`` the unit that is packed is a family of samples of one prompt, which stands in the
    row once (:func:`titan_rl.batching.shared_prompts.families`). The result depends on the arguments alone.

    Args:
        samples: What to train on. None gives no micro-batch.
        advantages: One per sample, in the same order.
        token_budget: Most tokens of a row, a multiple of ``length_multiple`` (``training.seq_len``).
        rows_per_micro_batch: Rows of a micro-batch (``training.local_batch_size``).
        length_multiple: T is a multiple of this, for layouts that split the tokens of a row over ranks.
        pad_to: ``"longest"``: T is the micro-batch's longest row, rounded up to ``length_multiple``, and the
            last micro-batch may have fewer rows: the least work. ``"token_budget"``: every micro-batch has
            ``rows_per_micro_batch`` rows of the whole budget: one shape, for compilation and pipelines.
        share_prompts: Whether samples of one group and prompt share its tokens; for models whose attention
            knows branches (:func:`titan_rl.titan.branches.knows_branches`).
        at_least: Micro-batches wanted, as many as the rank with most of them needs: what would fill fewer is
            spread over so many. Fewer units give fewer micro-batches.

    Returns:
        Micro-batches of CPU tensors; each sample is in exactly one row of one of them.

    Raises:
        ConfigError: When a sample is longer than the budget, or the budget is not a multiple.
        ValueError: When the arguments do not fit each other.
    """
    _check_arguments(samples, advantages, rows_per_micro_batch=rows_per_micro_batch)
    if length_multiple < 1 or token_budget < 1 or token_budget % length_multiple:
        raise ConfigError(
            "training.seq_len",
            f"be a positive multiple of {length_multiple}, which the parallel layout asks for",
            token_budget,
            f"Round it up to {-(-max(token_budget, 1) // length_multiple) * length_multiple}.",
        )
    units = units_of(samples, budget=token_budget, share_prompts=share_prompts)
    lengths = [num_tokens(unit, samples) for unit in units]
    micro_batches = []
    for of_units in assign_rows(lengths, token_budget, most=rows_per_micro_batch, at_least=at_least):
        chosen = [[part for unit in row for part in units[unit]] for row in of_units]
        if pad_to == "token_budget":
            length = token_budget
            chosen = chosen + [[] for _ in range(rows_per_micro_batch - len(chosen))]
        else:
            longest = max(num_tokens(row, samples) for row in chosen)
            length = -(-longest // length_multiple) * length_multiple
        micro_batches.append(_fill(chosen, samples, advantages, length=length))
    return micro_batches


def units_of(samples: Sequence[Sample], *, budget: int, share_prompts: bool) -> list[Family]:
    """What is packed as a whole: families that share their prompt where that takes no more rows, or samples.

    Args:
        samples: What to train on.
        budget: Most tokens of a row.
        share_prompts: Whether samples of one group and prompt may share its tokens.

    Raises:
        ConfigError: a sample is longer than the budget.
    """
    check_lengths([len(sample.token_ids) for sample in samples], budget)
    alone = [[Part(index, 0)] for index in range(len(samples))]
    if not share_prompts:
        return alone
    shared = families(samples, budget=budget)
    rows_shared, rows_alone = (
        len(fill_rows([num_tokens(unit, samples) for unit in units], budget)) for units in (shared, alone)
    )
    return shared if rows_shared <= rows_alone else alone


def num_micro_batches(
    samples: Sequence[Sample], *, token_budget: int, rows_per_micro_batch: int, share_prompts: bool = False
) -> int:
    """How many micro-batches :func:`pack` makes of these samples, unless asked for more.

    Args:
        samples: What to train on.
        token_budget: Most tokens of a row.
        rows_per_micro_batch: Most rows of a micro-batch.
        share_prompts: As for :func:`pack`.
    """
    units = units_of(samples, budget=token_budget, share_prompts=share_prompts)
    rows = fill_rows([num_tokens(unit, samples) for unit in units], token_budget)
    return -(-len(rows) // rows_per_micro_batch)


def assign_rows(
    lengths: Sequence[int], budget: int, *, most: int, at_least: int = 1
) -> list[list[list[int]]]:
    """Micro-batches of rows of indices into ``lengths``.

    As few micro-batches as hold the rows of :func:`fill_rows`, or as many as wanted, with equally many rows
    each. Rows come in order of falling length, so that those of one micro-batch differ little; micro-batches
    in order of falling ``sum L^2``, so that ranks, which wait for one another in each, have like ones at a
    time.

    Args:
        lengths: In tokens.
        budget: Most tokens of a row.
        most: Most rows of a micro-batch.
        at_least: Micro-batches wanted; there are fewer when there are fewer lengths.

    Raises:
        ConfigError: a length is more than the budget.

    >>> assign_rows([6, 5, 4, 3], 6, most=2)
    [[[0], [1]], [[2], [3]]]
    """
    rows = fill_rows(lengths, budget, at_least=at_least)
    count = max(-(-len(rows) // most), min(at_least, len(rows)))
    if not count:
        return []
    alike = fill_rows(lengths, budget, at_least=count * -(-len(rows) // count))
    rows = alike if len(alike) <= count * most else rows
    each, left_over = divmod(len(rows), count)  # left over where there are too few lengths
    starts = [index * each + min(index, left_over) for index in range(count + 1)]
    chunks = [rows[start:stop] for start, stop in itertools.pairwise(starts)]
    return sorted(chunks, key=lambda chunk: -sum(lengths[i] ** 2 for row in chunk for i in row))


def fill_rows(lengths: Sequence[int], budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Rows of indices into ``lengths``, as few as possible and of nearly equally many tokens.

    Lengths are divided by the largest differencing method into the fewest rows for which that fits the
    budget. Where it fits no number of rows up to that of first-fit decreasing, those are the rows; they are
    at most 11/9 of the fewest possible, plus 6/9 (Dósa 2007).

    Args:
        lengths: In tokens.
        budget: Most tokens of a row.
        at_least: Rows wanted; there are fewer when there are fewer lengths.

    Returns:
        The longest row first, and in it the longest length; equal ones in their order.

    Raises:
        ConfigError: a length is more than the budget.

    >>> fill_rows([2, 5, 3, 2], 8)
    [[1, 0], [2, 3]]
    """
    first_fit = first_fit_decreasing(lengths, budget)
    fewest = max(-(-sum(lengths) // budget), min(at_least, len(lengths)), 1)
    rows = first_fit
    for count in range(fewest, max(fewest, len(first_fit)) + 1):
        balanced = largest_differencing(lengths, count)
        if all(sum(lengths[i] for i in row) <= budget for row in balanced):
            rows = [row for row in balanced if row]
            break
    rows = [sorted(row, key=lambda i: (-lengths[i], i)) for row in rows]
    return sorted(rows, key=lambda row: (-sum(lengths[i] for i in row), row[0]))


def _check_arguments(
    samples: Sequence[Sample], advantages: Sequence[float], *, rows_per_micro_batch: int
) -> None:
    if rows_per_micro_batch < 1:
        raise ValueError(f"rows_per_micro_batch must be at least 1; got {rows_per_micro_batch}.")
    if len(samples) != len(advantages):
        raise ValueError(f"advantages must be one per sample ({len(samples)}); got {len(advantages)}.")
    for index, sample in enumerate(samples):
        lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.generator_logprobs)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"samples[{index}] must have token_ids, loss_mask and generator_logprobs of one length, "
                f"at least 1; got {len(sample.token_ids)}, {len(sample.loss_mask)} and "
                f"{len(sample.generator_logprobs)}."
            )
        if sample.loss_mask[0]:
            raise ValueError(
                f"samples[{index}].loss_mask must be False at index 0, which nothing predicts; got True."
            )


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of indices into ``lengths``; the longest first, each into the first row with room for it.

    Args:
        lengths: In tokens.
        budget: Most tokens of a row.

    Raises:
        ConfigError: a length is more than the budget.

    >>> first_fit_decreasing([2, 5, 3], 5)
    [[1], [2, 0]]
    """
    check_lengths(lengths, budget)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(budget)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


def check_lengths(lengths: Sequence[int], budget: int) -> None:
    """Refuse samples that no row can hold.

    Args:
        lengths: Of samples, in tokens.
        budget: Most tokens of a row.

    Raises:
        ConfigError: a length is more than the budget.
    """
    longest = max(lengths, default=0)
    if longest > budget:
        raise ConfigError(
            "training.seq_len",
            f"hold the longest sample, {longest} tokens with its prompt",
            budget,
            f"Set training.seq_len to at least {longest}, or lower sampling.max_tokens.",
        )


def _fill(
    rows: Sequence[Sequence[Part]], samples: Sequence[Sample], advantages: Sequence[float], *, length: int
) -> MicroBatch:
    """Write parts of samples into rows of ``length`` tokens."""
    batch = MicroBatch.empty(len(rows), length)
    for row, parts in enumerate(rows):
        start = 0
        for index, skipped in parts:
            sample = samples[index]
            stop = start + len(sample.token_ids) - skipped
            # The last token of a document predicts nothing: its prediction-aligned entries stay empty.
            predictions = slice(start, stop - 1)
            token_ids = torch.tensor(sample.token_ids[skipped:], dtype=torch.int64)
            trained = torch.tensor(sample.loss_mask[skipped + 1 :], dtype=torch.bool)
            logprobs = torch.tensor(sample.generator_logprobs[skipped + 1 :], dtype=torch.float32)
            batch.input_ids[row, start:stop] = token_ids
            batch.positions[row, start:stop] = torch.arange(skipped, len(sample.token_ids))
            batch.sample_index[row, start:stop] = index
            batch.loss_mask[row, predictions] = trained
            batch.targets[row, predictions] = torch.where(trained, token_ids[1:], 0)
            batch.generator_logprobs[row, predictions] = torch.where(trained, logprobs, 0.0)
            batch.advantages[row, predictions] = torch.where(trained, advantages[index], 0.0)
            batch.document_lengths[row].append(stop - start)
            start = stop
        batch.positions[row, start:] = torch.arange(length - start)
    return batch
