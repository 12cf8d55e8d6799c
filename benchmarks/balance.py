"""How evenly samples of log-normal lengths lie on ranks and in rows: dealt by cost, and left where they are.

``python -m benchmarks.balance`` prints one line for each number of ranks, rows and tokens of a row, and then
what siblings that share a prompt of 300 tokens cost the busiest rank. Lengths are of groups of 8: the median
of a group is log-normal around 300 tokens, its samples around that. Neither a model nor a process group is
needed: these are the functions that every rank calls.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

from titan_rl.batching.balance import Siblings, choose_holders, cost, largest_differencing
from titan_rl.batching.pack import assign_rows, fill_rows, first_fit_decreasing

ATTENTION_COST = 1e-4  # of a dense model of 0.6 billion parameters
GROUPS_PER_RANK, GROUP_SIZE, LONGEST, PROMPT = 16, 8, 4096, 300


def draw_lengths(num_ranks: int, *, groups: int = GROUPS_PER_RANK, seed: int = 0) -> list[list[int]]:
    """Tokens of the samples that each rank generated, group by group."""
    draw = random.Random(seed)

    def of_group() -> list[int]:
        median = 300 * draw.lognormvariate(0, 0.6)
        return [min(max(int(median * draw.lognormvariate(0, 0.5)), 8), LONGEST) for _ in range(GROUP_SIZE)]

    return [[n for _ in range(groups) for n in of_group()] for _ in range(num_ranks)]


def work(length: int) -> float:
    """Of a sample."""
    return cost(length, length**2, ATTENTION_COST)


def describe(shares: Sequence[Sequence[list[list[int]]]]) -> str:
    """Padding, cost of the busiest rank, and of the slowest rank in every micro-batch, over the mean.

    Args:
        shares: For each rank its micro-batches, each a list of rows of lengths.
    """
    real = sum(sum(row) for share in shares for batch in share for row in batch)
    positions = sum(len(batch) * max(map(sum, batch)) for share in shares for batch in share if batch)
    costs = [[sum(work(n) for row in batch for n in row) for batch in share] for share in shares]
    mean = sum(map(sum, costs)) / len(costs)
    in_step = sum(max(column) for column in itertools.zip_longest(*costs, fillvalue=0.0))
    rank = max(map(sum, costs)) / mean
    return (
        f"padding {1 - real / positions:.3f}  busiest rank {rank:.3f}  slowest in step {in_step / mean:.3f}"
    )


def left(lengths: list[list[int]], *, budget: int, rows: int) -> str:
    """Every rank packs its own, first fit."""
    shares = []
    for own in lengths:
        filled = [[own[i] for i in row] for row in first_fit_decreasing(own, budget)]
        shares.append([filled[i : i + rows] for i in range(0, len(filled), rows)])
    return describe(shares)


def dealt(lengths: list[list[int]], *, budget: int, rows: int) -> str:
    """Dealt by cost, rows filled alike, the same number of micro-batches on all ranks."""
    shares: list[list[int]] = [[] for _ in lengths]
    holders = choose_holders([[Siblings([n]) for n in own] for own in lengths], ATTENTION_COST)
    for own, of_rank in zip(lengths, holders, strict=True):
        for length, (holder,) in zip(own, of_rank, strict=True):
            shares[holder].append(length)
    count = max(-(-len(fill_rows(share, budget)) // rows) for share in shares)
    assigned = [assign_rows(share, budget, most=rows, at_least=count) for share in shares]
    return describe(
        [
            [[[share[i] for i in row] for row in batch] for batch in of_rank]
            for share, of_rank in zip(shares, assigned, strict=True)
        ]
    )


def siblings(num_ranks: int, *, groups: int) -> str:
    """Work of the busiest rank where groups share a prompt: one by one, whole, and as the trainer deals.

    Args:
        num_ranks: Among which samples are dealt.
        groups: Groups of a rank.
    """
    families = [
        [
            Siblings([PROMPT + n for n in own[i : i + GROUP_SIZE]], PROMPT - 1)
            for i in range(0, len(own), GROUP_SIZE)
        ]
        for own in draw_lengths(num_ranks, groups=groups)
    ]
    prompt = work(PROMPT - 1)
    whole = [prompt + sum(work(n) - prompt for n in f.lengths) for own in families for f in own]
    alone = [work(n) for own in families for f in own for n in f.lengths]
    busiest = [
        max(sum(weights[i] for i in part) for part in largest_differencing(weights, num_ranks))
        for weights in (alone, whole)
    ]
    found = [0.0] * num_ranks
    for own, of_rank in zip(families, choose_holders(families, ATTENTION_COST), strict=True):
        for family, holders in zip(own, of_rank, strict=True):
            for rank in set(holders):
                own_work = [
                    work(n) - prompt for n, h in zip(family.lengths, holders, strict=True) if h == rank
                ]
                found[rank] += prompt + sum(own_work)
    least = sum(whole) / num_ranks
    names = ("one by one", "whole groups", "as dealt")
    return "  ".join(f"{n} {b / least:.3f}" for n, b in zip(names, [*busiest, max(found)], strict=True))


def main() -> None:
    """Print the table, what siblings cost, and what dividing takes."""
    for num_ranks, budget, rows in itertools.product((8, 64), (4096, 16384), (1, 4)):
        lengths = draw_lengths(num_ranks)
        print(f"{num_ranks:3} ranks, rows of {budget:5}, {rows} a micro-batch")
        print(f"  left   {left(lengths, budget=budget, rows=rows)}")
        print(f"  dealt  {dealt(lengths, budget=budget, rows=rows)}")
    print("work of the busiest rank over the mean of whole groups, which nothing can be below")
    for num_ranks, groups in itertools.product((8, 64), (1, 4, 16)):
        print(f"{num_ranks:3} ranks, {groups:2} groups a rank: {siblings(num_ranks, groups=groups)}")
    for count, parts in ((8192, 64), (65536, 512)):
        costs = [work(n) for own in draw_lengths(count // 128) for n in own]
        start = time.perf_counter()
        largest_differencing(costs, parts)
        print(f"{count} samples to {parts} ranks: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
