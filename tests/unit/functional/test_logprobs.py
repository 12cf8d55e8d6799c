"""chunked_logprobs against log_softmax, finite differences and exact small numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.functional.logprobs import chunked_logprobs

TOLERANCE = 1e-5


def _inputs(num_tokens, *, dim=5, vocabulary=7, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _reference(hidden, weight, targets, temperature):
    """The textbook way, in float64, with the whole [N, V] in memory."""
    logs = torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def _gradients(hidden, weight, logprobs, entropy, seed=1):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, logprobs.shape[0], generator=generator, dtype=torch.float64)
    loss = (logprobs * factors[0]).sum() + (0.0 if entropy is None else (entropy * factors[1]).sum())
    return torch.autograd.grad(loss, (hidden, weight))


def _assert_close(actual, expected, tolerance=TOLERANCE):
    difference = (actual.double() - expected.double()).norm()
    assert difference <= tolerance * expected.double().norm() + 1e-8, difference


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    chunk_tokens=st.integers(1, 10),
    vocabulary=st.integers(1, 8),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 1000),
)
def test_it_equals_log_softmax_and_gather_whatever_the_chunks(
    num_tokens, chunk_tokens, vocabulary, temperature, seed
):
    hidden, weight, targets = _inputs(num_tokens, vocabulary=vocabulary, dtype=torch.float64, seed=seed)
    expected = _reference(hidden, weight, targets, temperature)
    actual = chunked_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True
    )
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    for a, b in zip(_gradients(hidden, weight, *actual), _gradients(hidden, weight, *expected), strict=True):
        _assert_close(a, b, 1e-11)


def test_gradcheck_holds_for_logprobs_and_entropy_of_hidden_and_weight():
    hidden, weight, targets = _inputs(4, dim=3, vocabulary=5, dtype=torch.float64)

    def both(hidden, weight):
        return chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=3, with_entropy=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: both(h, w)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: both(h, w)[1], (hidden, weight))


def test_a_wrong_gradient_of_the_entropy_would_be_noticed():
    hidden, weight, targets = _inputs(4, dtype=torch.float64)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, with_entropy=True)
    right = _gradients(hidden, weight, *_reference(hidden, weight, targets, 1.0))
    planted = _gradients(hidden, weight, logprobs, 1.01 * entropy)
    with pytest.raises(AssertionError):
        _assert_close(planted[0], right[0])


def test_uniform_logits_give_minus_log_v_and_the_largest_entropy():
    weight = torch.zeros(8, 3)
    logprobs, entropy = chunked_logprobs(torch.randn(2, 3), weight, torch.tensor([0, 7]), with_entropy=True)
    assert torch.allclose(logprobs, torch.full((2,), -math.log(8)))
    assert torch.allclose(entropy, torch.full((2,), math.log(8)))


def test_temperature_divides_the_logits():
    # Logits (1, 3) at temperature 2 are (0.5, 1.5): log sigmoid(-1) and log sigmoid(1).
    logprobs, _ = chunked_logprobs(
        torch.ones(2, 1), torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]), temperature=2.0
    )
    assert logprobs.tolist() == pytest.approx([-1.3132617, -0.3132617], abs=1e-6)


def test_logits_of_ten_thousand_stay_finite():
    hidden, weight, targets = _inputs(6, scale=1e4)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, with_entropy=True)
    expected = _reference(hidden, weight, targets, 1.0)
    assert torch.allclose(logprobs.double(), expected[0], rtol=1e-5, atol=1e-2)
    assert torch.isfinite(entropy).all()
    for gradient in _gradients(hidden, weight, logprobs, entropy):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_accumulated_in_fp32(dtype):
    hidden, weight, targets = _inputs(300, dim=64, vocabulary=50, dtype=dtype, scale=0.3)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=7, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = _reference(hidden, weight, targets, 1.0)
    assert (logprobs - expected[0]).abs().max() < TOLERANCE
    assert (entropy - expected[1]).abs().max() < TOLERANCE
    exact = [h.detach().double().requires_grad_() for h in (hidden, weight)]
    right = _gradients(*exact, *_reference(*exact, targets, 1.0))
    for actual, expected_gradient in zip(_gradients(hidden, weight, logprobs, entropy), right, strict=True):
        assert actual.dtype == dtype
        # One rounding of the exact gradient, not one per chunk: 43 roundings would exceed this.
        half_ulp = 0.5 * torch.finfo(dtype).eps
        assert (
            (actual.double() - expected_gradient).abs() <= 1.01 * half_ulp * expected_gradient.abs() + 2e-6
        ).all()


def test_no_tokens_give_no_values_and_a_weight_gradient_of_zeros():
    hidden, weight, targets = _inputs(0)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 5)
    assert torch.equal(weight.grad, torch.zeros(7, 5))


def test_tokens_whose_logprob_gets_no_gradient_leave_the_weight_alone():
    hidden, weight, targets = _inputs(5)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk_tokens=2)
    logprobs[1].backward()
    alone, weight_alone = hidden[1:2].detach().requires_grad_(), weight.detach().requires_grad_()
    chunked_logprobs(alone, weight_alone, targets[1:2])[0].sum().backward()
    _assert_close(weight.grad, weight_alone.grad)
    assert torch.equal(hidden.grad[[0, 2, 3, 4]], torch.zeros(4, 5))


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, targets = _inputs(3)
    weight.requires_grad_(False)
    chunked_logprobs(hidden, weight, targets)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad.norm() > 0


class _LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    hidden, weight, targets = _inputs(64, dim=4, vocabulary=100)
    with _LargestTensor() as seen:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=8, with_entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.elements == 8 * 100
    with _LargestTensor() as seen:  # the same counter on one chunk of everything
        chunked_logprobs(hidden, weight, targets, chunk_tokens=64)[0].sum().backward()
    assert seen.elements == 64 * 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, "hidden must be"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, "targets must be int64"),
        ({"targets": torch.zeros(3)}, "targets must be int64"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    hidden, weight, targets = _inputs(3)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**arguments)
