"""Surrogates that look at a whole sample: hand-computed numbers, an independent formula, gradcheck."""

import math

import pytest
import torch

from titan_rl.functional.sample_surrogate import gamma_weighted_surrogate, geometric_mean_surrogate

MASK = torch.tensor([[False, True, True, True, True, False]])
INDEX = torch.tensor([[0, 0, 0, 1, 1, -1]])
SEGMENTS = {"loss_mask": MASK, "sample_index": INDEX}
ADVANTAGES = torch.tensor([[9.0, 2.0, 2.0, -1.0, -1.0, 9.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[9.0, 1.0, 0.2, -1.0, 0.6, 9.0]], dtype=torch.float64)


def test_the_geometric_mean_clips_each_token_on_its_own_side_by_hand():
    # A > 0: min(1.0, 0.4) and 0.2, mean 0.3. A < 0: max(-1.0, -0.4) and 0.6, mean 0.1.
    log_ratio = LOG_RATIO.clone().requires_grad_()
    loss, low, high = geometric_mean_surrogate(log_ratio, ADVANTAGES, **SEGMENTS)
    expected = [-2 * math.exp(0.3)] * 2 + [math.exp(0.1)] * 2
    assert loss[MASK].tolist() == pytest.approx(expected)
    assert low.tolist() == [[False, False, False, True, False, False]]
    assert high.tolist() == [[False, True, False, False, False, False]]
    loss[MASK].sum().backward()
    # A token's gradient comes through both tokens of its sample; a clipped one has none.
    assert log_ratio.grad[0].tolist() == pytest.approx([0, 0, -2 * math.exp(0.3), 0, math.exp(0.1), 0])


def test_gradcheck_holds_for_the_geometric_mean():
    log_ratio = torch.randn(1, 6, dtype=torch.float64).mul(0.7).requires_grad_()
    weights = torch.rand(1, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: (geometric_mean_surrogate(x, ADVANTAGES, **SEGMENTS).loss * weights)[MASK], log_ratio
    )


def test_gamma_weights_by_hand():
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -1.0, -0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    loss, _, _ = gamma_weighted_surrogate(logprobs, LOG_RATIO, ADVANTAGES, **SEGMENTS)
    up, down = math.exp(1.2), math.exp(-0.4)  # products of the two samples' ratios
    phi_up, phi_down = up**2 * math.exp(3 * (1 - up)), down**3 * math.exp(2 * (1 - down))
    assert loss[MASK].tolist() == pytest.approx([2 * phi_up, 4 * phi_up, -phi_down, -0.5 * phi_down])
    loss[MASK].sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0, -2 * phi_up, -2 * phi_up, phi_down, phi_down, 0])


@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_gamma_weights_of_a_sequence_far_away_are_finite_and_small(log_ratio):
    logprobs = torch.full((1, 6), -1.0, requires_grad=True)
    far = torch.full((1, 6), log_ratio)
    loss, _, _ = gamma_weighted_surrogate(logprobs, far, ADVANTAGES.float(), **SEGMENTS)
    loss[MASK].sum().backward()
    assert logprobs.grad.abs().max() < 1e-6
    assert loss.isfinite().all()
