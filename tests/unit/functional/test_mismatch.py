"""Mismatch between generator and policy, as sums that can be reduced over ranks."""

import math

import pytest
import torch

from titan_rl.functional.mismatch import mismatch_sums


def test_sums_and_maximum_by_hand():
    policy = torch.tensor([-1.0, -2.0, float("nan")], requires_grad=True)
    sums = mismatch_sums(policy, torch.tensor([-1.5, -1.0, -5.0]), torch.tensor([True, True, False]))
    assert sums.num_tokens.item() == 2
    assert sums.abs_sum.item() == 1.5
    assert sums.abs_max.item() == 1.0
    assert sums.k3_sum.item() == pytest.approx(math.exp(0.5) - 1.5 + math.exp(-1), rel=1e-6)
    assert not any(value.requires_grad for value in sums)


def test_k3_estimates_the_divergence_from_the_generator():
    generator = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64), dim=0)
    policy = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2, -0.4], dtype=torch.float64), dim=0)
    every_token = torch.ones(1, dtype=torch.bool)
    expectation = sum(
        g.exp() * mismatch_sums(p[None], g[None], every_token).k3_sum
        for p, g in zip(policy, generator, strict=True)
    )
    assert torch.allclose(expectation, (generator.exp() * (generator - policy)).sum())


@pytest.mark.parametrize("size", [0, 3])
def test_nothing_to_compare_gives_zeros(size):
    values = torch.zeros(size)
    sums = mismatch_sums(values, values - 1, torch.zeros(size, dtype=torch.bool))
    assert [value.item() for value in sums] == [0, 0.0, 0.0, 0.0]
