"""Packing: nothing lost, nothing doubled, everything aligned, always the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.errors import ConfigError
from titan_rl.types import Sample


def make_sample(length, *, prompt=1, first_token=10, group_index=0, sample_index=0):
    """Tokens first_token, first_token + 1, ...; log-probabilities -token / 100 where trained."""
    token_ids = list(range(first_token, first_token + length))
    loss_mask = [index >= prompt for index in range(length)]
    logprobs = [-token / 100 if mask else 0.0 for token, mask in zip(token_ids, loss_mask, strict=True)]
    return Sample(token_ids, loss_mask, logprobs, 0.0, group_index, sample_index, False)


def test_two_samples_in_one_row_by_hand():
    samples = [make_sample(2, first_token=50), make_sample(3, prompt=2, first_token=70)]
    (batch,) = pack(samples, [-1.0, 2.0], token_budget=8, rows_per_micro_batch=4, length_multiple=4)
    assert batch.input_ids.tolist() == [[70, 71, 72, 50, 51, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.targets.tolist() == [[0, 72, 0, 51, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, False, True, False, False, False, False]]
    assert batch.generator_logprobs.tolist() == [pytest.approx([0, -0.72, 0, -0.51, 0, 0, 0, 0])]
    assert batch.advantages.tolist() == [[0, 2, 0, -1, 0, 0, 0, 0]]
    assert batch.sample_index.tolist() == [[1, 1, 1, 0, 0, -1, -1, -1]]
    assert batch.document_lengths == [[3, 2]]
    assert (batch.num_loss_tokens, batch.num_tokens) == (2, 5)
    assert batch.num_attended == 3**2 + 2**2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=20),
    rows_per_micro_batch=st.integers(1, 4),
    length_multiple=st.sampled_from([1, 2, 4]),
    pad_to=st.sampled_from(["longest", "token_budget"]),
)
def test_every_sample_comes_back_whole_exactly_once(lengths, rows_per_micro_batch, length_multiple, pad_to):
    samples = [make_sample(length, first_token=100 * i) for i, length in enumerate(lengths)]
    advantages = [i + 0.5 for i in range(len(samples))]
    batches = pack(
        samples,
        advantages,
        token_budget=12,
        rows_per_micro_batch=rows_per_micro_batch,
        length_multiple=length_multiple,
        pad_to=pad_to,
    )
    found = []
    for batch in batches:
        rows, length = batch.input_ids.shape
        assert length % length_multiple == 0
        assert length <= 12
        assert rows <= rows_per_micro_batch
        if pad_to == "token_budget":
            assert (rows, length) == (rows_per_micro_batch, 12)
        for row in range(rows):
            start = 0
            for document_length in batch.document_lengths[row]:
                window = slice(start, start + document_length)
                index = int(batch.sample_index[row, start])
                found.append(index)
                sample = samples[index]
                assert batch.sample_index[row, window].unique().tolist() == [index]
                assert batch.input_ids[row, window].tolist() == sample.token_ids
                assert batch.positions[row, window].tolist() == list(range(document_length))
                mask = batch.loss_mask[row, window]
                assert mask.tolist() == [*sample.loss_mask[1:], False]
                assert batch.targets[row, window][mask].tolist() == sample.token_ids[1:]
                expected = torch.tensor(sample.generator_logprobs[1:])
                assert torch.equal(batch.generator_logprobs[row, window][mask], expected)
                assert (batch.advantages[row, window][mask] == advantages[index]).all()
                start += document_length
            assert (batch.sample_index[row, start:] == -1).all()
            assert not batch.loss_mask[row, start:].any()
            assert batch.positions[row, start:].tolist() == list(range(length - start))
        outside = ~batch.loss_mask
        for values in (batch.targets, batch.generator_logprobs, batch.advantages):
            assert (values[outside] == 0).all()
    assert sorted(found) == list(range(len(samples)))


def siblings(*completions, prompt=4, group_index=0, first_token=10):
    """Samples of one group: the same prompt, completions of these lengths and of tokens of their own."""
    samples = []
    for number, length in enumerate(completions):
        sample = make_sample(prompt + length, prompt=prompt, first_token=first_token)
        own = range(100 * (number + 1), 100 * (number + 1) + length)
        sample.token_ids[prompt:] = own
        sample.generator_logprobs[prompt:] = [-token / 100 for token in own]
        sample.group_index, sample.sample_index = group_index, number
        samples.append(sample)
    return samples


def test_two_siblings_that_share_their_prompt_by_hand():
    samples = siblings(1, 2, prompt=3)
    (batch,) = pack(samples, [-1.0, 2.0], token_budget=9, rows_per_micro_batch=1, share_prompts=True)
    # The longer one whole; then of the other the prompt's last token, which predicts its completion.
    assert batch.input_ids.tolist() == [[10, 11, 12, 200, 201, 12, 100]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert batch.targets.tolist() == [[0, 0, 200, 201, 0, 100, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, True, False]]
    assert batch.generator_logprobs.tolist() == [pytest.approx([0, 0, -2.0, -2.01, 0, -1.0, 0])]
    assert batch.advantages.tolist() == [[0, 0, 2, 2, 0, -1, 0]]
    assert batch.sample_index.tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert batch.document_lengths == [[5, 2]]
    assert batch.num_tokens == 7
    # The longer one's 5 tokens attend to what is before them, then the sibling's two to 3 and 4.
    assert batch.num_attended == 5**2 + (2 * 2 + 1) + (2 * 3 + 1) == 5**2 + 4**2 - 2**2


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5)), max_size=5
    ),
    budget=st.integers(12, 30),
)
def test_with_shared_prompts_every_sample_can_be_put_together_again(groups, budget):
    samples = [
        sample
        for index, (prompt, completions) in enumerate(groups)
        for sample in siblings(*completions, prompt=prompt, group_index=index, first_token=10 * index)
    ]
    options = {"token_budget": budget, "rows_per_micro_batch": 2}
    advantages = [i + 0.5 for i in range(len(samples))]
    shared = pack(samples, advantages, share_prompts=True, **options)
    alone = pack(samples, advantages, **options)
    found = []
    for batch in shared:
        assert batch.input_ids.shape[1] <= budget
        for row, lengths in enumerate(batch.document_lengths):
            start, document = 0, []
            for length in lengths:
                window = slice(start, start + length)
                first = int(batch.positions[row, start])
                tokens = batch.input_ids[row, window].tolist()
                document = document if first else tokens
                (index,) = batch.sample_index[row, window].unique().tolist()
                assert [*document[:first], *tokens] == samples[index].token_ids
                assert batch.positions[row, window].tolist() == list(range(first, first + length))
                mask = batch.loss_mask[row, window]
                assert mask.tolist() == [*samples[index].loss_mask[first + 1 :], False]
                assert mask.sum() == sum(samples[index].loss_mask)
                assert (
                    batch.targets[row, window][mask].tolist()
                    == samples[index].token_ids[first + 1 :][-int(mask.sum()) :]
                )
                assert (batch.advantages[row, window][mask] == advantages[index]).all()
                found.append(index)
                start += length
    assert sorted(found) == list(range(len(samples)))
    count = {kind: sum(len(b.input_ids) for b in b_s) for kind, b_s in (("shared", shared), ("alone", alone))}
    tokens = {kind: sum(b.num_tokens for b in b_s) for kind, b_s in (("shared", shared), ("alone", alone))}
    assert count["shared"] <= count["alone"]
    assert tokens["shared"] <= tokens["alone"]


def test_a_group_of_eight_with_a_long_prompt_computes_it_once():
    samples = siblings(*[8] * 8, prompt=64)
    (batch,) = pack(samples, [0.0] * 8, token_budget=256, rows_per_micro_batch=1, share_prompts=True)
    assert batch.num_tokens == 64 + 8 + 7 * 9
    assert (batch.positions == 0).sum() == 1


def test_a_group_that_does_not_fit_into_one_row_pays_for_its_prompt_in_each():
    samples = siblings(4, 4, 4, 4, prompt=8)
    batches = pack(samples, [0.0] * 4, token_budget=18, rows_per_micro_batch=1, share_prompts=True)
    assert [batch.document_lengths for batch in batches] == [[[12, 5]], [[12, 5]]]


def test_only_samples_of_one_group_and_one_prompt_share():
    other_group = siblings(2, prompt=4, group_index=1)
    other_prompt = siblings(2, prompt=4, first_token=50)
    untrained = siblings(2)
    untrained[0].loss_mask = [False] * 6
    samples = [*siblings(2), *other_group, *other_prompt, *untrained]
    (batch,) = pack(samples, [0.0] * 4, token_budget=64, rows_per_micro_batch=1, share_prompts=True)
    assert batch.document_lengths == [[6, 6, 6, 6]]


def test_a_prompt_of_one_token_is_not_shared():
    (batch,) = pack(
        siblings(2, 3, prompt=1), [0.0] * 2, token_budget=16, rows_per_micro_batch=1, share_prompts=True
    )
    assert batch.document_lengths == [[4, 3]]


def test_prompts_are_not_shared_where_that_takes_more_rows():
    """Three pairs of 6 + 5 tokens need three rows of 18; apart, three samples of 6 fit into each of two."""
    samples = [s for g in range(3) for s in siblings(4, 4, prompt=2, group_index=g, first_token=10 * g)]
    options = {"token_budget": 18, "rows_per_micro_batch": 1}
    shared = pack(samples, [0.0] * 6, share_prompts=True, **options)
    assert [batch.document_lengths for batch in shared] == [[[6, 6, 6]]] * 2


def test_rows_are_filled_and_a_row_s_samples_come_longest_first():
    lengths = [3, 7, 3, 5, 2]
    samples = [make_sample(length) for length in lengths]
    batches = pack(samples, [0.0] * 5, token_budget=10, rows_per_micro_batch=1)
    rows = [[int(i) for i in batch.sample_index.unique() if i >= 0] for batch in batches]
    assert [batch.document_lengths for batch in batches] == [[[7, 3]], [[5, 3, 2]]]
    assert rows == [[1, 2], [0, 3, 4]]


def test_rows_are_dealt_to_micro_batches_as_they_come():
    samples = [make_sample(6), make_sample(5), make_sample(4)]
    batches = pack(samples, [0.0] * 3, token_budget=6, rows_per_micro_batch=2)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(2, 6), (1, 4)]


def test_no_samples_give_no_micro_batches():
    assert pack([], [], token_budget=8, rows_per_micro_batch=2) == []


def test_a_nan_advantage_stays_inside_its_trained_tokens():
    (batch,) = pack([make_sample(4, prompt=2)], [float("nan")], token_budget=8, rows_per_micro_batch=1)
    assert torch.equal(batch.advantages.isnan(), batch.loss_mask)


def test_an_empty_micro_batch_is_one_padding_document_a_row():
    batch = MicroBatch.empty(2, 5)
    assert batch.positions.tolist() == [list(range(5))] * 2
    assert batch.sample_index.unique().tolist() == [-1]
    assert batch.num_loss_tokens == batch.num_tokens == 0
    assert batch.document_lengths == [[], []]
    assert batch.num_attended == 0


def test_moving_a_micro_batch_moves_every_tensor():
    moved = MicroBatch.empty(1, 3).to("meta")
    for name in (
        "input_ids",
        "positions",
        "targets",
        "loss_mask",
        "generator_logprobs",
        "advantages",
        "sample_index",
    ):
        assert getattr(moved, name).device.type == "meta", name
    assert moved.document_lengths == [[]]


def test_a_sample_longer_than_the_budget_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError) as caught:
        pack([make_sample(9)], [0.0], token_budget=8, rows_per_micro_batch=1)
    assert str(caught.value) == (
        "training.seq_len must hold the longest sample, 9 tokens with its prompt; got 8. "
        "Set training.seq_len to at least 9, or lower sampling.max_tokens."
    )


def test_a_budget_that_the_layout_does_not_divide_is_an_error():
    with pytest.raises(ConfigError, match=r"be a positive multiple of 4.*got 10\. Round it up to 12"):
        pack([], [], token_budget=10, rows_per_micro_batch=1, length_multiple=4)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample([1, 2], [False], [0.0, 0.0], 0.0, 0, 0, False), "must have token_ids, loss_mask"),
        (Sample([1, 2], [False, True], [0.0], 0.0, 0, 0, False), "must have token_ids, loss_mask"),
        (Sample([], [], [], 0.0, 0, 0, False), "at least 1; got 0, 0 and 0"),
        (Sample([1, 2], [True, True], [0.0, 0.0], 0.0, 0, 0, False), "must be False at index 0"),
    ],
)
def test_malformed_samples_are_refused_by_index(sample, message):
    with pytest.raises(ValueError, match=r"samples\[0\].*" + message):
        pack([sample], [0.0], token_budget=8, rows_per_micro_batch=1)


def test_advantages_that_do_not_match_the_samples_are_refused():
    with pytest.raises(ValueError, match=r"advantages must be one per sample \(1\); got 0"):
        pack([make_sample(3)], [], token_budget=8, rows_per_micro_batch=1)
