"""Packing that keeps the samples of a unit in one micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.batching.pack import pack
from titan_rl.batching.together import pack_together
from titan_rl.types import Sample


def sample(length, name):
    mask = [False] + [True] * (length - 1)
    return Sample([name] * length, mask, [0.0] * length, 0.0, 0, 0, False)


def units_of(lengths):
    """Token ids say unit and place: 10 * unit + place."""
    return [[sample(n, 10 * u + p) for p, n in enumerate(unit)] for u, unit in enumerate(lengths)]


@given(
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=2), max_size=10),
    st.integers(8, 20),
    st.integers(2, 4),
)
def test_every_unit_is_whole_in_exactly_one_micro_batch(lengths, budget, rows):
    seen = []
    for indices, batch in pack_together(units_of(lengths), token_budget=budget, rows_per_micro_batch=rows):
        seen += indices
        assert batch.input_ids.shape[0] <= rows
        assert batch.input_ids.shape[1] <= budget
        expected = [10 * u + p for u in indices for p in range(len(lengths[u]))]
        for number, name in enumerate(expected):
            assert (batch.input_ids[batch.sample_index == number] == name).all()
            length = lengths[name // 10][name % 10]
            assert int((batch.sample_index == number).sum()) == length
    assert sorted(seen) == list(range(len(lengths)))


def test_packing_without_units_would_divide_a_pair():
    # Rows of 8: [8], [7], [5, 3], so the pair (7, 3) is divided when two rows make a micro-batch.
    units = units_of([[8, 5], [7, 3]])
    flat = [s for unit in units for s in unit]
    batches = pack(flat, [0.0] * 4, token_budget=8, rows_per_micro_batch=2)
    where = {int(name): i for i, b in enumerate(batches) for name in b.input_ids.unique().tolist() if name}
    assert where[10] != where[11]
    together = pack_together(units, token_budget=8, rows_per_micro_batch=2)
    assert [indices for indices, _ in together] == [[0], [1]]


def test_a_unit_that_fits_into_no_micro_batch_is_refused():
    with pytest.raises(ValueError, match=r"units\[1\] must fit into 1 row\(s\) of 8 tokens.*\[5, 5\]"):
        pack_together(units_of([[4, 4], [5, 5]]), token_budget=8, rows_per_micro_batch=1)
