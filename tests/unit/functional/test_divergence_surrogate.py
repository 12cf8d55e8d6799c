"""Surrogates with a divergence as their trust region: hand-computed numbers and gradients."""

import math

import pytest
import torch

from titan_rl.functional.divergence_surrogate import (
    binary_kl_masked,
    quadratic_surrogate,
    total_variation_masked,
)

OLD = torch.tensor([0.5, 0.5, 0.5, 0.5])
NOW = torch.tensor([0.8, 0.8, 0.2, 0.2])
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0])


def _gradient(function, **options):
    logprobs = NOW.log().requires_grad_()
    found = function(logprobs, OLD.log(), ADVANTAGES, **options)
    found.loss.sum().backward()
    return found, logprobs.grad.tolist()


@pytest.mark.parametrize("objective", ["log_probability", "ratio"])
def test_only_tokens_pushed_further_away_are_dropped(objective):
    found, gradient = _gradient(
        total_variation_masked, max_decrease=0.25, max_increase=0.25, objective=objective
    )
    assert found.is_clipped_high.tolist() == [True, False, False, False]  # up by 0.3 and A > 0
    assert found.is_clipped_low.tolist() == [False, False, False, True]  # down by 0.3 and A < 0
    assert gradient == pytest.approx([0.0, 1.6, -0.4, 0.0])  # -A times the ratio
    value = math.log(0.8) if objective == "log_probability" else 1.0
    assert found.loss[1].item() == pytest.approx(1.6 * value)


def test_the_weight_is_capped_and_its_gradient_too():
    _, gradient = _gradient(total_variation_masked, max_decrease=1.0, max_increase=1.0, max_weight=1.2)
    assert gradient == pytest.approx([-1.2, 1.2, -0.4, 0.4])


def test_the_binary_divergence_by_hand():
    # 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231, the same both ways.
    found, gradient = _gradient(binary_kl_masked, max_kl_decrease=0.22, max_kl_increase=0.23)
    assert found.is_clipped_low.tolist() == [False, False, False, True]
    assert not found.is_clipped_high.any()
    assert gradient == pytest.approx([-1.6, 1.6, -0.4, 0.0])


def test_certain_tokens_are_finite():
    logprobs = torch.tensor([0.0, -1e-9], requires_grad=True)
    found = binary_kl_masked(
        logprobs,
        torch.tensor([-1e-9, 0.0]),
        torch.tensor([1.0, -1.0]),
        max_kl_decrease=0.1,
        max_kl_increase=0.1,
    )
    found.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 1.0])


def test_the_quadratic_pull_has_its_minimum_at_the_advantage_over_beta():
    old, advantages = torch.tensor([-2.0, -2.0]), torch.tensor([0.25, -0.5])
    logprobs = (old + advantages / 0.5).requires_grad_()
    quadratic_surrogate(logprobs, old, advantages, beta=0.5).loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    inputs = (old + 0.3).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: quadratic_surrogate(x, old.double(), advantages.double(), beta=0.5).loss, inputs
    )


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match="objective must be 'log_probability' or 'ratio'"):
        _gradient(total_variation_masked, max_decrease=1.0, max_increase=1.0, objective="odds")
