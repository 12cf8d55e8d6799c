"""From rows to prompts, the split and ids: what all file datasets share, over rows in memory."""

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.data.row_dataset import RowDataset
from titan_rl.data.rows import RowConfig, RowReader
from titan_rl.errors import ConfigError
from titan_rl.types import Message


class Rows:
    """Rows in memory, called ``memory:<index>``."""

    def __init__(self, rows, label="memory"):
        self._rows, self._label = rows, label

    def __len__(self):
        return len(self._rows)

    def row(self, index):
        return self._rows[index]

    def where(self, index):
        return f"{self._label}:{index}"

    default_id = where


def read(row, **config):
    return RowReader(RowConfig(**config)).prompt(Rows([row]), 0)


def dataset(rows, split="train", *, held_out=None, **config):
    options = RowConfig(**{"prompt_column": "q", **config})
    return RowDataset(
        RowReader(options),
        options,
        name="rows",
        split=split,
        train=Rows(rows),
        held_out=None if held_out is None else Rows(held_out, "other"),
        held_out_key="held_out_path",
    )


def questions(data):
    return [data[i].messages[0].content for i in range(len(data))]


def test_a_text_column_becomes_one_user_message():
    prompt = read(
        {"q": "2 + 2?", "a": "4", "level": 3, "tags": ["x"], "unused": object()},
        prompt_column="q",
        answer_column="a",
        metadata_columns=["level", "tags"],
    )
    assert prompt.messages == (Message("user", "2 + 2?"),)
    assert (prompt.id, prompt.answer, prompt.metadata) == ("memory:0", "4", {"level": 3, "tags": ["x"]})


def test_a_messages_column_becomes_the_messages():
    rows = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "extra": 1}]
    prompt = read({"m": rows}, messages_column="m")
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert prompt.answer is None


@pytest.mark.parametrize(
    ("value", "answer"), [(42, "42"), (4.5, "4.5"), ("forty-two", "forty-two"), ("", "")]
)
def test_numbers_and_text_are_answers(value, answer):
    assert read({"q": "x", "a": value}, prompt_column="q", answer_column="a").answer == answer


def test_the_pattern_takes_the_answer_out_of_a_gsm8k_solution():
    row = {"q": "x", "a": "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072 "}
    assert read(row, prompt_column="q", answer_column="a", answer_pattern=r"####\s*(.+)").answer == "1,072"


def test_ids_come_from_the_id_column():
    rows = [{"q": "x", "n": 7}, {"q": "y", "n": "seven"}]
    data = dataset(rows, id_column="n")
    assert [data[0].id, data[1].id] == ["7", "seven"]


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ({"question": "x"}, {"prompt_column": "questoin"}, "memory:0: questoin must be present; got "
         "columns question. Did you mean 'question'?"),
        ({"q": 3}, {"prompt_column": "q"}, "memory:0: q must be text; got int 3."),
        ({"q": None}, {"prompt_column": "q"}, "memory:0: q must be text; got NoneType None."),
        ({"q": " \n"}, {"prompt_column": "q"}, "memory:0: q must hold more than white space"),
        ({"q": "\ud800"}, {"prompt_column": "q"}, "memory:0: q must be valid Unicode"),
        ({"q": "x", "a": None}, {"prompt_column": "q", "answer_column": "a"}, "memory:0: a must be text or"),
        ({"q": "x", "a": True}, {"prompt_column": "q", "answer_column": "a"}, "memory:0: a must be text or"),
        ({"q": "x", "a": float("nan")}, {"prompt_column": "q", "answer_column": "a"}, "a must be finite"),
        ({"q": "x", "a": "no marks"},
         {"prompt_column": "q", "answer_column": "a", "answer_pattern": "## (.)"},
         "memory:0: a must match data.source.answer_pattern '## (.)'; got no marks."),
        ({"q": "x", "i": 1.5}, {"prompt_column": "q", "id_column": "i"}, "memory:0: i must be text (not"),
        ({"q": "x", "i": ""}, {"prompt_column": "q", "id_column": "i"}, "memory:0: i must be text (not"),
        ({"q": "x", "m": b"\0"}, {"prompt_column": "q", "metadata_columns": ["m"]}, "m must be a JSON value"),
        ({"q": "x", "m": [float("inf")]}, {"prompt_column": "q", "metadata_columns": ["m"]}, "a JSON value"),
        ({"m": "hi"}, {"messages_column": "m"}, "memory:0: m must be a list of at least one message"),
        ({"m": []}, {"messages_column": "m"}, "memory:0: m must be a list of at least one message"),
        ({"m": ["hi"]}, {"messages_column": "m"}, "memory:0: m[0] must be an object with role and content"),
        ({"m": [{"role": "user", "text": "x"}]}, {"messages_column": "m"}, "m[0]: content must be present"),
        ({"m": [{"role": "user", "content": 3}]}, {"messages_column": "m"}, "m[0].content must be text; got"),
        ({"m": [{"role": None, "content": "x"}]}, {"messages_column": "m"}, "m[0].role must be text; got"),
        ({"m": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         {"messages_column": "m"}, "memory:0: m must end before the reply"),
        ({}, {}, "set exactly one of prompt_column, messages_column and conversation_column; got 'neither'"),
        ({}, {"prompt_column": "q", "conversation_column": "m"}, "got two of them"),
        ({}, {"conversation_column": "m", "answer_column": "a"}, "answer_column must be left out with"),
        ({"m": [{"role": "user", "content": "x"}]},
         {"conversation_column": "m"}, "memory:0: m must end with an assistant message"),
        ({"m": [{"role": "assistant", "content": "x"}]},
         {"conversation_column": "m"}, "memory:0: m must hold a message before the reply"),
        ({}, {"prompt_column": "q", "messages_column": "m"}, "exactly one of prompt_column"),
        ({}, {"prompt_column": "q", "answer_pattern": "(.)"}, "must stand next to data.source.answer_column"),
        ({}, {"prompt_column": "q", "answer_column": "a", "answer_pattern": "(."}, "be a regular expression"),
        ({}, {"prompt_column": "q", "answer_column": "a", "answer_pattern": "##"}, "have a group"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_said_with_its_place_and_field(row, config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(row, **config)


def test_the_last_message_of_a_conversation_is_the_answer():
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    prompt = read(
        {"m": [{"role": role, "content": text} for role, text in turns], "level": 2},
        conversation_column="m",
        metadata_columns=["level"],
    )
    assert prompt.messages == tuple(Message(role, text) for role, text in turns[:4])
    assert (prompt.answer, prompt.metadata) == ("d", {"level": 2})


@settings(max_examples=50, deadline=None)
@given(
    words=st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=60),
    fraction=st.floats(0.05, 0.95),
    split_seed=st.integers(0, 3),
)
def test_a_fraction_splits_every_row_once_and_duplicates_never_straddle(words, fraction, split_seed):
    parts = {"train": [], "held_out": []}
    for split, part in parts.items():
        # A split may come out empty, which is an error of its own.
        with contextlib.suppress(ConfigError):
            data = dataset(
                [{"q": word} for word in words], split, held_out_fraction=fraction, split_seed=split_seed
            )
            part.extend((data[i].id, data[i].messages[0].content) for i in range(len(data)))
    assert sorted(parts["train"] + parts["held_out"]) == sorted(
        (f"memory:{n}", word) for n, word in enumerate(words)
    )
    assert not {word for _, word in parts["train"]} & {word for _, word in parts["held_out"]}


def test_the_split_of_a_prompt_does_not_depend_on_the_other_rows():
    rows = [{"q": str(n)} for n in range(100)]
    few = questions(dataset(rows, "held_out", held_out_fraction=0.3))
    many = questions(dataset([{"q": "new"}, *rows[::-1], {"q": "newer"}], "held_out", held_out_fraction=0.3))
    assert 15 < len(few) < 45
    assert set(few) == {q for q in many if not q.startswith("new")}


def test_separate_held_out_rows_are_the_held_out_split():
    rows, others = [{"q": "a"}, {"q": "b"}], [{"q": "c"}]
    assert questions(dataset(rows, "train", held_out=others)) == ["a", "b"]
    assert questions(dataset(rows, "held_out", held_out=others)) == ["c"]


def test_the_held_out_split_is_empty_when_nothing_is_held_out():
    assert len(dataset([{"q": "a"}], "held_out")) == 0
    assert questions(dataset([{"q": "a"}], "train")) == ["a"]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_overlap_of_separate_rows_says_how_many_and_which_is_the_first(split):
    rows = [{"q": "a"}, {"q": "b"}, {"q": "c"}, {"q": "b"}]
    others = [{"q": "x"}, {"q": " c"}, {"q": "b"}, {"q": "c"}]
    message = (
        "data.source.held_out_path must share no prompt with the train split; got 2 shared prompts, "
        "the first at other:1 and memory:2: "
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataset(rows, split, held_out=others)


def test_a_wrong_row_is_found_in_whichever_split_it_falls():
    rows = [{"q": str(n)} for n in range(20)] + [{"q": 5}]
    for split in ("train", "held_out"):
        with pytest.raises(ConfigError, match="memory:20: q must be text"):
            dataset(rows, split, held_out_fraction=0.5)


@pytest.mark.parametrize(
    ("split", "config", "message"),
    [
        (
            "train",
            {"held_out": [{"q": "z"}], "held_out_fraction": 0.1},
            "must be absent when data.source.held_out_path",
        ),
        ("train", {"held_out_fraction": 1.0}, "data.source.held_out_fraction must be between 0 and 1"),
        (
            "held_out",
            {"held_out_fraction": 1e-9},
            "must leave at least one prompt in the held_out split; got 0",
        ),
        ("train", {"id_column": "i"}, "memory:1: i must differ from that of memory:0; got 'same'"),
    ],
)
def test_a_split_without_sense_is_refused(split, config, message):
    rows = [{"q": "a", "i": "same"}, {"q": "b", "i": "same"}]
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataset(rows, split, **config)


def test_the_fingerprint_follows_the_content_and_not_unused_columns():
    base = dataset([{"q": "a", "u": 1}, {"q": "b", "u": 2}]).fingerprint
    assert base == dataset([{"q": "a", "u": 3}, {"q": "b"}]).fingerprint
    assert base != dataset([{"q": "a"}, {"q": "B"}]).fingerprint
    assert base != dataset([{"q": "b"}, {"q": "a"}]).fingerprint
