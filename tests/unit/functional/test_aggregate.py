"""Aggregations: shares that add up, and masked tokens that do not exist."""

import pytest
import torch

from titan_rl.functional.aggregate import (
    sample_mean_of_token_means,
    sample_mean_of_token_sums,
    sample_mean_over_constant,
    token_mean,
)


def test_shares_of_uneven_micro_batches_add_up_to_the_global_mean():
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    shares = [token_mean(values[i], mask[i], 4) for i in range(2)]
    assert sum(shares).item() == token_mean(values, mask, torch.tensor(4)).item() == 4.0
    planted = sum(token_mean(values[i], mask[i], mask[i].sum()) for i in range(2)) / 2
    assert planted.item() == 6.0  # the mean of means that other frameworks compute


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_token_has_no_influence_and_a_gradient_of_exactly_zero(poison):
    values = torch.tensor([3.0, poison], requires_grad=True)
    total = token_mean(values, torch.tensor([True, False]), 2)
    total.backward()
    assert total.item() == 1.5
    assert values.grad.tolist() == [0.5, 0.0]


def test_a_globally_empty_step_gives_zero():
    assert token_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool), 0).item() == 0.0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="loss_mask must have the shape of values"):
        token_mean(torch.ones(2, 3), torch.ones(3, dtype=torch.bool), 6)


def test_the_weight_of_a_token_in_each_aggregation_by_hand():
    # Two samples in a packed row, of 3 and 1 trained tokens, in a step of 5 samples and 20 tokens.
    values = torch.ones(1, 6, requires_grad=True)
    mask = torch.tensor([[False, True, True, True, True, False]])
    index = torch.tensor([[0, 0, 0, 0, 1, -1]])
    of_means = sample_mean_of_token_means(values, mask, sample_index=index, num_samples=5)
    losses = {
        of_means: [1 / 15, 1 / 15, 1 / 15, 1 / 5],
        sample_mean_of_token_sums(values, mask, 5): [1 / 5] * 4,
        sample_mean_over_constant(values, mask, num_samples=5, max_tokens=8): [1 / 40] * 4,
        token_mean(values, mask, 20): [1 / 20] * 4,
    }
    for loss, weights in losses.items():
        (gradient,) = torch.autograd.grad(loss, values)
        assert gradient[0].tolist() == pytest.approx([0.0, *weights, 0.0])


def test_no_samples_and_no_tokens_give_zero_and_not_nan():
    values, mask = torch.tensor([[float("nan")]]), torch.tensor([[False]])
    index = torch.tensor([[-1]])
    assert sample_mean_of_token_means(values, mask, sample_index=index, num_samples=0).item() == 0.0
    assert sample_mean_of_token_sums(values, mask, torch.tensor(0)).item() == 0.0
    assert sample_mean_over_constant(values, mask, num_samples=0, max_tokens=4).item() == 0.0


def test_a_constant_below_one_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        sample_mean_over_constant(torch.ones(1), torch.tensor([True]), num_samples=1, max_tokens=0)
