"""The critic's loss and the running moments of its targets."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.value import (
    RunningMoments,
    clipped_value_loss,
    denormalised,
    normalised,
    output_preserving_scale,
    standard_deviation,
    updated_moments,
)

NUMBERS = st.lists(st.floats(-50, 50), min_size=2, max_size=20)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "is_clipped"),
    [
        (1.5, 1.0, 2.0, 0.32, 0.0, True),  # moved by 0.5 towards the return; (1.2 - 2)^2 / 2
        (0.5, 1.0, 0.0, 0.32, 0.0, True),
        (1.5, 1.0, 0.0, 1.125, 1.5, False),  # moved away from the return: pulled back
        (1.1, 1.0, 2.0, 0.405, -0.9, False),  # inside the bound
        (0.3, 0.3, 1.0, 0.245, -0.7, False),  # not moved, and no rounding may cost its gradient
    ],
)
def test_loss_and_gradient_by_hand(value, old, target, loss, gradient, is_clipped):
    value = torch.tensor([value], requires_grad=True)
    found = clipped_value_loss(value, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(gradient)
    assert found.is_clipped.item() is is_clipped


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-0.19, 0.19))
def test_inside_the_bound_the_gradient_is_that_of_the_squared_error(old, target, moved):
    value = torch.tensor([old + moved], requires_grad=True)
    found = clipped_value_loss(value, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    found.loss.sum().backward()
    assert value.grad.item() == (value - torch.tensor(target)).item()


def test_without_a_bound_it_is_half_the_squared_error():
    found = clipped_value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]))
    assert found.loss.tolist() == [2.0]
    assert not found.is_clipped.any()


def test_gradcheck_holds_away_from_the_kinks():
    old, target = torch.zeros(5, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0, 0.1, 0.5]).double()
    values = torch.tensor([0.5, 0.1, 0.5, 0.45, -0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, target, clip=0.2).loss, values)


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="clip must be above 0"):
        clipped_value_loss(torch.ones(1), torch.ones(1), torch.ones(1), clip=0.0)


def _after(moments, *batches):
    for batch in batches:
        moments = updated_moments(
            moments, count=len(batch), total=sum(batch), total_of_squares=sum(x * x for x in batch)
        )
    return moments


@given(NUMBERS, NUMBERS, st.lists(st.floats(-50, 50), max_size=3))
def test_running_moments_are_those_of_all_numbers_however_they_came(first, second, third):
    moments = _after(RunningMoments.empty(), first, third, second)
    everything = [*first, *second, *third]
    assert moments.count.item() == len(everything)
    assert moments.mean.item() == pytest.approx(statistics.fmean(everything), abs=1e-9)
    deviation = standard_deviation(moments, eps=0.0).item()
    assert deviation == pytest.approx(statistics.stdev(everything), abs=1e-5)


def test_before_two_numbers_nothing_is_scaled():
    values = torch.tensor([3.0, -1.0])
    assert torch.equal(normalised(values, RunningMoments.empty()), values)
    one = _after(RunningMoments.empty(), [3.0])
    assert normalised(values, one).tolist() == [0.0, -4.0]


@given(NUMBERS)
def test_denormalising_undoes_normalising(numbers):
    moments = _after(RunningMoments.empty(), numbers)
    values = torch.tensor(numbers, dtype=torch.float64)
    assert torch.allclose(denormalised(normalised(values, moments), moments), values, atol=1e-9)


def test_a_rescaled_last_layer_gives_the_same_values_in_units_of_reward():
    before = _after(RunningMoments.empty(), [1.0, 2.0, 4.0])
    after = _after(before, [10.0, -3.0])
    weight, bias, hidden = torch.randn(4).double(), torch.tensor(0.3).double(), torch.randn(7, 4).double()
    scale, shift = output_preserving_scale(before, after)
    old = denormalised(hidden @ weight + bias, before)
    new = denormalised(hidden @ (weight * scale) + (bias * scale + shift), after)
    assert torch.allclose(old, new)
    assert not torch.allclose(denormalised(hidden @ weight + bias, after), old)
