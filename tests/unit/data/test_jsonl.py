"""JSON Lines files, good and bad."""

import json
import re

import pytest

from titan_rl.data.jsonl import Jsonl
from titan_rl.errors import ConfigError


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path, split="train", **config):
    return Jsonl(Jsonl.Config(path=str(path), **{"prompt_column": "q", **config}), split)


def test_lines_become_prompts_named_by_file_and_line(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"q": "Größe?", "a": 1}, {"q": "zwei", "a": "2"}])
    data = load(path, answer_column="a")
    assert [(p.id, p.messages[0].content, p.answer) for p in (data[0], data[1])] == [
        ("train.jsonl:1", "Größe?", "1"),
        ("train.jsonl:2", "zwei", "2"),
    ]


def test_empty_lines_a_byte_order_mark_and_a_missing_last_line_feed_are_harmless(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a"}\r\n\n  \n{"q": "b"}')
    data = load(path)
    assert [(data[i].id, data[i].messages[0].content) for i in range(len(data))] == [
        ("train.jsonl:1", "a"),
        ("train.jsonl:4", "b"),
    ]


def test_a_pattern_joins_files_in_alphabetical_order(tmp_path):
    write(tmp_path / "b.jsonl", [{"q": "3"}])
    write(tmp_path / "a.jsonl", [{"q": "1"}, {"q": "2"}])
    data = load(tmp_path / "*.jsonl")
    assert [data[i].id for i in range(3)] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert [data[i].messages[0].content for i in (2, 0, 1)] == ["3", "1", "2"]


def test_files_of_the_same_name_get_different_ids(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "d.jsonl", [{"q": name}])
    data = load(tmp_path / "*" / "d.jsonl")
    assert [data[0].id, data[1].id] == ["x/d.jsonl:1", "y/d.jsonl:1"]


def test_the_held_out_file_is_the_held_out_split(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"q": "a"}])
    test = write(tmp_path / "test.jsonl", [{"q": "b"}])
    data = load(train, "held_out", held_out_path=test)
    assert [(data[i].id, data[i].messages[0].content) for i in range(len(data))] == [("test.jsonl:1", "b")]


def test_overlap_with_the_held_out_file_names_both_lines(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"q": "a"}, {"q": "b"}])
    test = write(tmp_path / "test.jsonl", [{"q": "c"}, {"q": "b"}])
    message = f"1 shared prompts, the first at {test}:2 and {train}:2: 'b'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(train, held_out_path=test)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path} must hold at least one row; got an empty file."),
        (b"\n \n", "{path} must hold at least one row"),
        (b'{"q": "a"}\n{"q": "b"\n', "{path}:2 must be one JSON object (Expecting ',' delimiter"),
        (b'{"q": "a"}\n{"q": "tru', "{path}:2 must be one JSON object (Unterminated string"),
        (b'{"q": "a"} {"q": "b"}\n', "{path}:1 must be one JSON object (Extra data"),
        (b'["a"]\n', "{path}:1 must be one JSON object; got '[\"a\"]'."),
        (b'{"q": "a", "m": NaN}\n', "{path}:1 must be one JSON object (NaN is not JSON)"),
        (b'{"q": "a"}\n{"q": "\xe9"}\n', "{path}:2 must be UTF-8; got 'utf-8' codec can't decode byte 0xe9"),
        ('{"q": "a"}\n'.encode("utf-16"), "{path}:1 must be UTF-8"),
        (b"[" * 100_000 + b"\n", "{path}:1 must be one JSON object ("),
        (b'{"q": "a"}\n{"Q": "b"}\n', "{path}:2: q must be present; got columns Q."),
        (b'{"q": "a"}\n{"q": ["b"]}\n', "{path}:2: q must be text; got list ['b']."),
        (b'{"q": "\\ud800"}\n', "{path}:1: q must be valid Unicode"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message.format(path=path))):
        load(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.source\.path must name an existing file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"data\.source\.path must name files; got the directory"):
        load(tmp_path)
    train = write(tmp_path / "train.jsonl", [{"q": "a"}])
    with pytest.raises(ConfigError, match=r"data\.source\.held_out_path must name an existing file"):
        load(train, held_out_path=str(tmp_path / "none.jsonl"))


def test_a_line_that_changes_during_the_run_is_noticed(tmp_path):
    path = tmp_path / "train.jsonl"
    write(path, [{"q": "a"}, {"q": "b"}])
    data = load(path)
    write(path, [{"q": "a"}, {"q": "c"}])
    assert data[0].messages[0].content == "a"
    with pytest.raises(ConfigError, match=r"train\.jsonl:2 must stay as it was"):
        data[1]


def test_the_same_lines_in_another_place_have_the_same_fingerprint(tmp_path):
    rows = [{"q": "a"}, {"q": "b"}]
    (tmp_path / "copy").mkdir()
    first = load(write(tmp_path / "d.jsonl", rows))
    assert first.fingerprint == load(write(tmp_path / "copy" / "d.jsonl", rows)).fingerprint
    assert first.fingerprint != load(write(tmp_path / "d.jsonl", rows[:1])).fingerprint
