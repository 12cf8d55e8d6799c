"""Weights and rejections for the mismatch: hand-computed numbers, and the effective sample size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional import correction

NAN = float("nan")
MASK = torch.tensor([[False, True, True, True, True, True, False]])
INDEX = torch.tensor([[0, 0, 0, 1, 1, 2, -1]])
RATIOS = torch.tensor([[9.0, 4.0, 0.25, 3.0, 1.5, 0.4, 9.0]])
LOG_RATIO = torch.where(MASK, RATIOS.log(), 0.0)


def test_the_log_ratio_is_trainer_minus_generator_of_trained_tokens_only_and_bounded():
    trainer = torch.tensor([[NAN, -1.0, -1.0, -1.0]], requires_grad=True)
    generator = torch.tensor([[NAN, -1.5, -99.0, NAN]])
    found = correction.mismatch_log_ratio(trainer, generator, torch.tensor([[False, True, True, False]]))
    assert found.tolist() == [[0.0, 0.5, 20.0, 0.0]]
    assert not found.requires_grad


def _trained(values):
    return [round(value, 5) for value in values[MASK].tolist()]


def test_truncated_token_weights_by_hand():
    found = correction.truncated_token_weights(LOG_RATIO, MASK, cap=2.0)
    assert _trained(found.weights) == [2.0, 0.25, 2.0, 1.5, 0.4]
    assert _trained(found.is_truncated) == [True, False, True, False, False]
    assert not found.is_rejected.any()
    assert not found.weights[~MASK].any()


def test_truncated_sample_weights_by_hand():
    found = correction.truncated_sample_weights(LOG_RATIO, MASK, sample_index=INDEX, cap=2.0)
    assert _trained(found.weights) == [1.0, 1.0, 2.0, 2.0, 0.4]
    assert _trained(found.is_truncated) == [False, False, True, True, False]


def test_masked_token_weights_by_hand():
    found = correction.masked_token_weights(LOG_RATIO, MASK, low=0.3, high=3.5)
    assert _trained(found.weights) == [0.0, 0.0, 3.0, 1.5, 0.4]
    assert _trained(found.is_rejected) == [True, True, False, False, False]
    assert torch.equal(found.is_rejected, correction.reject_tokens(LOG_RATIO, MASK, low=0.3, high=3.5))


def test_rejections_of_samples_by_hand():
    # Geometric means 1, sqrt(4.5) and 0.4; means of k3 1.125, (2 + 0.5 - log 4.5) / 2 and log 2.5 - 0.6.
    by_mean = correction.reject_samples_by_geometric_mean(
        LOG_RATIO, MASK, sample_index=INDEX, low=0.5, high=2.0
    )
    assert _trained(by_mean) == [False, False, True, True, True]
    by_k3 = correction.reject_samples_by_mean_k3(LOG_RATIO, MASK, sample_index=INDEX, max_kl=0.49)
    assert (2.5 - math.log(4.5)) / 2 == pytest.approx(0.49796, abs=1e-5)
    assert _trained(by_k3) == [True, True, True, True, False]


def test_only_samples_with_a_negative_advantage_and_a_policy_that_left_them_are_rejected():
    advantages = torch.tensor([[0.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0]])
    found = correction.reject_negative_samples_by_mean_k1(
        LOG_RATIO, MASK, sample_index=INDEX, advantages=advantages, max_kl=0.5
    )
    assert _trained(found) == [False, False, False, False, True]  # -log 0.4 = 0.916
    both = correction.reject_negative_samples_by_mean_k1(
        LOG_RATIO, MASK, sample_index=INDEX, advantages=-torch.ones_like(advantages), max_kl=-0.1
    )
    assert _trained(both) == [True, True, False, False, True]


def test_a_generator_that_is_the_trainer_gives_ones_and_rejects_nothing():
    zero = torch.zeros_like(LOG_RATIO)
    for found in (
        correction.truncated_token_weights(zero, MASK, cap=2.0),
        correction.truncated_sample_weights(zero, MASK, sample_index=INDEX, cap=2.0),
        correction.masked_token_weights(zero, MASK, low=0.5, high=5.0),
    ):
        assert torch.equal(found.weights, MASK.float())
        assert not (found.is_truncated | found.is_rejected).any()
    options = {"sample_index": INDEX}
    assert not correction.reject_samples_by_geometric_mean(zero, MASK, **options, low=0.99, high=1.01).any()
    assert not correction.reject_samples_by_mean_k3(zero, MASK, **options, max_kl=0.0).any()


def test_the_effective_sample_fraction_by_hand():
    weights = correction.truncated_token_weights(LOG_RATIO, MASK, cap=2.0).weights[MASK]
    assert weights.tolist() == pytest.approx([2.0, 0.25, 2.0, 1.5, 0.4])
    found = correction.effective_sample_fraction(6.15 / 5, 10.4725 / 5)
    assert found == pytest.approx(6.15**2 / (5 * 10.4725))
    measured = correction.effective_sample_fraction(weights.mean().item(), weights.square().mean().item())
    assert measured == pytest.approx(found)
    assert correction.effective_sample_fraction(0.0, 0.0) == 0.0  # no token, or no weight


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20))
def test_the_effective_sample_fraction_lies_between_one_over_n_and_one(weights):
    values = torch.tensor(weights, dtype=torch.float64)
    found = correction.effective_sample_fraction(values.mean().item(), values.square().mean().item())
    if values.square().sum() * len(weights) < 1e-30:
        return
    assert 1 / len(weights) - 1e-9 <= found <= 1 + 1e-9


def test_bounds_out_of_range_are_refused():
    with pytest.raises(ValueError, match="cap must be above 0"):
        correction.truncated_token_weights(LOG_RATIO, MASK, cap=0.0)
    with pytest.raises(ValueError, match="0 <= low < high"):
        correction.reject_tokens(LOG_RATIO, MASK, low=2.0, high=0.5)
