"""Importance ratios, and what happens where the exponential would overflow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.ratio import token_ratio


def test_the_ratio_is_that_of_the_probabilities():
    ratio, log_ratio, is_clamped = token_ratio(
        torch.log(torch.tensor([0.6, 0.1])), torch.log(torch.tensor([0.3, 0.4]))
    )
    assert ratio.tolist() == pytest.approx([2.0, 0.25])
    assert log_ratio.tolist() == pytest.approx([math.log(2), -math.log(4)])
    assert is_clamped.tolist() == [False, False]


def test_the_gradient_is_the_ratio_inside_the_bounds_and_zero_beyond():
    policy = torch.tensor([-1.0, -0.0, -100.0], requires_grad=True)
    ratio, _, is_clamped = token_ratio(policy, torch.tensor([-1.5, -100.0, -0.0]))
    ratio.sum().backward()
    assert policy.grad.tolist() == pytest.approx([math.exp(0.5), 0.0, 0.0])
    assert is_clamped.tolist() == [False, True, True]


@given(st.floats(-(2.0**100), 0.0, width=32), st.floats(-(2.0**100), 0.0, width=32))
def test_the_ratio_is_finite_and_positive_for_any_logprobs(policy, old):
    ratio, _, is_clamped = token_ratio(torch.tensor([policy]), torch.tensor([old]))
    assert 0 < ratio.item() <= math.exp(20) * 1.001
    assert is_clamped.item() == (abs(torch.tensor(policy) - torch.tensor(old)).item() > 20)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="old_logprobs must have the shape of policy_logprobs"):
        token_ratio(torch.zeros(2, 3), torch.zeros(2, 1))
