"""Statistics of how evenly experts are used, against numbers worked out by hand."""

import math

import pytest
import torch

from titan_rl.functional.expert_load import expert_load


def test_an_even_load_has_entropy_one():
    assert expert_load(torch.full((3, 4), 7.0)) == {
        "load_fraction_max": 0.25,
        "load_fraction_min": 0.25,
        "load_entropy": pytest.approx(1.0),
    }


def test_extremes_are_over_all_layers_and_the_entropy_is_their_mean():
    load = expert_load(torch.tensor([[6.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    first = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert load == {
        "load_fraction_max": 0.75,
        "load_fraction_min": 0.0,
        "load_entropy": pytest.approx((first + 1.0) / 2),
    }


def test_a_single_expert_is_no_fault():
    assert expert_load(torch.tensor([[5.0]]))["load_entropy"] == 0.0


def test_without_layers_nothing_is_known():
    assert expert_load(torch.zeros(0, 0)) == {}


@pytest.mark.parametrize("counts", [torch.ones(4), torch.tensor([[1.0, 1.0], [0.0, 0.0]])])
def test_what_is_no_load_is_refused(counts):
    with pytest.raises(ValueError, match="a positive sum in every row"):
        expert_load(counts)
