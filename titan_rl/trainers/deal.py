"""Samples between the rank that generated them and the rank that trains them.

A group is generated, scored and given its advantages whole on one rank. Which rank trains a sample is decided
by lengths alone, so that all ranks have the same work; only lengths are known to all of them, and the tokens
of a sample go to the rank that trains it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from titan_rl.batching.balance import Siblings, choose_holders
from titan_rl.batching.shared_prompts import Family, Part
from titan_rl.titan.collectives import Collectives
from titan_rl.types import Sample


class Deal:
    """The samples of one optimiser step, dealt to the data-parallel ranks.

    Attributes:
        own: This rank's, as generated.
        held: Those that this rank trains, by the rank that generated them and in its order.
        moved_tokens: Tokens of ``held`` that another rank generated.
    """

    def __init__(
        self,
        own: Sequence[Sample],
        *,
        attention_cost: float,
        collectives: Collectives,
        units: Sequence[Family] | None = None,
    ) -> None:
        """Decide who trains what, and hand the samples over. Collective.

        Args:
            own: To be trained on by some rank.
            attention_cost: As for :func:`titan_rl.batching.balance.cost`.
            collectives: Of the run.
            units: What shares a prompt when it stays together; every sample by itself by default.
        """
        self.own, self._collectives = own, collectives
        rank, size = collectives.data_rank, collectives.data_size
        units = [[Part(index, 0)] for index in range(len(own))] if units is None else units
        lengths = [[len(own[part.sample].token_ids) for part in unit] for unit in units]
        families = [Siblings(n, unit[-1].skipped) for n, unit in zip(lengths, units, strict=True)]
        known = [_read(numbers) for numbers in collectives.gather_integers(_written(families))]
        holders = choose_holders(known, attention_cost)[rank]
        dealt = [
            (part.sample, holder)
            for unit, of_unit in zip(units, holders, strict=True)
            for part, holder in zip(unit, of_unit, strict=True)
        ]
        self._sent = [sorted(index for index, to in dealt if to == other) for other in range(size)]
        received = collectives.send([to_bytes([own[i] for i in chosen]) for chosen in self._sent])
        parts = [from_bytes(part) for part in received]
        self._num_received = [len(part) for part in parts]
        self.held = [sample for part in parts for sample in part]
        others = (part for other, part in enumerate(parts) if other != rank)
        self.moved_tokens = sum(len(sample.token_ids) for part in others for sample in part)

    def to_holders(self, values: Sequence[float]) -> list[float]:
        """Give the rank that trains a sample a number about it. Collective.

        Args:
            values: One for each of ``own``.

        Returns:
            One for each of ``held``.
        """
        parts = [array("d", [values[i] for i in chosen]).tobytes() for chosen in self._sent]
        return [value for part in self._collectives.send(parts) for value in array("d", part)]

    def to_owners(self, values: Sequence[float]) -> list[float]:
        """Give the rank that generated a sample a number about it. Collective.

        Args:
            values: One for each of ``held``.

        Returns:
            One for each of ``own``.
        """
        parts, start = [], 0
        for count in self._num_received:
            parts.append(array("d", values[start : start + count]).tobytes())
            start += count
        found = [0.0] * len(self.own)
        for chosen, part in zip(self._sent, self._collectives.send(parts), strict=True):
            for index, value in zip(chosen, array("d", part), strict=True):
                found[index] = value
        return found


def _written(families: Sequence[Siblings]) -> list[int]:
    return [n for family in families for n in (len(family.lengths), family.shared, *family.lengths)]


def _read(numbers: Sequence[int]) -> list[Siblings]:
    families, place = [], 0
    while place < len(numbers):
        count, shared = numbers[place : place + 2]
        families.append(Siblings(numbers[place + 2 : place + 2 + count], shared))
        place += 2 + count
    return families


_HEADER = 4


def to_bytes(samples: Sequence[Sample]) -> bytes:
    """Samples as arrays: numbers, rewards, tokens, log-probabilities, masks.

    Args:
        samples: Of any number.
    """
    header = array("q", [len(samples)])
    for sample in samples:
        header.extend([len(sample.token_ids), sample.group_index, sample.sample_index, sample.is_truncated])
    return b"".join(
        [
            header.tobytes(),
            array("d", [sample.reward for sample in samples]).tobytes(),
            *(array("d", sample.generator_logprobs).tobytes() for sample in samples),
            *(array("q", sample.token_ids).tobytes() for sample in samples),
            *(bytes(sample.loss_mask) for sample in samples),
        ]
    )


def from_bytes(content: bytes) -> list[Sample]:
    """The samples of :func:`to_bytes`, equal in every field.

    Args:
        content: From it, on the same kind of machine.
    """
    place = 0

    def numbers(kind: str, count: int) -> array:
        nonlocal place
        start, place = place, place + count * array(kind).itemsize
        return array(kind, content[start:place])

    (count,) = numbers("q", 1)
    header, rewards = numbers("q", _HEADER * count), numbers("d", count)
    lengths = header[::_HEADER]
    logprobs = [numbers("d", length).tolist() for length in lengths]
    tokens = [numbers("q", length).tolist() for length in lengths]
    masks = [[bool(value) for value in numbers("B", length)] for length in lengths]
    return [
        Sample(
            token_ids=tokens[i],
            loss_mask=masks[i],
            generator_logprobs=logprobs[i],
            reward=rewards[i],
            group_index=header[_HEADER * i + 1],
            sample_index=header[_HEADER * i + 2],
            is_truncated=bool(header[_HEADER * i + 3]),
        )
        for i in range(count)
    ]
