"""Equal shares of uneven work: which rank trains which sample, and what goes into which row."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_GAIN = 1.01
"""What is done to balance work pays when the busiest rank has less than its work divided by this."""

_Part = tuple[float, int, Any]
"""Its weight, its first item (so that parts of one weight have an order), and its items as nested pairs."""


def cost(num_tokens: int, num_attended: int, attention_cost: float) -> float:
    """Work in units of one token's matrix products: ``L + attention_cost L^2`` for a sample of L tokens.

    Samples packed into one row do not attend to one another, so the work of a row, a micro-batch or a rank is
    the sum over its samples. Siblings that share a prompt compute its tokens once.

    Args:
        num_tokens: L, or their sum without what is shared.
        num_attended: ``L^2``, or :attr:`titan_rl.batching.micro_batch.MicroBatch.num_attended`.
        attention_cost: What attending to one more token costs, as a share of a token's matrix products
            (:attr:`titan_rl.titan.architecture.Architecture.attention_cost`).

    >>> cost(100, 100**2, 0.01)
    200.0
    """
    return num_tokens + attention_cost * num_attended


def largest_differencing(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts of nearly equal weight: the largest differencing method.

    Every item starts as a partition of its own, with the other parts empty. The two partitions with the
    largest difference between their heaviest and their lightest part are combined, the heaviest part of one
    with the lightest of the other, until one partition is left. Source: Karmarkar and Karp 1982, for several
    parts as in Korf 2009, "Multi-Way Number Partitioning", section 2.3. Empty parts are not stored, so that
    65,536 items in 512 parts take about a second.

    Args:
        weights: Of the items, above 0.
        num_parts: At least 1.

    Returns:
        ``num_parts`` lists of indices into ``weights``, rising, the heaviest part first; together they hold
        each index once. With fewer items than parts some are empty. The same on every machine, because it
        depends on sums of the weights in an order that the weights decide.

    >>> largest_differencing([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1; got {num_parts}.")
    heap: list[tuple[float, int, list[_Part]]] = [
        (_negative_difference([(weight, index, index)], num_parts), index, [(weight, index, index)])
        for index, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        (*_, first), (*_, second) = heapq.heappop(heap), heapq.heappop(heap)
        parts = _combine(first, second, num_parts)
        heapq.heappush(heap, (_negative_difference(parts, num_parts), number, parts))
    found = [sorted(_items(tree)) for _, _, tree in reversed(heap[0][2])] if heap else []
    return found + [[] for _ in range(num_parts - len(found))]


def _negative_difference(parts: list[_Part], num_parts: int) -> float:
    return (parts[0][0] if len(parts) == num_parts else 0.0) - parts[-1][0]


def _combine(first: list[_Part], second: list[_Part], num_parts: int) -> list[_Part]:
    """Put the heaviest of one with the lightest of the other. Parts are in the order of rising weight."""
    long, short = (first, second) if len(first) >= len(second) else (second, first)
    num_joined = max(len(short) - (num_parts - len(long)), 0)  # the others find an empty part
    joined = [
        (a[0] + b[0], min(a[1], b[1]), (a[2], b[2]))
        for a, b in zip(long[:num_joined], reversed(short[:num_joined]), strict=True)
    ]
    return sorted(long[num_joined:] + joined + short[num_joined:])


def _items(tree: Any) -> list[int]:
    found, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, tuple):
            left.extend(node)
        else:
            found.append(node)
    return found


class Siblings(NamedTuple):
    """Samples that share a prompt when they stand together, by their lengths alone; or one sample.

    Attributes:
        lengths: Tokens of each of them, prompt included.
        shared: Leading tokens that all but one leave out.
    """

    lengths: Sequence[int]
    shared: int = 0


class _Piece(NamedTuple):
    """Some of a family's samples, which stay together."""

    family: int
    members: list[int]
    cost: float


class _Division(NamedTuple):
    """Pieces, which of them each rank has, and the work of the rank that has most."""

    pieces: list[_Piece]
    parts: list[list[int]]
    busiest: float


def choose_holders(families: Sequence[Sequence[Siblings]], attention_cost: float) -> list[list[list[int]]]:
    """Which rank trains which sample, so that the busiest rank has as little work as possible.

    All wait for the busiest rank. Siblings stay together, because each rank that has some of them computes
    their prompt, unless cutting families lets the busiest rank have less work all the same. Families are cut
    into pieces of at most the mean work of a rank, of half of it, a quarter, ... as long as that may help.
    Every rank computes the same answer from the same lengths.

    Args:
        families: Of every rank, in the order of the ranks.
        attention_cost: As for :func:`cost`.

    Returns:
        For every rank, family and sample the rank that trains it.

    >>> choose_holders([[Siblings([9]), Siblings([9]), Siblings([9])], [Siblings([3])]], 0.0)
    [[[0], [1], [0]], [[1]]]
    >>> choose_holders([[Siblings([50, 50], shared=40), Siblings([50, 50], shared=40)], []], 0.0)
    [[[1, 1], [0, 0]], []]
    >>> choose_holders([[Siblings([50, 50, 50, 50], shared=10)], []], 0.0)
    [[[0, 1, 1, 0]], []]
    """
    together = [family for of_rank in families for family in of_rank]
    division = _divide(together, len(families), attention_cost)
    holders = [[0] * len(family.lengths) for family in together]
    for rank, numbers in enumerate(division.parts):
        for piece in (division.pieces[number] for number in numbers):
            for member in piece.members:
                holders[piece.family][member] = rank
    left = iter(holders)
    return [[next(left) for _ in of_rank] for of_rank in families]


def _divide(families: Sequence[Siblings], num_ranks: int, attention_cost: float) -> _Division:
    def divided(pieces: list[_Piece]) -> _Division:
        parts = largest_differencing([piece.cost for piece in pieces], num_ranks)
        return _Division(pieces, parts, max(sum(pieces[i].cost for i in part) for part in parts))

    best = divided(_cut(families, math.inf, attention_cost))
    num_pieces, limit = len(families), sum(piece.cost for piece in best.pieces) / num_ranks
    longest = max((n for family in families for n in family.lengths), default=0)
    least = max(limit, cost(longest, longest**2, attention_cost))
    while best.busiest > _GAIN * least and num_pieces < sum(len(family.lengths) for family in families):
        pieces = _cut(families, limit, attention_cost)
        limit /= 2
        if len(pieces) == num_pieces:
            continue
        num_pieces = len(pieces)
        if sum(piece.cost for piece in pieces) >= num_ranks * best.busiest:
            break  # smaller pieces make more work still
        other = divided(pieces)
        if _GAIN * other.busiest < best.busiest:
            best = other
    return best


def _cut(families: Sequence[Siblings], limit: float, attention_cost: float) -> list[_Piece]:
    """Each family whole, or in equal pieces of about ``limit`` where it makes more work than that."""
    pieces = []
    for number, family in enumerate(families):
        prompt = cost(family.shared, family.shared**2, attention_cost)
        own = [cost(n, n**2, attention_cost) - prompt for n in family.lengths]
        count = min(math.ceil((prompt + sum(own)) / limit), len(own)) if limit < math.inf else 1
        pieces += [
            _Piece(number, members, prompt + sum(own[i] for i in members))
            for members in largest_differencing(own, count)
        ]
    return pieces
