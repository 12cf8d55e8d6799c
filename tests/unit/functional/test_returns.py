"""Returns and advantages per token of packed rows against a loop backwards over each sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.returns import discounted_returns, gae, length_adaptive_lambda

NAN = float("nan")


def by_loop(rewards, values, mask, index, *, gamma, decay):
    """A_t of each trained token, sample by sample; the return-to-go when all values are 0 and decay is 1."""
    found = torch.zeros_like(rewards)
    for row in range(index.shape[0]):
        for name in index[row][index[row] >= 0].unique():
            advantage = next_value = 0.0
            trained = [t for t in range(index.shape[1]) if index[row, t] == name and mask[row, t]]
            for t in reversed(trained):
                delta = rewards[row, t].item() + gamma * next_value - values[row, t].item()
                advantage = delta + gamma * decay * advantage
                next_value = values[row, t].item()
                found[row, t] = advantage
    return found


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    row = [name for name, length in enumerate(lengths) for _ in range(length)]
    size = len(row) + draw(st.integers(0, 3))
    index = torch.tensor([row + [-1] * (size - len(row))] * 2)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=2 * size, max_size=2 * size))).view(2, size)
    noise = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rewards, values = torch.randn(2, 2, size, generator=noise, dtype=torch.float64)
    return rewards, values, mask & (index >= 0), index


@given(batches(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_a_loop_over_each_sample(batch, gamma, lambda_policy, lambda_critic):
    rewards, values, mask, index = batch
    found = gae(
        rewards,
        values,
        loss_mask=mask,
        sample_index=index,
        gamma=gamma,
        lambda_policy=lambda_policy,
        lambda_critic=lambda_critic,
    )
    assert torch.allclose(found.advantages, by_loop(*batch, gamma=gamma, decay=lambda_policy), atol=1e-10)
    targets = by_loop(*batch, gamma=gamma, decay=lambda_critic) + values * mask
    assert torch.allclose(found.returns, targets, atol=1e-10)


@given(batches(), st.floats(0, 1))
def test_returns_equal_a_loop_over_each_sample(batch, gamma):
    rewards, values, mask, index = batch
    found = discounted_returns(rewards, mask, sample_index=index, gamma=gamma)
    assert torch.allclose(
        found, by_loop(rewards, 0 * values, mask, index, gamma=gamma, decay=1.0), atol=1e-10
    )


@given(batches())
def test_with_lambda_1_the_critic_s_targets_are_monte_carlo_returns_whatever_the_policy_s_lambda(batch):
    rewards, values, mask, index = batch
    found = gae(
        rewards,
        values,
        loss_mask=mask,
        sample_index=index,
        gamma=0.9,
        lambda_policy=0.3,
        lambda_critic=1.0,
    )
    expected = discounted_returns(rewards, mask, sample_index=index, gamma=0.9)
    assert torch.allclose(found.returns, expected, atol=1e-10)


def test_gae_by_hand_with_an_untrained_token_between_two_turns():
    mask, index = torch.tensor([[True, False, True]]), torch.tensor([[0, 0, 0]])
    rewards, values = torch.tensor([[0.0, NAN, 1.0]]), torch.tensor([[0.5, NAN, 0.25]])
    found = gae(rewards, values, loss_mask=mask, sample_index=index, gamma=0.5, lambda_policy=0.5)
    # delta: 1 - 0.25 = 0.75, then 0.5 * 0.25 - 0.5 = -0.375; advantage -0.375 + 0.25 * 0.75 = -0.1875.
    assert found.advantages.tolist() == [[-0.1875, 0.0, 0.75]]
    assert found.returns.tolist() == [[0.3125, 0.0, 1.0]]


@pytest.mark.parametrize("bad", [float("inf"), NAN])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_reward_or_a_value_that_is_not_finite_stays_in_its_own_sample(bad, gamma):
    mask = torch.tensor([[True, True, False, True, True, True]])
    index = torch.tensor([[0, 0, 0, 1, 1, 2]])
    rewards, values = torch.ones(1, 6), torch.full((1, 6), 0.5)
    expected = gae(rewards, values, loss_mask=mask, sample_index=index, gamma=gamma)
    returns = discounted_returns(rewards, mask, sample_index=index, gamma=gamma)
    others = index[0] != 1
    rewards[0, 4] = bad
    found = discounted_returns(rewards, mask, sample_index=index, gamma=gamma)
    assert found[0, others].equal(returns[0, others])
    assert not found[0, 3:5].isfinite().any()
    values[0, 3] = bad
    for at in (torch.ones(1, 6), rewards):
        got = gae(at, values, loss_mask=mask, sample_index=index, gamma=gamma)
        for one, right in zip(got, expected, strict=True):
            assert one[0, others].equal(right[0, others])
            assert not one[0, 3].isfinite()


def test_without_a_discount_nothing_of_the_next_token_counts_not_even_infinity():
    mask, index = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64)
    rewards = torch.tensor([[1.0, float("inf")]])
    found = discounted_returns(rewards, mask, sample_index=index, gamma=0.0)
    assert found.tolist() == [[1.0, float("inf")]]


def test_a_long_row_keeps_its_precision():
    length = 5000
    mask, index = torch.ones(1, length, dtype=torch.bool), torch.zeros(1, length, dtype=torch.int64)
    rewards = torch.zeros(1, length)
    rewards[0, -1] = 1.0
    found = discounted_returns(rewards, mask, sample_index=index, gamma=0.999)
    expected = 0.999 ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
    assert torch.allclose(found[0].double(), expected, rtol=1e-6)


def test_a_lambda_per_token_is_used_at_its_own_token():
    mask, index = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]])
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.zeros(1, 4)
    lambdas = torch.tensor([[0.5, 0.5, 0.25, 0.25]])
    found = gae(rewards, values, loss_mask=mask, sample_index=index, gamma=1.0, lambda_policy=lambdas)
    assert found.advantages.tolist() == [[0.5, 1.0, 0.25, 1.0]]


def test_no_gradient_flows_into_targets():
    values = torch.zeros(1, 2, requires_grad=True)
    mask, index = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64)
    found = gae(torch.ones(1, 2), values, loss_mask=mask, sample_index=index)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad


def test_length_adaptive_lambdas_by_hand():
    mask = torch.tensor([[True] * 40 + [False] * 8 + [True] * 16])
    index = torch.tensor([[0] * 48 + [1] * 16])
    found = length_adaptive_lambda(mask, index, alpha=0.05)
    assert found[0, 47].item() == pytest.approx(0.5)  # 1 - 1 / (0.05 * 40)
    assert found[0, 63].item() == 0.0  # 1 - 1 / 0.8 would be negative
    with pytest.raises(ValueError, match="alpha must be above 0"):
        length_adaptive_lambda(mask, index, alpha=0.0)
