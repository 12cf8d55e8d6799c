"""Surrogates of single tokens against hand-computed numbers, independent formulas and gradcheck."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.surrogate import (
    clipped_surrogate,
    clipped_weight_surrogate,
    dual_clipped_surrogate,
    reinforce_surrogate,
    soft_gated_surrogate,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, (False, False)),
        (1.5, 2.0, -2.56, 0.0, (False, True)),  # -(1 + 0.28) * 2
        (0.5, 2.0, -1.0, -2.0, (False, False)),  # below the bound, but improving: not clipped
        (0.5, -2.0, 1.6, 0.0, (True, False)),  # (1 - 0.2) * 2
        (1.5, -2.0, 3.0, 2.0, (False, False)),
        (5.0, 0.0, 0.0, 0.0, (False, False)),
    ],
)
def test_loss_gradient_and_clipping_by_hand(ratio, advantage, loss, gradient, clipped):
    ratio = torch.tensor([ratio], requires_grad=True)
    value, low, high = clipped_surrogate(ratio, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert ratio.grad.item() == pytest.approx(gradient)
    assert (low.item(), high.item()) == clipped


@given(
    st.floats(0.0, 100.0),
    st.floats(-5.0, 5.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 2.0),
)
def test_it_is_equation_7_of_the_paper(ratio, advantage, clip_low, clip_high):
    value, _, _ = clipped_surrogate(
        torch.tensor([ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    assert value.item() == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-12)


def test_a_nan_ratio_is_not_hidden_by_the_clipping():
    value, _, _ = clipped_surrogate(
        torch.tensor([float("nan")]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2
    )
    assert value.isnan().all()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="advantages must have the shape of ratio"):
        clipped_surrogate(torch.ones(2, 3), torch.ones(2, 1), clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_dual"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # -3 * -2, flat beyond c = 3
        (2.5, -2.0, 5.0, 2.0, False),
        (0.5, -2.0, 1.6, 0.0, False),  # the lower bound still holds
        (5.0, 2.0, -2.56, 0.0, False),  # positive advantages never see the third bound
    ],
)
def test_the_dual_bound_by_hand(ratio, advantage, loss, gradient, is_dual):
    ratio = torch.tensor([ratio], requires_grad=True)
    found = dual_clipped_surrogate(
        ratio, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, clip_dual=3.0
    )
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss)
    assert ratio.grad.item() == pytest.approx(gradient)
    assert found.is_dual_clipped.item() is is_dual


@given(st.floats(0.0, 50.0), st.floats(-5.0, 5.0), st.floats(1.01, 10.0))
def test_the_dual_bound_is_the_maximum_of_the_paper(ratio, advantage, clip_dual):
    found = dual_clipped_surrogate(
        torch.tensor([ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.2,
        clip_dual=clip_dual,
    )
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    if advantage < 0:
        objective = max(objective, clip_dual * advantage)
    assert found.loss.item() == pytest.approx(-objective, abs=1e-12)


def test_a_bounded_weight_limits_the_gradient_and_does_not_remove_it():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ratio = torch.tensor([4.0, 0.1, 1.1], requires_grad=True)
    found = clipped_weight_surrogate(
        logprobs, ratio, torch.tensor([2.0, -1.0, 1.0]), clip_low=0.2, clip_high=0.28
    )
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([2.56, -1.6, 3.3])
    assert logprobs.grad.tolist() == pytest.approx([-2.56, 0.8, -1.1])
    assert ratio.grad is None  # a weight, not what is optimised
    assert found.is_clipped_low.tolist() == [False, True, False]
    assert found.is_clipped_high.tolist() == [True, False, False]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_the_soft_gate_has_the_gradient_that_its_paper_gives(ratio, advantage, tau):
    value = torch.tensor([ratio], requires_grad=True)
    found = soft_gated_surrogate(value, torch.tensor([advantage]))
    found.loss.sum().backward()
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert found.loss.item() == pytest.approx(-advantage * 4 / tau * gate, rel=1e-6)
    assert value.grad.item() == pytest.approx(-advantage * 4 * gate * (1 - gate), rel=1e-6)


def test_the_score_function_loss_by_hand():
    logprobs = torch.tensor([-2.0, -1.0], requires_grad=True)
    found = reinforce_surrogate(logprobs, torch.tensor([0.5, -3.0]))
    found.loss.sum().backward()
    assert found.loss.tolist() == [1.0, -3.0]
    assert logprobs.grad.tolist() == [-0.5, 3.0]


def test_gradcheck_holds_away_from_the_kinks():
    ratio = torch.tensor([0.3, 0.9, 1.1, 1.9, 4.0], dtype=torch.float64, requires_grad=True)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    for advantages in (torch.full((5,), 1.5).double(), torch.full((5,), -0.7).double()):
        for function in (
            lambda r, a=advantages: clipped_surrogate(r, a, **bounds).loss,
            lambda r, a=advantages: dual_clipped_surrogate(r, a, **bounds, clip_dual=3.0).loss,
            lambda r, a=advantages: soft_gated_surrogate(r, a).loss,
        ):
            assert torch.autograd.gradcheck(function, ratio)


def test_numbers_out_of_range_are_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="clip_dual must be above 1"):
        dual_clipped_surrogate(one, one, clip_low=0.2, clip_high=0.2, clip_dual=1.0)
    with pytest.raises(ValueError, match="tau_positive and tau_negative must be above 0"):
        soft_gated_surrogate(one, one, tau_negative=0.0)
