from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.scanner import scan_lines
from titan_rl.config.toml import Document, load_document, merge_documents
from titan_rl.config.writer import inline, write
from titan_rl.errors import ConfigError

BASE = """\
dump_folder = "out"

[training]
steps = 100  # a comment
seq_len = 8

[critic]
lr = 1.0

[generator]
type = "vllm"
memory_fraction = 0.5

[[reward]]
type = "math"

[[reward]]
type = "length"
"""


def load(folder: Path, text: str | bytes, **others: str) -> Document:
    for name, content in others.items():
        (folder / f"{name}.toml").write_text(content)
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_document(path)


def message(folder: Path, text: str | bytes, **others: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **others)
    return str(caught.value).replace(f"{folder}/", "")


def test_every_key_is_located_by_file_and_line(tmp_path: Path):
    document = load(tmp_path, BASE)
    file = str(tmp_path / "run.toml")
    assert document.locate(("dump_folder",)) == (file, 1)
    assert document.locate(("training",)) == (file, 3)
    assert document.locate(("training", "seq_len")) == (file, 5)
    assert document.locate(("reward", 1, "type")) == (file, 18)
    assert document.locate(("reward", 1)) == (file, 17)
    # A key that is not there is looked for in its section.
    assert document.locate(("critic", "head", "path")) == (file, 7)
    assert document.locate(("nothing",)) == (file, None)


def test_the_scanner_finds_keys_behind_strings_arrays_and_inline_tables():
    text = '''
"a b".c = """
[not.a.table]
d = 1 \\""" # still text
"""
e = [ # comment with ]
  {f = 1, g = 'x]'},
  [2, 3],
]
[h . "i.j"]
k = {l.m = true, n = [1,
  2]}
[[o]]
p = \'\'\'
]]\'\'\'
[o.q]
r = 1979-05-27T07:32:00Z
[[o.s]]
t = ""
[[o.s]]
t = "\\"="
[[o]]
"\\u0041" = -1e-5
'''
    tomli.loads(text)
    expected = {
        ("a b",): 2,
        ("a b", "c"): 2,
        ("e",): 6,
        ("e", 0): 7,
        ("e", 0, "f"): 7,
        ("e", 0, "g"): 7,
        ("e", 1): 8,
        ("e", 1, 0): 8,
        ("e", 1, 1): 8,
        ("h",): 10,
        ("h", "i.j"): 10,
        ("h", "i.j", "k"): 11,
        ("h", "i.j", "k", "l"): 11,
        ("h", "i.j", "k", "l", "m"): 11,
        ("h", "i.j", "k", "n"): 11,
        ("h", "i.j", "k", "n", 0): 11,
        ("h", "i.j", "k", "n", 1): 12,
        ("o",): 13,
        ("o", 0): 13,
        ("o", 0, "p"): 14,
        ("o", 0, "q"): 16,
        ("o", 0, "q", "r"): 17,
        ("o", 0, "s"): 18,
        ("o", 0, "s", 0): 18,
        ("o", 0, "s", 0, "t"): 19,
        ("o", 0, "s", 1): 20,
        ("o", 0, "s", 1, "t"): 21,
        ("o", 1): 22,
        ("o", 1, "A"): 23,
    }
    assert dict(scan_lines(text)) == expected


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def key_paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path, *(found for key, inner in items for found in key_paths(inner, (*path, key)))}


@given(table=st.dictionaries(st.text(max_size=6), values, max_size=4))
@settings(max_examples=80, deadline=None)
def test_what_the_writer_writes_reads_back_and_every_key_in_it_is_located(table: dict[str, Any]):
    text = write(table)
    assert tomli.loads(text) == table
    assert set(scan_lines(text)) == key_paths(table) - {()}


@given(value=values)
@settings(max_examples=100, deadline=None)
def test_an_inline_value_reads_back(value: Any):
    assert tomli.loads(f"value = {inline(value)}") == {"value": value}


def test_a_value_that_toml_lacks_is_refused_by_the_writer():
    with pytest.raises(TypeError, match="TOML has no value for None"):
        inline({"a": None})


def test_a_file_inherits_tables_key_by_key_and_replaces_arrays(tmp_path: Path):
    text = 'base = "base.toml"\n[training]\nsteps = 5\n[[reward]]\ntype = "format"\n'
    document = load(tmp_path, text, base=BASE)
    assert document.table["training"] == {"steps": 5, "seq_len": 8}
    assert document.table["reward"] == [{"type": "format"}]
    assert document.table["dump_folder"] == "out"
    assert "base" not in document.table
    assert document.locate(("training", "steps")) == (str(tmp_path / "run.toml"), 3)
    assert document.locate(("training", "seq_len")) == (str(tmp_path / "base.toml"), 5)
    assert document.locate(("reward", 0, "type")) == (str(tmp_path / "run.toml"), 5)


def test_false_removes_an_inherited_section_or_array_and_nothing_else(tmp_path: Path):
    text = 'base = "base.toml"\ncritic = false\nreward = false\nother = false\n'
    table = load(tmp_path, text, base=BASE).table
    assert "critic" not in table
    assert "reward" not in table
    assert table["other"] is False


def test_another_type_starts_a_section_afresh_and_the_same_type_does_not(tmp_path: Path):
    text = 'base = "base.toml"\n[generator]\ntype = "local"\n'
    document = load(tmp_path, text, base=BASE)
    assert document.table["generator"] == {"type": "local"}
    assert document.locate(("generator", "memory_fraction")) == (str(tmp_path / "run.toml"), 2)
    same = load(tmp_path, text.replace("local", "vllm"), base=BASE)
    assert same.table["generator"] == {"type": "vllm", "memory_fraction": 0.5}


def test_merging_changes_neither_document():
    lower = Document({"a": {"b": 1}}, "lower")
    upper = Document({"a": {"c": 2}}, "upper")
    assert merge_documents(lower, upper).table == {"a": {"b": 1, "c": 2}}
    assert lower.table == {"a": {"b": 1}}
    assert upper.table == {"a": {"c": 2}}


def test_a_base_with_a_base_is_refused(tmp_path: Path):
    assert message(tmp_path, '\nbase = "middle.toml"\n', middle='base = "base.toml"\n', base=BASE) == (
        "run.toml:2: base must name a file without a base of its own; got 'middle.toml'. "
        "Inheritance goes one level deep: merge base.toml into middle.toml."
    )


def test_a_base_that_is_no_path_or_no_file_is_refused(tmp_path: Path):
    assert message(tmp_path, "base = 3\n") == (
        'run.toml:1: base must be the path of a TOML file; got 3. Write base = "other.toml".'
    )
    assert message(tmp_path, 'base = "none.toml"\n') == (
        "run.toml:1: base must be a file that can be read; got 'none.toml'. No such file or directory. "
        f"Check the path (the working directory is {Path.cwd()})."
    )


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError) as caught:
        load_document("missing.toml")
    assert str(caught.value) == (
        "the configuration file must be a file that can be read; got 'missing.toml'. "
        f"No such file or directory. Check the path (the working directory is {Path.cwd()})."
    )


def test_text_that_is_not_toml_is_refused_with_its_line(tmp_path: Path):
    assert message(tmp_path, "[training]\nsteps = \n") == (
        "run.toml:2 must be valid TOML; got the line 'steps ='. Invalid value (column 9)."
    )
    assert message(tmp_path, "a = 1\na = 2\n").startswith(
        "run.toml:2 must be valid TOML; got the line 'a = 2'"
    )
    assert message(tmp_path, "a = [1,\n").startswith(
        "run.toml:2 must be valid TOML; got the line ''. Invalid value"
    )


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path):
    assert message(tmp_path, b'a = 1\nb = "\xe9t\xe9"\n') == (
        "run.toml:2 must be UTF-8 text; got the byte b'\\xe9'. Save the file as UTF-8."
    )


def test_windows_line_ends_and_byte_order_mark_are_read(tmp_path: Path):
    document = load(tmp_path, b"\xef\xbb\xbfa = 1\r\n\r\n[b]\r\nc = 2\r\n")
    assert document.table == {"a": 1, "b": {"c": 2}}
    assert document.locate(("b", "c"))[1] == 4
