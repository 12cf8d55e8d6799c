"""chunked_divergence of a vocabulary cut over ranks, against the whole one. In float64, within 1e-11."""

from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.functional.distillation import chunked_divergence

TOLERANCE = 1e-11
VOCABULARY, DIM, TEACHER_DIM = 11, 5, 3
SPLITS = ((7, 4), (4, 4, 3), (1, 9, 1))
DIVERGENCES = ("reverse", "forward")


class Shard:
    """One of the ranks, which are threads that meet."""

    size = VOCABULARY

    def __init__(self, rank, start, slots, barrier):
        self.rank, self.start, self._slots, self._barrier = rank, start, slots, barrier

    def gather(self, values):
        self._slots[self.rank] = values
        self._barrier.wait()
        everyone = torch.stack(list(self._slots))
        self._barrier.wait()
        return everyone

    def sum(self, values):
        return self.gather(values).sum(0)


class ForgetsSum(Shard):
    def sum(self, values):
        self.gather(values)
        return values


class ForgetsGather(Shard):
    def gather(self, values):
        return super().gather(values)[self.rank : self.rank + 1].expand(len(self._slots), *values.shape)


def make_inputs(count=7, *, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (count, DIM), (VOCABULARY, DIM), (count, TEACHER_DIM), (VOCABULARY, TEACHER_DIM)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(scale * t).requires_grad_(i < 2) for i, t in enumerate(tensors)]


def gradients(leaves, values):
    """Of a loss in which every token has a factor of its own."""
    factors = torch.randn(len(values), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((factors * values).sum(), leaves)


def put_together(inputs, split, *, kind=Shard, **options):
    """Values by shard, the sum of the shards' gradients of the states, and the gradient of the whole head."""
    hidden, weight, teacher_hidden, teacher_weight = inputs
    stops = torch.tensor(split).cumsum(0).tolist()
    slots, barrier, found, failed = [None] * len(split), Barrier(len(split), timeout=60), {}, []

    def work(rank, start, stop):
        shard = kind(rank, start, slots, barrier)
        mine = hidden.detach().clone().requires_grad_(), weight[start:stop].detach().clone().requires_grad_()
        heads = teacher_hidden, teacher_weight[start:stop]
        try:
            found[rank] = mine, chunked_divergence(*mine, *heads, shard=shard, **options)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    parts = zip(range(len(split)), [0, *stops[:-1]], stops, strict=True)
    threads = [Thread(target=work, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    of_shards = [gradients(*found[rank]) for rank in range(len(split))]
    values = [found[rank][1] for rank in range(len(split))]
    return values, sum(g[0] for g in of_shards), torch.cat([g[1] for g in of_shards])


@settings(max_examples=60, deadline=None)
@given(
    split=st.sampled_from(SPLITS),
    count=st.integers(0, 9),
    chunk_tokens=st.integers(1, 10),
    top_k=st.integers(0, VOCABULARY + 1),
    divergence=st.sampled_from(DIVERGENCES),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 1000),
)
def test_shards_give_the_values_and_gradients_of_the_whole_vocabulary(
    split, count, chunk_tokens, top_k, divergence, temperature, seed
):
    options = {"top_k": top_k, "divergence": divergence, "temperature": temperature}
    inputs = make_inputs(count, seed=seed)
    values, *found = put_together(inputs, split, chunk_tokens=chunk_tokens, **options)
    expected = chunked_divergence(*inputs, **options)
    for of_shard in values:  # every rank's: they compute one loss
        torch.testing.assert_close(of_shard, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found, list(gradients(inputs[:2], expected)), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_likeliest_of_all_shards_are_compared_and_not_those_of_each(divergence, top_k):
    """All large logits are in the second shard; the first one's largest are in the tail."""
    inputs = make_inputs(20)
    with torch.no_grad():
        for head in (inputs[1], inputs[3]):
            head[:7] *= 1e-3
    values, *_ = put_together(inputs, (7, 4), top_k=top_k, divergence=divergence)
    torch.testing.assert_close(
        values[0], chunked_divergence(*inputs, top_k=top_k, divergence=divergence), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("kind", [ForgetsSum, ForgetsGather])
def test_planted_faults_are_noticed(kind, top_k, divergence):
    inputs = make_inputs(20)
    options = {"top_k": top_k, "divergence": divergence}
    expected = chunked_divergence(*inputs, **options)
    values, *_ = put_together(inputs, (4, 4, 3), kind=kind, **options)
    assert any((of_shard - expected).abs().max() > 1e-2 for of_shard in values)


def test_logits_of_ten_thousand_and_a_tail_that_underflows_stay_exact():
    inputs = make_inputs(6, scale=50.0)
    for top_k in (0, 3):
        for divergence in DIVERGENCES:
            options = {"top_k": top_k, "divergence": divergence}
            values, *found = put_together(inputs, (4, 4, 3), **options)
            expected = chunked_divergence(*inputs, **options)
            torch.testing.assert_close(values[1], expected, rtol=TOLERANCE, atol=TOLERANCE)
            others = list(gradients(inputs[:2], expected))
            torch.testing.assert_close(found, others, rtol=TOLERANCE, atol=TOLERANCE)
