"""Reductions over the samples of packed rows against a loop over samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.segments import is_last_trained, row_segments, sample_count, sample_mean, sample_sum

NAN = float("nan")


@st.composite
def rows(draw):
    """Rows of up to 12 tokens: samples with arbitrary, distinct indices, some token values, a mask."""
    length, index, names = 12, [], iter(range(100, 200))
    for _ in range(draw(st.integers(1, 3))):
        row = []
        while len(row) < length and draw(st.booleans()):
            row += [next(names)] * draw(st.integers(1, 5))
        index.append((row + [-1] * length)[:length])
    size = len(index) * length
    values = draw(st.lists(st.floats(-10, 10), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    index = torch.tensor(index)
    values = torch.tensor(values, dtype=torch.float64).view(index.shape)
    return values, torch.tensor(mask).view(index.shape) & (index >= 0), index


def of_samples(values, mask, index, function):
    """The same by a loop: ``function`` of the trained values of each token's sample."""
    found = torch.zeros(index.shape, dtype=torch.float64)
    for row in range(index.shape[0]):
        for t in range(index.shape[1]):
            chosen = values[row][mask[row] & (index[row] == index[row, t])]
            found[row, t] = function(chosen) if len(chosen) else 0.0
    return found


@given(rows())
def test_sums_counts_and_means_equal_a_loop_over_samples(batch):
    _, mask, index = batch
    assert torch.allclose(sample_sum(*batch), of_samples(*batch, torch.sum), atol=1e-12)
    assert torch.allclose(sample_mean(*batch), of_samples(*batch, torch.mean), atol=1e-12)
    assert torch.equal(sample_count(mask, index).double(), of_samples(*batch, len))


@given(rows())
def test_exactly_one_token_of_each_trained_sample_is_its_last(batch):
    _, mask, index = batch
    last = is_last_trained(mask, index)
    assert not (last & ~mask).any()
    for name in index[mask].unique():
        (position,) = torch.nonzero(last & (index == name)).tolist()
        assert position == torch.nonzero(mask & (index == name)).tolist()[-1]
    assert last.sum() == len(index[mask].unique())


def test_what_stands_at_untrained_tokens_reaches_neither_value_nor_gradient():
    values = torch.tensor([[NAN, 1.0, 2.0, float("inf")]], requires_grad=True)
    mask, index = torch.tensor([[False, True, True, False]]), torch.tensor([[4, 4, 4, -1]])
    found = sample_mean(values, mask, index)
    assert found.tolist() == [[1.5, 1.5, 1.5, 0.0]]
    found[0, 0].backward()
    assert values.grad.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_neighbours_with_one_index_in_different_rows_are_different_samples():
    index = torch.tensor([[1, 1], [1, 1]])
    found = sample_sum(torch.tensor([[1.0, 2.0], [4.0, 8.0]]), index > 0, index)
    assert found.tolist() == [[3.0, 3.0], [12.0, 12.0]]


def test_gradcheck_holds():
    values = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, False, False]])
    index = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, -1, -1]])
    weights = torch.randn(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: sample_sum(v, mask, index) * weights, values)
    assert torch.autograd.gradcheck(lambda v: sample_mean(v, mask, index).exp() * weights, values)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="sample_index must have the shape of values"):
        sample_sum(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"sample_index must be \[B, T\]"):
        row_segments(torch.zeros(3, dtype=torch.int64))
