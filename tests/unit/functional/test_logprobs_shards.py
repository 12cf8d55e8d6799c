"""chunked_logprobs of a vocabulary cut over ranks, against the whole one. In float64, within 1e-11."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.functional.logprobs import chunked_logprobs

TOLERANCE = 1e-11
VOCABULARY, DIM = 11, 5
SPLITS = ((7, 4), (4, 4, 3), (1, 9, 1))


class KnownPartners:
    """One shard's reductions: the other shards' share comes from the whole vocabulary's logits.

    The real ones are :class:`titan_rl.titan.sharded_model.TensorParallelVocabulary`. A call is about the next
    chunk of tokens, the largest logits first and the sums after them.
    """

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor, start: int, stop: int) -> None:
        self.start, self._done = start, 0
        self._logits, self._targets = logits, targets
        self._elsewhere = torch.ones(logits.shape[1], dtype=torch.bool)
        self._elsewhere[start:stop] = False

    def max(self, values: torch.Tensor) -> torch.Tensor:
        others = self._logits[self._done : self._done + len(values), self._elsewhere]
        return torch.maximum(values, others.amax(-1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        rows = slice(self._done, self._done + values.shape[1])
        self._done = rows.stop
        logits, targets = self._logits[rows], self._targets[rows]
        shifted = (logits - logits.amax(-1, keepdim=True))[:, self._elsewhere]
        target = logits.gather(-1, targets[:, None]).squeeze(-1) * self._elsewhere[targets]
        shares = [shifted.exp().sum(-1), target, (shifted.exp() * shifted).sum(-1)]
        return values + torch.stack(shares[: len(values)])


class ForgetsMax(KnownPartners):
    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


class ForgetsSum(KnownPartners):
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def make_inputs(num_tokens=7, *, seed=0, dtype=torch.float64, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def bounds(split):
    stops = torch.tensor(split).cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def of_shard(hidden, weight, targets, start, stop, *, temperature=0.7, kind=KnownPartners, **options):
    """What the rank of one shard computes, and its leaf tensors."""
    logits = (hidden.double() @ weight.double().T / temperature).detach()
    mine = hidden.detach().clone().requires_grad_(), weight[start:stop].detach().clone().requires_grad_()
    shard = kind(logits, targets, start, stop)
    outputs = chunked_logprobs(
        *mine, targets, temperature=temperature, with_entropy=True, shard=shard, **options
    )
    return mine, outputs


def gradients(leaves, outputs):
    """Of a loss in which every token's log-probability and entropy has a factor of its own."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(2, len(outputs[0]), generator=generator, dtype=torch.float64)
    loss = sum((factor * output).sum() for factor, output in zip(factors, outputs, strict=True))
    return torch.autograd.grad(loss, leaves)


def put_together(hidden, weight, targets, split, **options):
    """Values by shard, the sum of the shards' gradients of the states, and the gradient of the whole head."""
    shards = [of_shard(hidden, weight, targets, *part, **options) for part in bounds(split)]
    found = [gradients(leaves, outputs) for leaves, outputs in shards]
    values = [outputs for _, outputs in shards]
    return values, sum(g[0] for g in found), torch.cat([g[1] for g in found])


def whole(hidden, weight, targets, *, temperature=0.7):
    """The same by the textbook, with all logits."""
    logprobs = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    outputs = chosen, -(logprobs.exp() * logprobs).sum(-1)
    return outputs, *gradients((hidden, weight), outputs)


@settings(max_examples=30, deadline=None)
@given(
    split=st.sampled_from(SPLITS),
    num_tokens=st.integers(1, 9),
    chunk_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 1000),
)
def test_shards_give_the_values_and_gradients_of_the_whole_vocabulary(
    split, num_tokens, chunk_tokens, temperature, seed
):
    inputs = make_inputs(num_tokens, seed=seed)
    values, *found = put_together(*inputs, split, temperature=temperature, chunk_tokens=chunk_tokens)
    expected, *others = whole(*inputs, temperature=temperature)
    for outputs in values:  # every rank's: they compute one loss
        torch.testing.assert_close(outputs, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found, others, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("split", SPLITS)
def test_targets_lie_in_every_shard_of_the_case_that_the_faults_below_are_planted_in(split):
    _, _, targets = make_inputs(40)
    for start, stop in bounds(split):
        assert ((targets >= start) & (targets < stop)).any()


@pytest.mark.parametrize("kind", [ForgetsMax, ForgetsSum])
@pytest.mark.parametrize("split", SPLITS)
def test_planted_fault_a_missing_reduction_is_noticed_on_every_shard(split, kind):
    inputs = make_inputs(40)
    expected = whole(*inputs)[0]
    for part in bounds(split):
        _, outputs = of_shard(*inputs, *part, kind=kind)
        for a, b in zip(outputs, expected, strict=True):
            assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize("split", SPLITS)
def test_planted_fault_gradients_of_the_states_that_are_not_added_up_are_noticed(split):
    inputs = make_inputs(40)
    expected = whole(*inputs)[1]
    for part in bounds(split):
        assert (gradients(*of_shard(*inputs, *part))[0] - expected).norm() > 0.1 * expected.norm()


def test_values_without_entropy_are_the_same():
    hidden, weight, targets = make_inputs()
    logits = (hidden @ weight.T / 0.7).detach()
    shard = KnownPartners(logits, targets, 4, 8)
    alone, entropy = chunked_logprobs(hidden, weight[4:8], targets, temperature=0.7, shard=shard)
    assert entropy is None
    torch.testing.assert_close(alone, whole(hidden, weight, targets)[0][0], rtol=0, atol=TOLERANCE)


def test_logits_of_ten_thousand_stay_finite_when_the_largest_is_elsewhere():
    inputs = make_inputs(scale=1e4)
    values, *found = put_together(*inputs, (4, 4, 3))
    expected = whole(*inputs)[0]
    assert expected[0].min() < -1e3
    for outputs in values:
        torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in found)


def test_no_tokens_give_no_values_and_a_gradient_of_zeros_for_the_shard():
    hidden, weight, targets = make_inputs(0)
    leaves, outputs = of_shard(hidden, weight, targets, 4, 8)
    assert [len(output) for output in outputs] == [0, 0]
    assert torch.equal(gradients(leaves, outputs)[1], torch.zeros(4, DIM, dtype=torch.float64))


def test_bf16_states_are_accumulated_in_fp32():
    inputs = make_inputs(200, dtype=torch.bfloat16, scale=0.5)
    for outputs in put_together(*inputs, (7, 4), chunk_tokens=9)[0]:
        for a, b in zip(outputs, whole(*inputs)[0], strict=True):
            assert a.dtype == torch.float32
            assert (a - b).abs().max() < 1e-5
