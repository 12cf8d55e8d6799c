"""chunked_divergence against dense float64, finite differences and small numbers. Tolerance 1e-5 in fp32."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.functional.distillation import chunked_divergence

TOLERANCE = 1e-5
DIVERGENCES = ["reverse", "forward"]


def _inputs(count, *, dim=5, teacher_dim=3, vocabulary=7, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (count, dim), (vocabulary, dim), (count, teacher_dim), (vocabulary, teacher_dim)
    tensors = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_(index < 2) for index, tensor in enumerate(tensors)]


def _dense(inputs, temperature, divergence, top_k):
    """Written out with the whole [N, V], token by token and class by class."""
    hidden, weight, teacher_hidden, teacher_weight = (tensor.double() for tensor in inputs)
    policy = torch.softmax(hidden @ weight.T / temperature, -1)
    teacher = torch.softmax(teacher_hidden @ teacher_weight.T / temperature, -1)
    result = []
    for p, q in zip(policy, teacher, strict=True):
        over, under = (p, q) if divergence == "reverse" else (q, p)
        if 0 < top_k < len(p):
            own = set(over.topk(top_k).indices.tolist())
            rest = [index for index in range(len(p)) if index not in own]
            over, under = (
                torch.stack([*(x[index] for index in sorted(own)), x[rest].sum()]) for x in (over, under)
            )
        result.append((over * (over.log() - under.log())).sum())
    return torch.stack(result)


def _gradients(inputs, values, seed=1):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(values.shape[0], generator=generator, dtype=torch.float64)
    return torch.autograd.grad((values * factors).sum(), inputs[:2])


def _assert_close(actual, expected, tolerance):
    difference = (actual.double() - expected.double()).norm()
    assert difference <= tolerance * expected.double().norm() + 1e-9, difference


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    chunk_tokens=st.integers(1, 10),
    vocabulary=st.integers(2, 8),
    top_k=st.integers(0, 9),
    divergence=st.sampled_from(DIVERGENCES),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients_equal_the_dense_computation(
    count, chunk_tokens, vocabulary, top_k, divergence, temperature, seed
):
    inputs = _inputs(count, vocabulary=vocabulary, seed=seed)
    expected = _dense(inputs, temperature, divergence, top_k)
    actual = chunked_divergence(
        *inputs, temperature=temperature, divergence=divergence, top_k=top_k, chunk_tokens=chunk_tokens
    )
    assert torch.allclose(actual, expected, atol=1e-12)
    assert (actual > -1e-12).all()
    for a, b in zip(_gradients(inputs, actual), _gradients(inputs, expected), strict=True):
        _assert_close(a, b, 1e-10)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 2])
def test_gradcheck_holds_for_the_policys_hidden_and_weight(divergence, top_k):
    hidden, weight, *teacher = _inputs(4, dim=3, vocabulary=5)

    def value(hidden, weight):
        return chunked_divergence(
            hidden, weight, *teacher, temperature=0.7, divergence=divergence, top_k=top_k, chunk_tokens=3
        )

    assert torch.autograd.gradcheck(value, (hidden, weight))


def test_a_half_and_a_half_against_a_quarter_and_three_quarters():
    # KL(p || q) = 1/4 log(1/2) + 3/4 log(3/2), KL(q || p) = 1/2 log 2 + 1/2 log(2/3).
    one = torch.ones(1, 1)
    policy, teacher = torch.tensor([[0.0], [math.log(3.0)]]), torch.zeros(2, 1)
    reverse = chunked_divergence(one, policy, one, teacher).item()
    forward = chunked_divergence(one, policy, one, teacher, divergence="forward").item()
    assert reverse == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-7)
    assert forward == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)


def test_the_tail_is_one_class_whose_probability_is_a_sum():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), k = 1: classes (1/2, 1/2) and (1/4, 3/4) for reverse;
    # for forward the teacher's largest is the last: (1/2, 1/2) and (1/4, 3/4) again, by symmetry.
    one = torch.ones(1, 1, dtype=torch.float64)
    policy = torch.tensor([[0.5], [0.25], [0.25]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.25], [0.25], [0.5]], dtype=torch.float64).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    for divergence in DIVERGENCES:
        value = chunked_divergence(one, policy, one, teacher, divergence=divergence, top_k=1)
        assert value.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_top_k_of_the_whole_vocabulary_equals_the_full_divergence_and_less_is_never_more(divergence):
    inputs = _inputs(20, vocabulary=9)
    full = chunked_divergence(*inputs, divergence=divergence)
    gradients = _gradients(inputs, full)
    by_k = [chunked_divergence(*inputs, divergence=divergence, top_k=k) for k in range(1, 10)]
    for smaller, larger in itertools.pairwise(by_k):
        assert (larger - smaller > -1e-12).all()  # a finer partition
    for k in (8, 9, 20):  # with 8 of 9 the tail is a single token: also the full divergence
        value = chunked_divergence(*inputs, divergence=divergence, top_k=k)
        torch.testing.assert_close(value, full, rtol=0, atol=1e-12)
        for a, b in zip(_gradients(inputs, value), gradients, strict=True):
            _assert_close(a, b, 1e-10)
    assert (full - by_k[0]).max() > 1e-3


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_models_diverge_by_nothing_and_have_no_gradient(divergence):
    hidden, weight, *_ = _inputs(6)
    for top_k in (0, 3):
        value = chunked_divergence(hidden, weight, hidden, weight, divergence=divergence, top_k=top_k)
        assert value.abs().max() < 1e-12
        assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(value.sum(), (hidden, weight)))


def test_temperature_divides_the_logits_of_both():
    inputs = _inputs(5)
    hot = chunked_divergence(*inputs, temperature=2.0)
    halved = [inputs[0] / 2, inputs[1], inputs[2] / 2, inputs[3]]
    torch.testing.assert_close(hot, chunked_divergence(*halved), rtol=0, atol=1e-12)
    assert (hot - chunked_divergence(*inputs)).abs().max() > 1e-2


def test_the_gradient_is_that_of_the_policy_alone():
    inputs = [tensor.detach().requires_grad_() for tensor in _inputs(5)]
    chunked_divergence(*inputs).sum().backward()
    assert all(tensor.grad.norm() > 1e-3 for tensor in inputs[:2])
    assert all(tensor.grad is None for tensor in inputs[2:])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 2])
def test_logits_of_ten_thousand_stay_finite(divergence, top_k):
    inputs = _inputs(6, dtype=torch.float32, scale=100.0)
    value = chunked_divergence(*inputs, divergence=divergence, top_k=top_k)
    assert torch.isfinite(value).all()
    assert value.max() > 100
    for gradient in _gradients(inputs, value):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [0, 8])
def test_low_precision_inputs_are_accumulated_in_fp32(dtype, top_k):
    inputs = _inputs(200, dim=64, teacher_dim=48, vocabulary=50, dtype=dtype, scale=0.3)
    value = chunked_divergence(*inputs, chunk_tokens=7, top_k=top_k)
    assert value.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected = _dense(exact, 1.0, "reverse", top_k)
    assert (value - expected).abs().max() < TOLERANCE
    for a, b in zip(_gradients(inputs, value), _gradients(exact, expected), strict=True):
        assert a.dtype == dtype
        # The gradient of the logits is rounded to fp32 sums; its result once to the inputs' dtype.
        assert ((a.double() - b).abs() <= 1.1 * 0.5 * torch.finfo(dtype).eps * b.abs() + 1e-5).all()


def test_models_of_different_precision_are_compared():
    inputs = _inputs(30, dtype=torch.float32)
    expected = chunked_divergence(*inputs)
    rounded = [*inputs[:2], *(tensor.bfloat16() for tensor in inputs[2:])]
    value = chunked_divergence(*rounded)
    assert value.dtype == torch.float32
    assert (value - expected).abs().max() < 0.1
    torch.testing.assert_close(value, chunked_divergence(*inputs[:2], *(t.float() for t in rounded[2:])))


def test_no_tokens_give_no_values_and_a_weight_gradient_of_zeros():
    inputs = _inputs(0)
    for top_k in (0, 2):
        value = chunked_divergence(*inputs, top_k=top_k)
        assert value.shape == (0,)
        hidden, weight = torch.autograd.grad(value.sum(), inputs[:2])
        assert hidden.shape == (0, 5)
        assert torch.equal(weight, torch.zeros(7, 5, dtype=torch.float64))


class _Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("top_k", [0, 4])
def test_no_buffer_is_larger_than_a_chunk_of_logits(top_k):
    inputs = _inputs(256, vocabulary=256, dim=4, teacher_dim=4, dtype=torch.float32)
    with _Largest() as largest:
        chunked_divergence(*inputs, chunk_tokens=16, top_k=top_k).sum().backward()
    assert largest.elements == 16 * 256
    with _Largest() as dense:
        chunked_divergence(*inputs, chunk_tokens=256, top_k=top_k).sum().backward()
    assert dense.elements == 256 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, r"hidden must be \[N, D\] and weight"),
        ({"teacher_weight": torch.zeros(7, 2)}, r"teacher_hidden must be"),
        ({"teacher_hidden": torch.zeros(2, 3)}, r"same N and V; got N = 3 and 2"),
        ({"teacher_weight": torch.zeros(6, 3)}, r"V = 7 and 6"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"divergence": "jensen"}, "divergence must be"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    arguments = dict(zip(names, _inputs(3, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        chunked_divergence(**arguments)
