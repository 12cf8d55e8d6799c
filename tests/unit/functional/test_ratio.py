"""Importance ratios, and what happens where the exponential would overflow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.ratio import sequence_ratio, sequence_token_ratio, token_ratio


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


MASK = torch.tensor([[False, True, True, True, True, False]])
INDEX = torch.tensor([[0, 0, 0, 1, 1, -1]])
OLD = torch.tensor([[0.0, -1.0, -1.0, -2.0, -2.0, 0.0]])
POLICY = torch.tensor([[9.0, -0.8, -0.6, -2.5, -2.1, 9.0]])


def test_sequence_ratios_by_hand():
    # Sample 0: log-ratios 0.2 and 0.4; sample 1: -0.5 and -0.1. Nothing else is looked at.
    mean = sequence_ratio(POLICY, OLD, loss_mask=MASK, sample_index=INDEX)
    assert mean.log_ratio[0].tolist() == pytest.approx([0.3, 0.3, 0.3, -0.3, -0.3, 0.0], abs=1e-6)
    assert mean.ratio[0, 0].item() == pytest.approx(math.exp(0.3), abs=1e-6)
    total = sequence_ratio(POLICY, OLD, loss_mask=MASK, sample_index=INDEX, length_normalise=False)
    assert total.log_ratio[0].tolist() == pytest.approx([0.6, 0.6, 0.6, -0.6, -0.6, 0.0], abs=1e-6)


def test_the_gradient_of_a_sequence_ratio_is_shared_by_its_tokens_and_that_of_the_token_form_is_not():
    policy = POLICY.clone().requires_grad_()
    options = {"loss_mask": MASK, "sample_index": INDEX}
    whole, own = sequence_ratio(policy, OLD, **options), sequence_token_ratio(policy, OLD, **options)
    assert torch.allclose(own.ratio[MASK], whole.ratio[MASK])
    assert own.ratio[0, 0].item() == 1.0
    scale = math.exp(0.3)
    (shared,) = torch.autograd.grad(whole.ratio[0, 1], policy)
    assert shared[0].tolist() == pytest.approx([0, scale / 2, scale / 2, 0, 0, 0], abs=1e-6)
    (alone,) = torch.autograd.grad(own.ratio[0, 1], policy)
    assert alone[0].tolist() == pytest.approx([0, scale, 0, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("function", [sequence_ratio, sequence_token_ratio])
def test_a_sequence_ratio_that_overflows_is_finite_flagged_and_without_gradient(function):
    policy = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-90.0, -90.0, -1.0]])
    found = function(
        policy, old, loss_mask=torch.ones(1, 3, dtype=torch.bool), sample_index=torch.tensor([[0, 0, 1]])
    )
    assert found.ratio[0].tolist() == pytest.approx([math.exp(20), math.exp(20), 1.0])
    assert found.is_clamped.tolist() == [[True, True, False]]
    (gradient,) = torch.autograd.grad(found.ratio.sum(), policy)
    assert gradient.tolist() == [[0.0, 0.0, 1.0]]


def test_gradcheck_holds_for_sequence_ratios():
    policy = POLICY.double().requires_grad_()

    def ratio(values, length_normalise):
        options = {"loss_mask": MASK, "sample_index": INDEX, "length_normalise": length_normalise}
        return sequence_ratio(values, OLD.double(), **options).ratio

    assert torch.autograd.gradcheck(lambda values: ratio(values, True), policy)
    assert torch.autograd.gradcheck(lambda values: ratio(values, False), policy)
