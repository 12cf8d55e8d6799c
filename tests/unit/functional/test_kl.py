"""KL estimators: hand-computed values, exact expectations, and which gradient each one has."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.kl import absolute, k1, k2, k3

LOGPROB = st.floats(-30.0, 0.0, width=32)


def test_values_by_hand():
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(policy, reference).item() == pytest.approx(math.log(2), rel=1e-6)
    assert k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-6)
    assert k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-6)


@given(LOGPROB, LOGPROB)
def test_k2_and_k3_are_never_negative_and_k3_is_zero_for_equal_policies(policy, reference):
    policy, reference = torch.tensor(policy), torch.tensor(reference)
    assert k2(policy, reference) >= 0
    assert k3(policy, reference) >= -1e-6
    assert k3(policy, policy) == 0


def _policies():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), dim=0)
    return logits, torch.log_softmax(logits, dim=0), reference


def test_k1_and_k3_have_the_divergence_as_their_exact_expectation():
    _, policy, reference = _policies()
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        assert torch.allclose((policy.exp() * estimator(policy, reference)).sum(), divergence, atol=1e-12)
    assert not torch.allclose((policy.exp() * k2(policy, reference)).sum(), divergence, rtol=1e-2)


def test_expected_gradients_are_those_that_the_docstring_states():
    def expected_gradient(estimator):
        logits, policy, reference = _policies()
        # Sampled from the policy, so its probabilities are weights that no gradient flows through.
        return torch.autograd.grad((policy.detach().exp() * estimator(policy, reference)).sum(), logits)[0]

    logits, policy, reference = _policies()
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    assert torch.allclose(expected_gradient(k1), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected_gradient(k2), reverse, atol=1e-12)
    assert torch.allclose(expected_gradient(k3), forward, atol=1e-12)
    assert not torch.allclose(reverse, forward, rtol=1e-1)


def test_k3_stays_finite_where_the_reference_is_e100_times_more_likely():
    policy = torch.tensor([-100.0, -1.0], requires_grad=True)
    value = k3(policy, torch.tensor([0.0, -100.0]))
    value.sum().backward()
    assert value.tolist() == pytest.approx([math.exp(20) - 21, 98.0], rel=1e-5)
    assert policy.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_shapes_that_would_broadcast_are_refused(estimator):
    with pytest.raises(ValueError, match="ref_logprobs must have the shape of policy_logprobs"):
        estimator(torch.zeros(2, 3), torch.zeros(3))


def test_the_absolute_log_ratio_by_hand():
    found = absolute(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.25]))
    assert found.tolist() == [0.5, 0.75]
