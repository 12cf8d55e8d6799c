"""Parquet files, good and bad."""

import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_rl.data.parquet import Parquet
from titan_rl.errors import ConfigError
from titan_rl.types import Message


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def load(path, split="train", **config):
    return Parquet(Parquet.Config(path=str(path), **{"prompt_column": "q", **config}), split)


def test_rows_become_prompts_also_across_row_groups_and_files(tmp_path):
    write(tmp_path / "d-0.parquet", {"q": ["a", "b", "c"], "n": [1, 2, 3]}, row_group_size=1)
    write(tmp_path / "d-1.parquet", {"q": ["d"], "n": [4]})
    data = load(tmp_path / "d-*.parquet", answer_column="n", metadata_columns=["n"])
    assert [
        (p.id, p.messages[0].content, p.answer, p.metadata["n"]) for p in map(data.__getitem__, range(4))
    ] == [
        ("d-0.parquet:0", "a", "1", 1),
        ("d-0.parquet:1", "b", "2", 2),
        ("d-0.parquet:2", "c", "3", 3),
        ("d-1.parquet:0", "d", "4", 4),
    ]


def test_a_column_of_structures_becomes_messages(tmp_path):
    path = write(tmp_path / "d.parquet", {"m": [[{"role": "user", "content": "Hi"}]]})
    assert load(path, prompt_column=None, messages_column="m")[0].messages == (Message("user", "Hi"),)


def test_the_splits_of_a_fraction_are_disjoint_and_complete(tmp_path):
    path = write(tmp_path / "d.parquet", {"q": [str(n) for n in range(60)]})
    train, held_out = (load(path, split, held_out_fraction=0.3) for split in ("train", "held_out"))
    ids = [data[i].id for data in (train, held_out) for i in range(len(data))]
    assert sorted(ids) == sorted(f"d.parquet:{n}" for n in range(60))


def test_overlap_with_the_held_out_file_names_both_rows(tmp_path):
    train = write(tmp_path / "train.parquet", {"q": ["a", "b"]})
    test = write(tmp_path / "test.parquet", {"q": ["b"]})
    message = f"1 shared prompts, the first at {test}: row 0 and {train}: row 1"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(train, held_out_path=str(test))


@pytest.mark.parametrize(
    ("columns", "config", "message"),
    [
        ({"question": ["a"]}, {"prompt_column": "questions"}, "{path}: questions must be present; got "
         "columns question. Did you mean 'question'?"),
        ({"q": ["a", None]}, {}, "{path}: row 1: q must be text; got NoneType None."),
        ({"q": [1]}, {}, "{path}: row 0: q must be text; got int 1."),
        ({"q": pa.array([], pa.string())}, {}, "{path} must hold at least one row; got an empty table."),
        ({"q": ["a"], "t": pa.array([0], pa.timestamp("s"))}, {"metadata_columns": ["t"]},
         "{path}: row 0: t must be a JSON value"),
        ({"q": pa.array([b"ok", b"\xff\xfe"]).view(pa.string())}, {}, "{path}: row 1: q must be UTF-8"),
    ],
)  # fmt: skip
def test_a_bad_table_is_refused_with_file_row_and_column(tmp_path, columns, config, message):
    path = write(tmp_path / "bad.parquet", columns)
    with pytest.raises(ConfigError, match=re.escape(message.format(path=path))):
        load(path, **config)


@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = write(tmp_path / "cut.parquet", {"q": [f"prompt {n}" for n in range(500)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(ConfigError, match=r"cut\.parquet must be a whole, readable parquet file"):
        load(path)


def test_a_damaged_page_is_refused(tmp_path):
    path = write(tmp_path / "hurt.parquet", {"q": [f"prompt {n}" for n in range(500)]}, compression="snappy")
    content = bytearray(path.read_bytes())
    content[4:600] = b"\xff" * 596
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=r"hurt\.parquet must be a whole, readable parquet file"):
        load(path)


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "d.parquet", {"q": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"data\.source\.type 'parquet' must have .*titan_rl\[data\]"):
        load(path)
