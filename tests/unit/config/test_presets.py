"""A table without ``type`` is checked as what a preset makes of it, with neither torch nor the preset."""

from typing import Any

import pytest

from titan_rl.config.presets import PRESETS, types_in, unknown_presets, with_chosen_types
from titan_rl.config.schema import check
from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError


def part(*names: tuple[str, str]) -> dict[str, Any]:
    """A choice: the first is the default. Each has one key, a number."""
    branches = []
    for place, (name, key) in enumerate(names):
        properties = {"type": {"const": name}, key: {"type": "number"}}
        required = {"required": ["type"]} if place else {}
        branches.append(
            {"type": "object", "properties": properties, "additionalProperties": False, **required}
        )
    return {"oneOf": branches}


def section(**properties: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": properties, "additionalProperties": False}]}


SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "algorithm": section(type={"type": "string", "default": "plain"}),
        "advantage": part(("mean", "eps"), ("gae", "decay")),
        "loss": section(kl=part(("k3", "beta"), ("k1", "weight")), steps={"type": "integer"}),
    },
    PRESETS: {
        "algorithm.type": {
            "plain": {"advantage": {"type": "mean"}, "loss": {"kl": {"type": "k3"}}},
            "critic": {"advantage": {"type": "gae"}, "loss": {"kl": {"type": "k1"}}},
        }
    },
}


def checked(table: dict[str, Any]) -> None:
    check(table, SCHEMA, Document(table, "run.toml"))


def named(name: str, **tables: Any) -> dict[str, Any]:
    return {"algorithm": {"type": name}, **tables}


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"advantage": {"eps": 1.0}, "loss": {"kl": {"beta": 1.0}}},
        named("plain", advantage={"eps": 1.0}),
        named("critic", advantage={"decay": 1.0}, loss={"steps": 3}),
        named("critic", loss={"kl": {"weight": 1.0}}),
        named("critic", advantage={"type": "mean", "eps": 1.0}),
        named("my.module:preset", advantage={"anything": 1}, loss={"steps": 3, "kl": {"else": 2}}),
        named("my.module:preset", advantage={"type": "gae", "decay": 1.0}),
    ],
)
def test_what_fits_the_preset_or_the_type_that_is_stated_passes(table: dict[str, Any]) -> None:
    before = str(table)
    checked(table)
    assert str(table) == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (named("critic", advantage={"eps": 1.0}), r'advantage\.eps must be a key of .* of type "gae"'),
        (named("plain", advantage={"decay": 1.0}), r'advantage\.decay must be a key of .* of type "mean"'),
        (named("critic", advantage={"decay": "x"}), r"advantage\.decay must be a number; got 'x'"),
        (named("critic", loss={"kl": {"beta": 1.0}}), r'loss\.kl\.beta must be a key of .* of type "k1"'),
        (named("my.module:preset", loss={"stops": 3}), r"loss\.stops must be a key .*; got 3"),
        (named("my.module:preset", advantage={"type": "gae", "eps": 1.0}), r"advantage\.eps must be a key"),
        (named("my.module:preset", advantage={"type": {"a": 1}}), r"advantage\.type must"),
        (named("critic", advantage=3), r"advantage must be a table; got 3"),
        ({"algorithm": 3}, r"algorithm must be a table; got 3"),
    ],
)
def test_what_does_not_fit_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(table)


def test_an_unknown_preset_is_named_together_with_the_other_mistakes_and_no_others_follow_from_it() -> None:
    table = named("critik", advantage={"decay": 1.0}, loss={"stops": 3})
    with pytest.raises(ConfigError) as raised:
        checked(table)
    first, second = str(raised.value).splitlines()
    assert "algorithm.type must be one of 'plain', 'critic'" in first
    assert first.endswith("got 'critik'. Did you mean 'critic'?")
    assert "loss.stops must be" in second


def test_a_schema_without_presets_changes_nothing() -> None:
    plain = {name: value for name, value in SCHEMA.items() if name != PRESETS}
    table = named("nobody", advantage={"eps": 1.0})
    assert with_chosen_types(table, plain) == table
    assert unknown_presets(table, plain, None) == []


def test_types_are_found_in_nested_tables() -> None:
    table = {"kl": {"type": "k3", "beta": 0.1, "inner": {"x": 1}}, "steps": 3, "empty": {"y": 2}}
    assert types_in(table) == {"kl": {"type": "k3"}}
