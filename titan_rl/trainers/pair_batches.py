"""Micro-batches of preferences, the same number on every rank. Scores and losses are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import PadTo
from titan_rl.batching.together import pack_together
from titan_rl.data.preferences import Encoded
from titan_rl.policy.reference_cache import completion_key
from titan_rl.titan.collectives import Collectives
from titan_rl.types import Sample

_EMPTY_SHAPE = (1, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairBatch:
    """One micro-batch and whose completions are in it. N documents.

    Attributes:
        micro_batch: ``sample_index`` counts the documents.
        chosen: ``[C]`` int64, the documents that are chosen completions.
        rejected: ``[R]`` int64, the others. With pairs, the n-th belongs to the n-th chosen one.
        lengths: ``[N]`` fp32, trained tokens.
        margins: ``[C]`` fp32 of the pairs; of single completions 0.
        keys: Of each document, in the reference's cache.
    """

    micro_batch: MicroBatch
    chosen: torch.Tensor
    rejected: torch.Tensor
    lengths: torch.Tensor
    margins: torch.Tensor
    keys: list[int]

    def to(self, device: torch.device | str) -> PairBatch:
        """The same with its tensors on ``device``."""
        names = ("micro_batch", "chosen", "rejected", "lengths", "margins")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def to_sample(token_ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """A document as a sample to pack; what only rollouts have is empty."""
    return Sample(
        token_ids=list(token_ids),
        loss_mask=list(mask),
        generator_logprobs=[0.0] * len(token_ids),
        reward=0.0,
        group_index=0,
        sample_index=0,
        is_truncated=False,
    )


def make_batches(
    preferences: Sequence[Encoded],
    *,
    row_tokens: int,
    rows: int,
    pad_to: PadTo,
    length_multiple: int = 1,
) -> list[PairBatch]:
    """Pack this rank's preferences; both completions of a pair are in one micro-batch.

    Args:
        preferences: Encoded.
        row_tokens: Most tokens of a row.
        rows: Rows of a micro-batch.
        pad_to: Length of its rows.
        length_multiple: Which it is a multiple of.
    """
    units = [[to_sample(ids, mask) for _, ids, mask in p.documents] for p in preferences]
    packed = pack_together(
        units,
        token_budget=row_tokens,
        rows_per_micro_batch=rows,
        length_multiple=length_multiple,
        pad_to=pad_to,
    )
    return [_describe([preferences[i] for i in chosen], batch) for chosen, batch in packed]


def _describe(preferences: Sequence[Encoded], micro_batch: MicroBatch) -> PairBatch:
    numbers: dict[str, list[int]] = {"chosen": [], "rejected": []}
    lengths: list[int] = []
    keys: list[int] = []
    margins: list[float] = []
    for preference in preferences:
        for side, ids, mask in preference.documents:
            numbers[side].append(len(keys))
            lengths.append(sum(mask))
            keys.append(completion_key(ids, lengths[-1]))
            if side == "chosen":
                margins.append(preference.preference.margin)
    return PairBatch(
        micro_batch=micro_batch,
        chosen=torch.tensor(numbers["chosen"], dtype=torch.int64),
        rejected=torch.tensor(numbers["rejected"], dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.float32),
        margins=torch.tensor(margins, dtype=torch.float32),
        keys=keys,
    )


def align_ranks(
    batches: Sequence[PairBatch],
    *,
    collectives: Collectives,
    device: torch.device,
    empty_shape: tuple[int, int] = _EMPTY_SHAPE,
) -> list[PairBatch]:
    """Give every rank the same number of micro-batches, on the device; the added ones are empty.

    Args:
        batches: This rank's, possibly none.
        collectives: Of the run.
        device: Where they are computed on.
        empty_shape: Rows and tokens of an empty micro-batch.
    """
    count = int(collectives.reduce_scalar(len(batches), "max"))
    missing = count - len(batches)
    padded = [*batches, *(_describe([], MicroBatch.empty(*empty_shape)) for _ in range(missing))]
    return [batch.to(device) for batch in padded]
