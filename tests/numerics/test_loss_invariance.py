"""The loss of a step does not depend on how its samples are cut into micro-batches and rows.

Log-probabilities come from one parameter per token of every sample, so each layout can be compared sample by
sample. "Equal" for gradients: per tensor, ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32, on 8 samples of uneven
length, with old different from policy and the KL penalty on. Every invariant is shown to fail under a planted
fault.
"""

import pytest
import torch

from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.functional.logprobs import chunked_logprobs
from titan_rl.types import Sample

TOLERANCE = 1e-5
LENGTHS = (12, 3, 9, 5, 17, 2, 8, 11)
LONGEST = max(LENGTHS)


def _samples():
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index, length in enumerate(LENGTHS):
        prompt = 1 + index % 3 if length > 3 else 1
        mask = [position >= prompt for position in range(length)]
        logprobs = (-torch.rand(length, generator=generator) * torch.tensor(mask)).tolist()
        tokens = torch.randint(50, (length,), generator=generator).tolist()
        samples.append(Sample(tokens, mask, logprobs, float(index % 2), index // 2, index % 2, False))
    return samples, torch.randn(len(LENGTHS), generator=generator).tolist()


def _tables():
    """Policy (a parameter), old and reference log-probabilities ``[sample, position]``."""
    generator = torch.Generator().manual_seed(4)
    policy = -2 * torch.rand(len(LENGTHS), LONGEST, generator=generator) - 0.1
    old = policy + 0.3 * torch.randn(policy.shape, generator=generator)
    reference = policy + 0.3 * torch.randn(policy.shape, generator=generator)
    return policy.requires_grad_(), old, reference


def _step(micro_batches, count=None, weight=1.0):
    """Loss, gradient and reduced metrics of a step. ``count``: trained tokens as a faulty code takes them."""
    policy, old, reference = _tables()
    loss_fn = PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.1)).build()
    num_loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
    total, metrics = 0.0, {}
    for batch in micro_batches:
        place = (batch.sample_index.clamp(min=0), batch.positions.clamp(max=LONGEST - 1))
        output = loss_fn(
            LossInputs(
                policy_logprobs=policy[place],
                old_logprobs=old[place],
                ref_logprobs=reference[place],
                generator_logprobs=batch.generator_logprobs,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                sample_index=batch.sample_index,
                num_loss_tokens=num_loss_tokens if count is None else count(batch),
                num_samples=len(LENGTHS),
                max_tokens=LONGEST,
            )
        )
        (weight * output.loss).backward()
        total += weight * output.loss.item()
        for name, value in output.metrics.items():
            if name.endswith("/max"):
                metrics[name] = max(metrics.get(name, 0.0), value.item())
            else:
                metrics[name] = metrics.get(name, 0.0) + weight * value.item()
    return total, policy.grad, metrics


def _is_equal(a, b):
    return (a - b).norm().item() <= TOLERANCE * b.norm().item() + 1e-8


def _assert_same_step(a, b):
    assert a[0] == pytest.approx(b[0], rel=TOLERANCE, abs=1e-8)
    assert _is_equal(a[1], b[1])
    assert a[2] == pytest.approx(b[2], rel=TOLERANCE, abs=1e-7)


def _packed(*, token_budget=LONGEST, rows_per_micro_batch=2, **options):
    return pack(*_samples(), token_budget=token_budget, rows_per_micro_batch=rows_per_micro_batch, **options)


def _one_sample_a_row(rows_per_micro_batch):
    """Padded: the layout without packing, in the order of the samples."""
    samples, advantages = _samples()
    alone = [
        pack([s], [a], token_budget=LONGEST, rows_per_micro_batch=1, pad_to="token_budget")[0]
        for s, a in zip(samples, advantages, strict=True)
    ]
    batches = []
    for start in range(0, len(alone), rows_per_micro_batch):
        rows = alone[start : start + rows_per_micro_batch]
        index = torch.cat([row.sample_index for row in rows])
        numbers = torch.arange(start, start + len(rows))[:, None]
        batches.append(
            MicroBatch(
                **{
                    name: torch.cat([getattr(row, name) for row in rows])
                    for name in (
                        "input_ids", "positions", "targets", "loss_mask", "generator_logprobs", "advantages"
                    )
                },
                sample_index=torch.where(index >= 0, numbers, -1),
                document_lengths=[lengths for row in rows for lengths in row.document_lengths],
            )
        )  # fmt: skip
    return batches


def test_one_micro_batch_of_eight_rows_equals_eight_of_one():
    _assert_same_step(_step(_one_sample_a_row(1)), _step(_one_sample_a_row(8)))


def test_packed_equals_padded():
    packed = _packed()
    assert max(len(lengths) for batch in packed for lengths in batch.document_lengths) >= 2
    _assert_same_step(_step(packed), _step(_one_sample_a_row(4)))


@pytest.mark.parametrize(
    "layout",
    [
        {"rows_per_micro_batch": 1},
        {"rows_per_micro_batch": 8, "length_multiple": 4, "token_budget": 20},
        {"rows_per_micro_batch": 3, "pad_to": "token_budget", "token_budget": 40},
    ],
)
def test_budget_rows_and_padding_do_not_matter(layout):
    _assert_same_step(_step(_packed(**layout)), _step(_one_sample_a_row(8)))


def test_micro_batches_of_nothing_change_nothing():
    batches = _one_sample_a_row(4)
    padded = [MicroBatch.empty(2, 5), *batches, MicroBatch.empty(1, 9)]
    _assert_same_step(_step(padded), _step(batches))


def test_two_ranks_that_add_up_equal_one():
    batches = _one_sample_a_row(1)
    count = sum(batch.num_loss_tokens for batch in batches)
    first, second = (_step(part, lambda _: count) for part in (batches[:3], batches[3:]))
    whole = _step(batches)
    assert first[0] + second[0] == pytest.approx(whole[0], rel=TOLERANCE)
    assert _is_equal(first[1] + second[1], whole[1])


def test_planted_fault_a_mean_per_micro_batch_is_noticed():
    batches = _one_sample_a_row(1)
    faulty = _step(batches, lambda batch: batch.num_loss_tokens, weight=1 / len(batches))
    right = _step(_one_sample_a_row(8))
    assert not _is_equal(faulty[1], right[1])
    with pytest.raises(AssertionError):
        _assert_same_step(faulty, right)


def test_planted_fault_padding_in_the_count_is_noticed():
    def all_positions(batches):
        return lambda _: sum(batch.input_ids.numel() for batch in batches)

    packed, padded = _packed(), _one_sample_a_row(8)
    assert not _is_equal(_step(packed, all_positions(packed))[1], _step(padded, all_positions(padded))[1])


def test_planted_fault_a_target_in_the_next_document_is_noticed():
    leaking = _packed()
    for batch in leaking:
        # The last token of every document predicts the first of the next one.
        batch.loss_mask[:, :-1] |= (batch.positions[:, 1:] == 0) & (batch.sample_index[:, 1:] >= 0)
    assert not _is_equal(_step(leaking)[1], _step(_one_sample_a_row(8))[1])


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_trained_tokens_of_packed_and_padded_rows_give_one_gradient_of_the_output_weight(chunk_tokens):
    """From hidden states to the gradient of the head, through chunked log-probabilities and the loss."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(len(LENGTHS), LONGEST, 6, generator=generator)
    head = torch.randn(50, 6, generator=generator)

    def head_gradient(batches, chunk):
        weight = head.clone().requires_grad_()
        count = sum(batch.num_loss_tokens for batch in batches)
        for batch in batches:
            mask = batch.loss_mask
            hidden = states[batch.sample_index[mask], batch.positions[mask]]
            values, _ = chunked_logprobs(
                hidden, weight, batch.targets[mask], temperature=0.8, chunk_tokens=chunk
            )
            rows = torch.zeros(mask.shape).masked_scatter(mask, values)
            inputs = LossInputs(
                policy_logprobs=rows,
                generator_logprobs=batch.generator_logprobs,
                advantages=batch.advantages,
                loss_mask=mask,
                sample_index=batch.sample_index,
                num_loss_tokens=count,
                num_samples=len(LENGTHS),
                max_tokens=LONGEST,
            )
            PolicyLoss.Config().build()(inputs).loss.backward()
        return weight.grad

    expected = head_gradient(_one_sample_a_row(8), 1024)
    assert expected.norm() > 1e-3
    assert _is_equal(head_gradient([*_packed(), MicroBatch.empty(1, 4)], chunk_tokens), expected)
