from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.overrides import apply_overrides, parse_overrides
from titan_rl.config.toml import Document
from titan_rl.config.writer import inline
from titan_rl.errors import ConfigError

FILE = Document(
    {
        "training": {"steps": 1, "seq_len": 8},
        "generator": {"type": "vllm", "memory_fraction": 0.5},
        "reward": [{"type": "math"}, {"type": "length", "options": {"a": 1}}],
        "critic": {"lr": 1.0},
    },
    "run.toml",
    {("training",): ("run.toml", 1), ("training", "steps"): ("run.toml", 2), ("reward", 1): ("run.toml", 9)},
)


def message(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(FILE, arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "table"),
    [
        (["--training.steps", "200"], {"training": {"steps": 200}}),
        (["--training.steps=200"], {"training": {"steps": 200}}),
        (["--optimizer.lr", "-1e-6"], {"optimizer": {"lr": -1e-6}}),
        (["--generator.type", "local"], {"generator": {"type": "local"}}),
        (["--generator.type", '"local"'], {"generator": {"type": "local"}}),
        (["--a.flag", "--a.other-flag"], {"a": {"flag": True, "other_flag": True}}),
        (["--a.flag=false"], {"a": {"flag": False}}),
        (["--x", "[1, 2]"], {"x": [1, 2]}),
        (["--x", "{a = 1}", "--x.b", "2"], {"x": {"a": 1, "b": 2}}),
        (["--x.a", "1", "--x", "{b = 2}"], {"x": {"a": 1, "b": 2}}),
        (["--x", "1", "--x", "2"], {"x": 2}),
        (["--x", ""], {"x": ""}),
        (["--x="], {"x": ""}),
        (["--x", "a=b c"], {"x": "a=b c"}),
        (["--x", "2024-01-01"], {"x": "2024-01-01"}),
        (["--x", "1\ny = 2"], {"x": "1\ny = 2"}),
        (["--x", "my_module:MyClass"], {"x": "my_module:MyClass"}),
        (["--reward.0.weight", "2.0"], {"reward": {0: {"weight": 2.0}}}),
    ],
)
def test_an_argument_becomes_a_key(arguments: list[str], table: dict[str, Any]):
    assert parse_overrides(arguments).table == table


@given(
    value=st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    is_joined=st.booleans(),
)
def test_every_toml_value_can_be_given(value: Any, is_joined: bool):
    arguments = [f"--a.b={inline(value)}"] if is_joined else ["--a.b", inline(value)]
    assert parse_overrides(arguments).table == {"a": {"b": value}}


def test_the_command_line_wins_over_the_file_and_is_named_as_the_location():
    document = apply_overrides(FILE, ["--training.steps", "200"])
    assert document.table["training"] == {"steps": 200, "seq_len": 8}
    assert document.locate(("training", "steps")) == ("command line", None)
    assert document.file == "run.toml"
    assert FILE.table["training"]["steps"] == 1


def test_a_section_is_removed_and_another_type_starts_afresh():
    assert "critic" not in apply_overrides(FILE, ["--critic", "false"]).table
    assert apply_overrides(FILE, ["--generator.type", "local"]).table["generator"] == {"type": "local"}
    changed = apply_overrides(FILE, ["--generator.memory_fraction", "1"]).table["generator"]
    assert changed == {"type": "vllm", "memory_fraction": 1}


def test_single_elements_of_an_array_are_changed_appended_and_removed():
    arguments = ["--reward.1.options.b", "2", "--reward.2.type", "format", "--reward.0", "false"]
    document = apply_overrides(FILE, arguments)
    assert document.table["reward"] == [{"type": "length", "options": {"a": 1, "b": 2}}, {"type": "format"}]
    assert apply_overrides(FILE, ["--new.0.x", "1"]).table["new"] == [{"x": 1}]
    document = apply_overrides(FILE, ["--reward.1.weight", "2.0"])
    assert document.locate(("reward", 1, "weight")) == ("command line", None)
    assert FILE.table["reward"][1] == {"type": "length", "options": {"a": 1}}


def test_an_array_given_as_a_whole_replaces_the_one_of_the_file():
    document = apply_overrides(FILE, ["--reward", '[{type = "format"}]'])
    assert document.table["reward"] == [{"type": "format"}]
    assert document.locate(("reward", 0, "type")) == ("command line", None)


def test_an_element_beyond_the_end_is_refused():
    assert message("--reward.4.weight", "1") == (
        "command line: reward.4 must be an element that exists or the next one; got 4. "
        "Number the elements from 0 on; there are 2."
    )


def test_arguments_of_another_form_are_refused():
    for argument in ("steps=3", "-s", "--", "--a..b", "--=1", "--a b"):
        assert message(argument, "--x", "1") == (
            "command line must hold overrides of the form --section.key value; got "
            f"{argument if ' ' in argument else repr(argument)}. "
            "Write --section.key value, after the configuration file."
        )


def test_a_key_inside_a_plain_value_is_refused():
    assert message("--a.b", "1", "--a.b.c", "2") == (
        "command line: a.b must be a section, because a key in it is set; got 1. "
        "Give either the whole section or its single keys."
    )
