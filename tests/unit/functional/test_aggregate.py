"""The token mean: shares that add up, and masked tokens that do not exist."""

import pytest
import torch

from titan_rl.functional.aggregate import token_mean


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
