"""Which samples share the tokens of one prompt in a row, so that the model computes them once.

The first sample of such a *family* is written whole. Of every other one only what follows the prompt is, with
the prompt's last token before it: from there its first trained token is predicted. Its positions go on where
the prompt's end, which is how attention knows what it may see (:mod:`titan_rl.titan.branches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from titan_rl.types import Sample


class Part(NamedTuple):
    """What a row holds of a sample: its tokens from ``skipped`` on.

    Attributes:
        sample: Index of the sample.
        skipped: Leading tokens that it shares with the family's first; 0 for that one.
    """

    sample: int
    skipped: int


Family = list[Part]


def families(samples: Sequence[Sample], *, budget: int) -> list[Family]:
    """Samples of one group and one prompt together, as far as a row has room.

    Within a group the longest come first, each into the first family with room for it. A sample with nothing
    trained, or whose prompt is a single token, has nothing to share and is a family of its own.

    Args:
        samples: Each at most ``budget`` long.
        budget: Most tokens of a row.

    Returns:
        Each sample once; families in the order of their groups' first samples.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        prompt = prompt_length(sample)
        key = (sample.group_index, *sample.token_ids[:prompt]) if prompt > 1 else (-1, index)
        by_prompt.setdefault(key, []).append(index)
    return [family for indices in by_prompt.values() for family in _fitting(samples, indices, budget)]


def prompt_length(sample: Sample) -> int:
    """Tokens before the first trained one; 0 when none is trained."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else 0


def _fitting(samples: Sequence[Sample], indices: Sequence[int], budget: int) -> list[Family]:
    shared = max(prompt_length(samples[indices[0]]) - 1, 0)
    made: list[Family] = []
    room: list[int] = []
    for index in sorted(indices, key=lambda i: (-len(samples[i].token_ids), i)):
        length = len(samples[index].token_ids)
        at = next((n for n, free in enumerate(room) if free >= length - shared), None)
        if at is None:
            made.append([Part(index, 0)])
            room.append(budget - length)
        else:
            made[at].append(Part(index, shared))
            room[at] -= length - shared
    return made


def num_tokens(parts: Sequence[Part], samples: Sequence[Sample]) -> int:
    """Tokens of a row that parts take."""
    return sum(len(samples[part.sample].token_ids) - part.skipped for part in parts)
