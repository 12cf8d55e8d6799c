"""Scores of trained tokens equal those of the whole softmax, written out. In float64, within 1e-10."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.unit.titan.trainer_fakes import one_part
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.policy.token_scores import LogprobScorer, token_scores
from titan_rl.types import Sample

VOCAB, WIDTH, TOLERANCE = 11, 5, 1e-10


class Model(nn.Module):
    """Hidden states are the embedding and a running sum of it; ``lm_head`` is not applied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def forward(self, tokens, *, positions):
        return self.embedding(tokens).cumsum(1) / (1 + positions[..., None])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def scored(model, batch, **options):
    sharded = one_part(model)
    return token_scores(sharded, sharded.forward(batch), batch, **options)


def make_batch() -> MicroBatch:
    """Two rows: two samples and padding, and one sample."""

    def sample(tokens, num_prompt):
        mask = [index >= num_prompt for index in range(len(tokens))]
        return Sample(tokens, mask, [-1.0 * m for m in mask], 1.0, 0, 0, False)

    samples = [sample([1, 4, 2, 10], 2), sample([3, 3, 0], 1), sample([9, 8, 7, 6, 5, 4], 3)]
    return pack(samples, [1.0, -1.0, 0.5], token_budget=8, rows_per_micro_batch=2)[0]


def expected_scores(model, batch, temperature):
    hidden = model(batch.input_ids, positions=batch.positions)
    logprobs = (hidden @ model.lm_head.weight.T / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, batch.targets[..., None])[..., 0]
    return (torch.where(batch.loss_mask, values, 0.0) for values in (chosen, entropy))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_scores_equal_the_softmax_at_trained_tokens_and_are_zero_elsewhere(model, temperature):
    batch = make_batch()
    assert batch.loss_mask.any()
    assert (~batch.loss_mask).any()
    scores = scored(model, batch, temperature=temperature, with_entropy=True)
    logprobs, entropy = expected_scores(model, batch, temperature)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=TOLERANCE)
    assert scores.logprobs[~batch.loss_mask].eq(0).all()
    assert scored(model, batch, temperature=temperature).entropy is None


def test_gradients_equal_those_of_the_softmax(model):
    batch = make_batch()
    weights = torch.randn(batch.loss_mask.shape, dtype=torch.float64)
    scores = scored(model, batch, temperature=0.7, with_entropy=True)
    got = torch.autograd.grad((scores.logprobs * weights + scores.entropy).sum(), list(model.parameters()))
    logprobs, entropy = expected_scores(model, batch, 0.7)
    expected = torch.autograd.grad((logprobs * weights + entropy).sum(), list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        assert b.norm() > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


def test_a_micro_batch_of_nothing_scores_zero_and_gives_gradients_of_zero(model):
    scores = scored(model, MicroBatch.empty(2, 8), temperature=1.0)
    assert scores.logprobs.shape == (2, 8)
    assert scores.logprobs.eq(0).all()
    gradients = torch.autograd.grad(scores.logprobs.sum(), list(model.parameters()))
    assert all(gradient.eq(0).all() for gradient in gradients)  # zeros, not None: collectives hang on them


def test_the_scorer_gives_the_same_numbers_without_a_graph_inside_the_context(model):
    batches, inside = [make_batch(), MicroBatch.empty(1, 8), make_batch()], []

    @contextmanager
    def context():
        inside.append(True)
        yield
        inside.append(False)

    def forward(tokens, *, positions):
        assert inside[-1]
        return Model.forward(model, tokens, positions=positions)

    model.forward = forward
    found = LogprobScorer(one_part(model, context=context), temperature=0.5)(batches)
    assert inside == [True, False] * 3
    del model.forward
    assert len(found) == 3
    for batch, logprobs in zip(batches, found, strict=True):
        expected = scored(model, batch, temperature=0.5).logprobs
        assert torch.equal(logprobs, expected.detach())
        assert not logprobs.requires_grad
