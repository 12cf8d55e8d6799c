"""Largest differencing: by hand, as a partition, against the optimum, and what it makes of real lengths."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.batching.test_pack import make_sample
from titan_rl.batching.balance import Siblings, choose_holders, cost, largest_differencing
from titan_rl.batching.pack import fill_rows, first_fit_decreasing, num_micro_batches, pack


def sums(weights, parts):
    return [sum(weights[i] for i in part) for part in parts]


def best_largest(weights, num_parts):
    """Weight of the heaviest part of the best division, by trying all."""
    return min(
        max(sum(w for w, p in zip(weights, chosen, strict=True) if p == part) for part in range(num_parts))
        for chosen in itertools.product(range(num_parts), repeat=len(weights))
    )


def log_normal(count, *, seed=0, median=300, sigma=0.8, longest=2048):
    draw = random.Random(seed)
    return [min(max(int(median * draw.lognormvariate(0, sigma)), 2), longest) for _ in range(count)]


def test_the_example_of_karmarkar_and_karp():
    # 8-7, 6-5 leave 1, 1, 4; 4-1 leaves 3, 1; the difference is 2, where the best is 0.
    assert sums([8, 7, 6, 5, 4], largest_differencing([8, 7, 6, 5, 4], 2)) == [16, 14]


def test_three_parts_by_hand():
    # (9 8 7) after three items, 6 and 5: (9, 8+5, 7+6).
    assert sums([9, 8, 7, 6, 5], largest_differencing([9, 8, 7, 6, 5], 3)) == [13, 13, 9]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 12))
def test_every_item_is_in_one_part_and_none_is_heavier_than_average_and_one_item(weights, num_parts):
    parts = largest_differencing(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    found = sums(weights, parts)
    assert found == sorted(found, reverse=True)
    if weights:
        assert max(found) - min(found) <= max(weights)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 3))
def test_the_heaviest_part_is_near_the_best_one(weights, num_parts):
    # Fischetti and Martello 1987: at most 7/6 for two parts; for three 4/3 - 1/(3 (3 - 1)) is proven.
    assert max(sums(weights, largest_differencing(weights, num_parts))) <= 7 / 6 * best_largest(
        weights, num_parts
    )


@given(st.integers(1, 40), st.integers(1, 9))
def test_equal_items_are_divided_by_number(count, num_parts):
    sizes = [len(part) for part in largest_differencing([5] * count, num_parts)]
    assert max(sizes) - min(sizes) <= 1


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="num_parts must be at least 1; got 0"):
        largest_differencing([1], 0)


def holders_of(lengths, attention_cost):
    """Of samples that share nothing."""
    families = [[Siblings([n]) for n in of_rank] for of_rank in lengths]
    return [[holder for (holder,) in of_rank] for of_rank in choose_holders(families, attention_cost)]


def work_of(families, holders, num_ranks, attention_cost=0.0):
    """Of each rank: a family's prompt once on every rank that has some of it."""
    found = [0.0] * num_ranks
    for family, of_family in zip(itertools.chain(*families), itertools.chain(*holders), strict=True):
        for rank in set(of_family):
            lengths = [n for n, holder in zip(family.lengths, of_family, strict=True) if holder == rank]
            tokens = sum(lengths) - (len(lengths) - 1) * family.shared
            attended = sum(n**2 for n in lengths) - (len(lengths) - 1) * family.shared**2
            found[rank] += tokens + attention_cost * attended
    return found


@pytest.mark.parametrize("attention_cost", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_ranks_with_unequal_samples_get_equal_work(num_ranks, attention_cost):
    # Rank r generates r times as long completions as rank 0, as it may with prompts of several kinds.
    lengths = [log_normal(32, seed=r, median=20 * (r + 1)) for r in range(num_ranks)]
    families = [[Siblings([n]) for n in of_rank] for of_rank in lengths]
    found = work_of(families, choose_holders(families, attention_cost), num_ranks, attention_cost)
    before = [sum(cost(n, n * n, attention_cost) for n in of_rank) for of_rank in lengths]
    mean = sum(found) / num_ranks
    assert sum(before) / num_ranks == pytest.approx(mean)
    assert max(before) > 1.2 * mean
    assert max(found) < 1.001 * mean


def test_work_that_grows_with_the_square_is_not_divided_by_tokens():
    # One sample of 100 tokens costs as much as four of 50 when only attention counts.
    lengths = [100, 50, 50, 50, 50]
    of_squares, of_tokens = (holders_of([lengths, []], attention)[0] for attention in (1e6, 0.0))
    assert of_squares.count(of_squares[0]) == 1
    assert of_tokens.count(of_tokens[0]) == 2


def test_fewer_samples_than_ranks_leave_ranks_without_any():
    assert holders_of([[5, 7], [], []], 0.0) == [[1, 0], [], []]


@pytest.mark.parametrize(
    ("families", "work"),
    [
        # Four families of a prompt of 90 and four completions of 10, two for each rank.
        ([Siblings([100] * 4, 90)] * 4, [260, 260]),
        # One family: half of it with 10 of the prompt again, instead of all of it on one rank.
        ([Siblings([100] * 8, 10)], [370, 370]),
        # Completions of 4: another prompt of 1,000 saves the busiest rank less than a hundredth.
        ([Siblings([1004] * 4, 1000)], [1016, 0]),
        # Of a large and a small family the large one is cut, once.
        ([Siblings([60] * 6, 40), Siblings([45] * 2, 40)], [150, 100]),
    ],
)
def test_siblings_stay_together_unless_the_busiest_rank_has_less_work_without(families, work):
    found = work_of([families, []], choose_holders([families, []], 0.0), 2)
    assert sorted(found) == sorted(work)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(
            st.builds(
                lambda shared, own: Siblings([shared + n for n in own], shared),
                st.integers(0, 60),
                st.lists(st.integers(1, 60), min_size=1, max_size=6),
            ),
            max_size=4,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.0, 0.5]),
)
def test_the_busiest_rank_has_no_more_work_than_with_whole_families_or_with_samples_one_by_one(
    families, attention_cost
):
    holders = choose_holders(families, attention_cost)
    assert [[len(f) for f in rank] for rank in holders] == [[len(f.lengths) for f in r] for r in families]
    found = max(work_of(families, holders, len(families), attention_cost))
    whole = [work_of([[f]], [[[0] * len(f.lengths)]], 1, attention_cost)[0] for r in families for f in r]
    alone = [cost(n, n * n, attention_cost) for r in families for f in r for n in sorted(f.lengths)[::-1]]
    for weights, gain in ((whole, 1.0), (alone, 1.01)):
        most = max(sums(weights, largest_differencing(weights, len(families))))
        assert found <= gain * most * (1 + 1e-9)


# ----------------------------------------------------------------------------------------------------- rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=25), st.integers(1, 6))
def test_rows_fit_and_are_no_more_than_first_fit_makes(lengths, at_least):
    rows = fill_rows(lengths, 12, at_least=at_least)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    found = sums(lengths, rows)
    assert max(found, default=0) <= 12
    assert found == sorted(found, reverse=True)
    first_fit = len(first_fit_decreasing(lengths, 12))
    assert len(rows) <= max(first_fit, min(at_least, len(lengths)))
    assert len(rows) >= min(at_least, len(lengths), max(first_fit, 1)) or not lengths


def test_rows_are_filled_alike():
    # First fit fills the first row and leaves the rest to the second: 10 and 4.
    lengths = [4, 3, 3, 2, 2]
    assert sums(lengths, first_fit_decreasing(lengths, 10)) == [10, 4]
    assert sums(lengths, fill_rows(lengths, 10)) == [7, 7]


def test_rows_that_only_first_fit_finds_are_its_rows():
    lengths, budget = [8, 6, 5, 5, 4], 14  # differencing makes 15 and 13 of them
    assert max(sums(lengths, largest_differencing(lengths, 2))) > budget
    assert sorted(sums(lengths, fill_rows(lengths, budget))) == sorted(
        sums(lengths, first_fit_decreasing(lengths, budget))
    )


@pytest.mark.parametrize("at_least", [1, 3, 4, 9])
def test_what_fills_fewer_micro_batches_is_spread_over_as_many_as_the_others_have(at_least):
    samples = [make_sample(length) for length in (6, 5, 5, 4, 4)]
    batches = pack(samples, [0.0] * 5, token_budget=12, rows_per_micro_batch=2, at_least=at_least)
    assert len(batches) == {1: 2, 3: 3, 4: 4, 9: 5}[at_least]
    assert sorted(n for b in batches for row in b.document_lengths for n in row) == [4, 4, 5, 5, 6]


@given(st.lists(st.integers(1, 12), max_size=25), st.integers(1, 4))
def test_the_number_of_micro_batches_is_what_packing_makes(lengths, rows):
    options = {"token_budget": 12, "rows_per_micro_batch": rows}
    batches = pack([make_sample(n) for n in lengths], [0.0] * len(lengths), **options)
    assert num_micro_batches([make_sample(n) for n in lengths], **options) == len(batches)


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("token_budget", [2048, 8192])
@pytest.mark.parametrize("seed", range(3))
def test_less_than_a_twentieth_of_log_normal_samples_is_padding(num_ranks, rows, token_budget, seed):
    lengths = log_normal(256 * num_ranks, seed=seed)
    shares = [[] for _ in range(num_ranks)]
    split = [lengths[r::num_ranks] for r in range(num_ranks)]
    for of_rank, holders in zip(split, holders_of(split, 1e-4), strict=True):
        for length, holder in zip(of_rank, holders, strict=True):
            shares[holder].append(make_sample(length))
    options = {"token_budget": token_budget, "rows_per_micro_batch": rows}
    count = max(num_micro_batches(share, **options) for share in shares)
    computed = real = 0
    for share in shares:
        batches = pack(share, [0.0] * len(share), at_least=count, **options)
        assert len(batches) == count  # equal counts on all ranks, without an empty one
        computed += sum(batch.input_ids.numel() for batch in batches)
        real += sum(len(sample.token_ids) for sample in share)
    assert 1 - real / computed < 0.05
