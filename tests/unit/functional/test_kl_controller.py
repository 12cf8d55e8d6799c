"""The adaptive coefficient: by hand, bounded, and back at its target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.functional.kl_controller import adapt_coefficient

OPTIONS = {"target": 0.1, "num_samples": 256, "horizon_samples": 10_000}


def test_it_grows_above_the_target_and_shrinks_below_in_proportion_to_the_error_and_the_samples():
    assert adapt_coefficient(0.05, 0.11, **OPTIONS) == pytest.approx(0.05 * (1 + 0.1 * 256 / 10_000))
    assert adapt_coefficient(0.05, 0.09, **OPTIONS) == pytest.approx(0.05 * (1 - 0.1 * 256 / 10_000))
    assert adapt_coefficient(0.05, 0.1, **OPTIONS) == 0.05


@pytest.mark.parametrize(("measured", "error"), [(50.0, 0.2), (0.13, 0.2), (0.05, -0.2), (-3.0, -0.2)])
def test_an_error_beyond_20_percent_counts_as_20_percent(measured, error):
    assert adapt_coefficient(0.05, measured, **OPTIONS) == pytest.approx(0.05 * (1 + error * 0.0256))


@given(coefficient=st.floats(1e-6, 10), measured=st.floats(-10, 10))
def test_it_stays_positive_and_moves_by_at_most_20_percent_in_a_horizon(coefficient, measured):
    value = adapt_coefficient(coefficient, measured, target=0.1, num_samples=10_000, horizon_samples=10_000)
    assert 0.8 * coefficient * (1 - 1e-12) <= value <= 1.2 * coefficient * (1 + 1e-12)


def test_no_samples_change_nothing():
    assert adapt_coefficient(0.05, 9.0, target=0.1, num_samples=0, horizon_samples=100) == 0.05


def test_it_finds_the_coefficient_that_holds_the_target():
    """A policy whose KL is inversely proportional to the coefficient."""
    coefficient = 1.0
    for _ in range(2000):
        coefficient = adapt_coefficient(
            coefficient, 0.02 / coefficient, target=0.1, num_samples=100, horizon_samples=1000
        )
    assert coefficient == pytest.approx(0.2, rel=1e-3)


def test_a_penalty_without_a_target_keeps_its_coefficient_and_one_with_a_target_does_not():
    assert KLPenalty(KLPenalty.Config(coefficient=0.05)).adapted(9.0, 5000) == 0.05
    adaptive = KLPenalty(KLPenalty.Config(coefficient=0.05, target=0.1, horizon_samples=1000))
    assert adaptive.adapted(0.11, 500) == pytest.approx(0.05 * 1.05)
    assert adaptive.coefficient == 0.05  # the trainer decides
