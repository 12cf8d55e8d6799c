"""Equal shares of uneven work: which rank trains which sample, and what goes into which row."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

_Part = tuple[float, int, Any]
"""Its weight, its first item (so that parts of one weight have an order), and its items as nested pairs."""


def cost(num_tokens: int, num_attended: int, attention_cost: float) -> float:
    """Work in units of one token's matrix products: ``L + attention_cost L^2`` for a sample of L tokens.

    Samples packed into one row do not attend to one another, so the work of a row, a micro-batch or a rank is
    the sum over its samples. Siblings that share a prompt compute its tokens once.

    Args:
        num_tokens: L, or their sum without what is shared.
        num_attended: ``L^2``, or the sum of :func:`titan_rl.batching.shared_prompts.num_attended`.
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


def choose_holders(costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """Which rank trains what, so that all ranks have the same work.

    Every rank computes the same answer from the same costs.

    Args:
        costs: Of what each rank has, above 0.

    Returns:
        For everything that every rank has the rank that trains it.

    >>> choose_holders([[9, 9, 9], [3]])
    [[0, 1, 0], [1]]
    """
    together = [cost for of_rank in costs for cost in of_rank]
    holder_of = [0] * len(together)
    for rank, items in enumerate(largest_differencing(together, len(costs))):
        for item in items:
            holder_of[item] = rank
    holders, start = [], 0
    for of_rank in costs:
        holders.append(holder_of[start : start + len(of_rank)])
        start += len(of_rank)
    return holders
