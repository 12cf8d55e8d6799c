"""Whitening over everything, from sums over parts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.whitening import whiten, whitening_sums

VALUES = torch.tensor([[1.0, 2.0, 9.0], [4.0, -3.0, math.nan]])
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_sums_are_those_of_the_values_under_the_mask():
    assert whitening_sums(VALUES, MASK) == (4.0, 4.0, 30.0)


def test_whitened_values_by_hand():
    std = math.sqrt((0 + 1 + 9 + 16) / 3)  # Bessel-corrected
    expected = [[0.0, 1 / std, 0.0], [3 / std, -4 / std, 0.0]]
    whitened = whiten(VALUES, MASK, *whitening_sums(VALUES, MASK))
    assert whitened.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_without_shifting_only_the_scale_changes():
    std = math.sqrt(26 / 3)
    whitened = whiten(VALUES, MASK, *whitening_sums(VALUES, MASK), shift_mean=False)
    assert whitened[MASK].tolist() == pytest.approx([1 / std, 2 / std, 4 / std, -3 / std])


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=30), cut=st.integers(0, 30))
def test_parts_that_add_up_their_sums_are_whitened_as_one(values, cut):
    whole = torch.tensor(values, dtype=torch.float64)
    parts = [whole[:cut], whole[cut:]]
    sums = [whitening_sums(part, torch.ones_like(part, dtype=torch.bool)) for part in parts]
    total = [sum(column) for column in zip(*sums, strict=True)]
    joined = torch.cat([whiten(part, torch.ones_like(part, dtype=torch.bool), *total) for part in parts])
    std = (whole.var(correction=1) + 1e-8).sqrt()
    # The variance is a difference of sums; where it is all rounding there is nothing to compare with.
    if whole.std() > 1e-4 * whole.abs().max():
        torch.testing.assert_close(joined, (whole - whole.mean()) / std, rtol=1e-5, atol=1e-5)
        assert joined.mean().item() == pytest.approx(0, abs=1e-6)
    assert joined.isfinite().all()


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0, 2.0], []])
def test_equal_values_and_too_few_give_zero(values):
    tensor = torch.tensor(values)
    mask = torch.ones_like(tensor, dtype=torch.bool)
    assert whiten(tensor, mask, *whitening_sums(tensor, mask)).tolist() == [0.0] * len(values)


def test_equal_values_that_are_no_binary_fractions_stay_bounded():
    tensor = torch.full((1000,), 0.1)
    mask = torch.ones_like(tensor, dtype=torch.bool)
    assert whiten(tensor, mask, *whitening_sums(tensor, mask)).abs().max() < 1e-3


def test_what_is_masked_becomes_zero_whatever_stood_there():
    assert whiten(VALUES, MASK, *whitening_sums(VALUES, MASK))[~MASK].tolist() == [0.0, 0.0]
