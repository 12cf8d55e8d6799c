"""Every key of every trainer is free, warned about or refused when it changed, and says why."""

import json
from importlib import resources

import pytest

from titan_rl.config.differences import diff
from titan_rl.config.entry import TRAINERS
from titan_rl.errors import ConfigError
from titan_rl.trainers.resume_rules import RULES, judge, markdown, rule_of


def keys(schema, prefix=""):
    """Dotted keys of a JSON Schema, those in every alternative of a table included."""
    for part in [schema, *schema.get("oneOf", ()), *schema.get("anyOf", ()), *schema.get("allOf", ())]:
        for name, inner in part.get("properties", {}).items():
            if "not" in inner or (not prefix and name in ("base", "trainer")):
                continue
            key = f"{prefix}{name}"
            yield key
            yield from keys(inner, f"{key}.")
            yield from keys(inner.get("items", {}), f"{key}.0.")


def all_keys():
    found = set()
    for trainer in TRAINERS:
        text = resources.files("titan_rl").joinpath("schemas", f"{trainer}.json").read_text()
        found |= set(keys(json.loads(text)))
    return found


def test_every_key_of_every_schema_has_a_rule():
    found = all_keys()
    assert {"training.steps", "critic.optimizer.lr", "data.mixture", "resilience.keep_best"} <= found
    assert len(found) > 200
    for key in found:
        assert rule_of(key).verdict in ("free", "warned", "refused"), key


def test_every_rule_is_of_a_key_that_exists():
    # The key `type` of a table stands in no list of keys: it picks the list.
    assert {key.removesuffix(".type") for key in RULES} <= all_keys()


def test_an_unknown_key_has_none():
    with pytest.raises(KeyError):
        rule_of("nonsense.key")


def test_what_is_free_is_not_mentioned_and_what_is_warned_says_why():
    old = {
        "training": {"steps": 6},
        "metrics": {"log_freq": 1},
        "reward": [{"type": "format", "weight": 1.0}],
    }
    new = {
        "training": {"steps": 8},
        "metrics": {"log_freq": 2},
        "reward": [{"type": "format", "weight": 0.5}],
    }
    changes = judge(diff(old, new))
    assert [(change.key, change.old, change.new) for change in changes] == [
        ("reward.0.weight", 1.0, 0.5),
        ("training.steps", 6, 8),
    ]
    assert changes[0].rule.why == "it takes effect from the next iteration on"


def test_all_refused_keys_are_named_together():
    old = {"debug": {"seed": 0}, "optimizer": {"betas": [0.9, 0.95], "lr": 1e-5}}
    new = {"debug": {"seed": 1}, "optimizer": {"betas": [0.9, 0.99], "lr": 1e-6}}
    with pytest.raises(ConfigError) as caught:
        judge(diff(old, new))
    assert caught.value.where == "debug.seed"
    expected = "debug.seed must stay 0 when a run is resumed, because it decides which prompts are drawn; "
    assert expected in str(caught.value)
    assert "So has optimizer.betas to stay [0.9, 0.95]." in str(caught.value)


def test_a_key_of_a_newer_version_is_left_out():
    assert judge(diff({"debug": {}}, {"debug": {"seed": 1}})) == []


def test_the_table_has_every_rule():
    assert all(f"| `{key}` | {rule.verdict} | {rule.why} |" in markdown() for key, rule in RULES.items())
