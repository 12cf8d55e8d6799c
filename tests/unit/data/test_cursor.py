"""The n-th prompt depends on the seed and the cursor alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import FilteredDataset
from titan_rl.errors import ConfigError
from titan_rl.types import Message, Prompt


class Numbers:
    """The prompts 0 to length - 1."""

    name = "numbers"
    fingerprint = "0" * 64

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Prompt:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return Prompt(id=str(index), messages=(Message("user", str(index)),))


def ids(prompts):
    return [prompt.id for prompt in prompts]


@settings(deadline=None)
@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 200),
    chunks=st.lists(st.integers(0, 30), max_size=8),
)
def test_how_the_draw_is_cut_into_chunks_changes_nothing(length, seed, start, chunks):
    whole = ids(PromptStream(Numbers(length), seed).take(start, sum(chunks)))
    stream, cursor, pieces = PromptStream(Numbers(length), seed), start, []
    for count in chunks:
        pieces += ids(stream.take(cursor, count))
        cursor += count
    assert pieces == whole
    # Backwards and from scratch at every position: no hidden state decides.
    for offset in reversed(range(len(whole))):
        assert stream.at(start + offset)[0].id == whole[offset]


@settings(deadline=None)
@given(length=st.integers(1, 60), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(length, seed, epoch):
    stream = PromptStream(Numbers(length), seed)
    drawn = [stream.at(cursor) for cursor in range(epoch * length, (epoch + 1) * length)]
    assert Counter(p.id for p, _ in drawn) == Counter(str(n) for n in range(length))
    assert {e for _, e in drawn} == {epoch}


def test_epochs_and_seeds_have_different_orders():
    stream = PromptStream(Numbers(50), seed=1)
    first, second = ids(stream.take(0, 50)), ids(stream.take(50, 50))
    assert first != second
    assert first != ids(PromptStream(Numbers(50), seed=2).take(0, 50))
    assert first != [str(n) for n in range(50)]


def test_the_order_is_this_one_forever():
    drawn = "".join(ids(PromptStream(Numbers(8), seed=17).take(0, 16)))
    assert drawn == "1653420720354617"


def test_all_orders_of_three_prompts_are_about_equally_frequent():
    stream = PromptStream(Numbers(3), seed=0)
    orders = Counter(tuple(ids(stream.take(3 * epoch, 3))) for epoch in range(3000))
    assert len(orders) == 6
    assert all(410 < count < 590 for count in orders.values())  # 500 expected, standard deviation 20


def test_without_shuffling_the_dataset_repeats_in_its_own_order():
    stream = PromptStream(Numbers(3), seed=9, shuffle=False)
    assert ids(stream.take(1, 6)) == ["1", "2", "0", "1", "2", "0"]
    assert stream.at(5) == (Numbers(3)[2], 1)


def test_the_rule_holds_over_a_filtered_dataset():
    view = FilteredDataset(Numbers(10), [1, 4, 9])
    assert sorted(ids(PromptStream(view, seed=3).take(3, 3))) == ["1", "4", "9"]


def test_impossible_arguments_are_refused():
    stream = PromptStream(Numbers(3), seed=0)
    with pytest.raises(ValueError, match="cursor must be at least 0; got -1"):
        stream.at(-1)
    with pytest.raises(ValueError, match="count must be at least 0; got -2"):
        stream.take(0, -2)
    with pytest.raises(ConfigError, match="numbers must hold at least one prompt"):
        PromptStream(Numbers(0), seed=0)
