"""Preferences from arithmetic and from files: pairs, labels, margins, the split, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.choice import build
from titan_rl.data.arithmetic_preferences import ArithmeticPreferences, wrong_answer
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import content_key
from titan_rl.data.preference_rows import HuggingFacePreferences, JsonlPreferences, ParquetPreferences
from titan_rl.data.preferences import check_preferences, encode, mismatched, preference_of
from titan_rl.errors import ConfigError
from titan_rl.types import Message


class WordEncoder:
    """One token a word, 0 for the end of sequence."""

    def encode_with_answer(self, prompt):
        text = " ".join(message.content for message in prompt.messages)
        before, after = ([len(word) for word in part.split()] for part in (text, prompt.answer))
        return before + after + [0], [False] * len(before) + [True] * (len(after) + 1)


def jsonl(tmp_path: Path, *rows, split="train", **config):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlPreferences(JsonlPreferences.Config(path=str(path), **config), split)


def pair(prompt="q", chosen="good one", rejected="bad", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


# --------------------------------------------------------------------------------------------- arithmetic


def test_a_wrong_sum_is_wrong_has_as_many_digits_and_is_always_the_same():
    config = ArithmeticPreferences.Config(minimum=1, maximum=40, num_held_out=200)
    one, two = (ArithmeticPreferences(config, "train") for _ in range(2))
    assert one.fingerprint == two.fingerprint
    reverses = 0
    for index in range(len(one)):
        preference = preference_of(one[index])
        _, _, a, b = preference.id.split("/")
        assert preference.chosen == str(int(a) + int(b))
        assert preference.rejected != preference.chosen
        assert len(preference.rejected) == len(preference.chosen)
        reverses += preference.rejected == preference.chosen[::-1]
    assert 0.3 < reverses / len(one) < 0.7


def test_held_out_sums_are_never_trained_on():
    config = ArithmeticPreferences.Config(minimum=1, maximum=12, num_held_out=40)
    train, held_out = (ArithmeticPreferences(config, split) for split in ("train", "held_out"))
    keys = [{content_key(s[i].messages) for i in range(len(s))} for s in (train, held_out)]
    assert [len(k) for k in keys] == [104, 40]
    assert not keys[0] & keys[1]


@given(st.integers(-999, 99999), st.sampled_from(["digit", "reversed", "mixed"]), st.integers(0, 2**62))
def test_a_wrong_answer_is_another_number_of_equal_length(number, how, seed):
    wrong = wrong_answer(str(number), how, seed=seed)
    assert wrong != str(number)
    assert len(wrong) == len(str(number))
    assert wrong.removeprefix("-").isdigit()


def test_the_nth_preference_depends_on_seed_and_cursor_alone():
    data = ArithmeticPreferences(ArithmeticPreferences.Config(maximum=9, num_held_out=0), "train")
    whole = [preference_of(p).id for p in PromptStream(data, 3).take(0, 200)]
    parts = [p for start in range(0, 200, 8) for p in PromptStream(data, 3).take(start, 8)]
    assert [preference_of(p).id for p in parts] == whole
    assert sorted(whole[:64]) == sorted(preference_of(data[i]).id for i in range(64))
    assert [p.id for p in PromptStream(data, 4).take(0, 200)] != whole


# -------------------------------------------------------------------------------------------------- files


def test_pairs_of_text_with_a_margin(tmp_path):
    data = jsonl(tmp_path, pair(score=0.5), pair("r", score=2), prompt_column="prompt", margin_column="score")
    first, second = (preference_of(data[i]) for i in range(2))
    assert (first.messages, first.chosen, first.rejected) == ((Message("user", "q"),), "good one", "bad")
    assert [first.margin, second.margin] == [0.5, 2.0]
    assert first.is_pair


def test_whole_conversations_give_the_prompt_and_both_replies(tmp_path):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    more = {"role": "user", "content": "and?"}
    row = {
        side: [*talk, more, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "yes"), ("rejected", "no"))
    }
    preference = preference_of(jsonl(tmp_path, row)[0])
    assert [m.content for m in preference.messages] == ["q", "a", "and?"]
    assert [preference.chosen, preference.rejected] == ["yes", "no"]
    row["rejected"][2] = {"role": "user", "content": "or?"}
    with pytest.raises(ConfigError, match="rejected must continue the same conversation as chosen"):
        jsonl(tmp_path, row)


def test_replies_as_messages_beside_a_column_with_the_prompt(tmp_path):
    row = pair(chosen=[{"role": "assistant", "content": "yes"}])
    assert preference_of(jsonl(tmp_path, row, prompt_column="prompt")[0]).chosen == "yes"
    whole = pair(chosen=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}])
    with pytest.raises(ConfigError, match=r"hold the reply alone.*Delete prompt_column"):
        jsonl(tmp_path, whole, prompt_column="prompt")


def test_completions_that_are_labelled_one_by_one(tmp_path):
    rows = [{"prompt": "q", "completion": text, "label": label} for text, label in (("a", True), ("b", 0))]
    data = jsonl(
        tmp_path, *rows, prompt_column="prompt", completion_column="completion", label_column="label"
    )
    good, bad = (preference_of(data[i]) for i in range(2))
    assert (good.chosen, good.rejected, bad.chosen, bad.rejected) == ("a", None, None, "b")
    assert not good.is_pair
    assert [side for side, _ in bad.sides()] == ["rejected"]


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        (pair(rejected="good one "), {}, "0.jsonl:1: rejected must differ from the chosen completion"),
        (pair(chosen="  "), {}, "0.jsonl:1: chosen must hold more than white space"),
        (pair(chosen=3), {}, "chosen must be text; got int 3"),
        (pair(chosen=[{"role": "user", "content": "x"}]), {}, "must end with an assistant message"),
        ({"prompt": "q", "choosen": "a", "rejected": "b"}, {}, "chosen must be present.*'choosen'"),
        ({"question": "q", "answer": "a"}, {"prompt_column": "question"}, "chosen must be present"),
        (pair(), {"margin_column": "prompt"}, "prompt must be a finite number"),
        (pair(), {"prompt_column": None}, "hold the whole conversation, or prompt_column be set"),
        (pair(), {"messages_column": "x"}, "prompt_column must be absent when"),
        (pair(), {"completion_column": "chosen"}, "label_column must be set"),
        (
            pair(label=2),
            {"completion_column": "chosen", "label_column": "label"},
            "label must be true or false, or 1 or 0; got int 2",
        ),
    ],
)
def test_rows_that_hold_no_preference_are_refused_by_name(tmp_path, row, config, message):
    with pytest.raises(ConfigError, match=message):
        jsonl(tmp_path, row, **({"prompt_column": "prompt"} | config))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="hold at least one row; got an empty file"):
        jsonl(tmp_path)


def test_pairs_of_one_prompt_stay_on_one_side_of_the_split(tmp_path):
    rows = [pair(f"q{i // 3}", rejected=f"bad {i}") for i in range(60)]
    config = {"prompt_column": "prompt", "held_out_fraction": 0.3}
    train, held_out = (jsonl(tmp_path, *rows, split=split, **config) for split in ("train", "held_out"))
    prompts = [{s[i].messages for i in range(len(s))} for s in (train, held_out)]
    assert len(train) + len(held_out) == 60
    assert len(held_out) % 3 == 0
    assert not prompts[0] & prompts[1]


def test_parquet_and_saved_datasets_hold_the_same_preferences_as_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    rows = [pair("q", score=1.0), pair("r", chosen="else", score=0.0)]
    expected = jsonl(tmp_path, *rows, prompt_column="prompt", margin_column="score")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    columns = {"prompt_column": "prompt", "margin_column": "score"}
    for config in (
        ParquetPreferences.Config(path=str(tmp_path / "p.parquet"), **columns),
        HuggingFacePreferences.Config(path=str(tmp_path / "saved"), **columns),
    ):
        data = build(config, split="train")
        for index in range(2):
            ours, theirs = preference_of(data[index]), preference_of(expected[index])
            assert (ours.messages, ours.chosen, ours.rejected, ours.margin) == (
                theirs.messages, theirs.chosen, theirs.rejected, theirs.margin
            )  # fmt: skip


# ------------------------------------------------------------------------------- checks before the first draw


def check(data, *, row_tokens=9, rows=2, too_long="error", pairs_for=None):
    return check_preferences(
        data, WordEncoder(), row_tokens=row_tokens, rows=rows, too_long=too_long, pairs_for=pairs_for
    )


def test_both_completions_are_encoded_behind_the_prompt(tmp_path):
    encoded = encode(preference_of(jsonl(tmp_path, pair("a bb"), prompt_column="prompt")[0]), WordEncoder())
    assert encoded.documents == (
        ("chosen", [1, 2, 4, 3, 0], [False, False, True, True, True]),
        ("rejected", [1, 2, 3, 0], [False, False, True, True]),
    )
    assert encoded.lengths == [5, 4]


def test_pairs_that_differ_in_text_but_not_in_tokens_are_refused(tmp_path):
    data = jsonl(tmp_path, pair(chosen="a b", rejected="a  b"), prompt_column="prompt")
    with pytest.raises(ConfigError, match=r"0.jsonl:1: rejected must differ from the chosen completion"):
        check(data)


def test_a_pair_must_fit_into_one_micro_batch(tmp_path):
    data = jsonl(tmp_path, pair("a b", chosen="c d"), pair(), prompt_column="prompt")
    assert check(data, row_tokens=9, rows=1)[1].num_too_long == 0
    with pytest.raises(ConfigError, match=r"both completions of a pair.*1 of 2 do not fit.*5 and 4 tokens"):
        check(data, row_tokens=8, rows=1)
    assert check(data, row_tokens=5, rows=2)[1].num_too_long == 0
    kept, report = check(data, row_tokens=8, rows=1, too_long="skip")
    assert [len(kept), report.num_too_long] == [1, 1]
    with pytest.raises(ConfigError, match="do not fit"):
        check(data, row_tokens=2, too_long="skip")


def test_single_completions_are_refused_where_pairs_are_compared(tmp_path):
    data = jsonl(
        tmp_path,
        {"prompt": "q", "completion": "a", "label": True},
        prompt_column="prompt",
        completion_column="completion",
        label_column="label",
    )
    assert check(data)[0] is data
    with pytest.raises(ConfigError, match=r"hold pairs, which loss.type = 'x' compares; got .* without a"):
        check(data, pairs_for="loss.type = 'x'")


def test_a_source_of_prompts_alone_is_refused():
    with pytest.raises(ConfigError, match="come with a chosen or a rejected completion"):
        preference_of(ArithmeticPreferences(ArithmeticPreferences.Config(), "train")._problems[0])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_a_completion_is_mismatched_with_the_next_other_prompt(numbers):
    class Data:
        name = fingerprint = "data"

        def __len__(self):
            return len(numbers)

        def __getitem__(self, index):
            return type("P", (), {"messages": (Message("user", str(numbers[index])),)})

    if len(set(numbers)) == 1:
        with pytest.raises(ConfigError, match="at least two different prompts"):
            mismatched(Data())
        return
    for index, other in enumerate(mismatched(Data())):
        expected = next(
            j % len(numbers)
            for j in range(index + 1, index + len(numbers))
            if numbers[j % len(numbers)] != numbers[index]
        )
        assert other == expected
