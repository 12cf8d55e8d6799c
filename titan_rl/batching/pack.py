"""Pack samples of uneven length into rows of a token budget, and rows into micro-batches.

Works on one rank's samples; nothing here communicates. What a row becomes in the model is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

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
) -> list[MicroBatch]:
    """Pack whole samples into rows of at most ``token_budget`` tokens, first fit in order of falling length.

    With ``share_prompts`` the unit that is packed is a family of samples of one prompt, which stands in the
    row once (:func:`titan_rl.batching.shared_prompts.families`).

    The result depends on the arguments alone: equally long samples keep their order. First-fit decreasing
    needs at most 11/9 of the fewest possible rows, plus 6/9 (Dósa 2007).

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
    rows = _rows_of(samples, budget=token_budget, share_prompts=share_prompts)
    micro_batches = []
    for start in range(0, len(rows), rows_per_micro_batch):
        chosen = rows[start : start + rows_per_micro_batch]
        if pad_to == "token_budget":
            length = token_budget
            chosen = chosen + [[] for _ in range(rows_per_micro_batch - len(chosen))]
        else:
            longest = max(num_tokens(row, samples) for row in chosen)
            length = -(-longest // length_multiple) * length_multiple
        micro_batches.append(_fill(chosen, samples, advantages, length=length))
    return micro_batches


def _rows_of(samples: Sequence[Sample], *, budget: int, share_prompts: bool) -> list[list[Part]]:
    """What each row holds: with shared prompts where that takes fewer tokens, and no more rows."""
    check_lengths([len(sample.token_ids) for sample in samples], budget)
    alone = _first_fit([[Part(index, 0)] for index in range(len(samples))], samples, budget)
    if not share_prompts:
        return alone
    shared = _first_fit(families(samples, budget=budget), samples, budget)
    return shared if len(shared) <= len(alone) else alone


def _first_fit(units: Sequence[Family], samples: Sequence[Sample], budget: int) -> list[list[Part]]:
    rows = first_fit_decreasing([num_tokens(unit, samples) for unit in units], budget)
    return [[part for unit in row for part in units[unit]] for row in rows]


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
