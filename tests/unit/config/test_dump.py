import dataclasses
from pathlib import Path
from typing import Any

import config_fakes as fakes
import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.differences import diff
from titan_rl.config.dump import to_table, to_toml
from titan_rl.config.overlay import overlay
from titan_rl.config.rules import Hidden
from titan_rl.config.schema import check, make_schema
from titan_rl.config.toml import Document

SCHEMA = make_schema(fakes.Root(), fakes.RULES)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda value: value != "none")
finite = st.floats(allow_nan=False)
json_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
datasets = st.builds(fakes.Dataset, path=text, limit=st.none() | st.integers(-(2**63), 2**63 - 1))
samplings = st.builds(
    fakes.Sampling,
    group_size=st.integers(1, 2**40),
    temperature=st.floats(0, 2, exclude_min=True),
    top_k=st.none() | st.integers(0, 9),
    stop=st.lists(text, min_size=1, max_size=3).map(tuple),
    mode=st.sampled_from(fakes.Mode),
    folder=st.sampled_from([Path("a"), Path("/b c/d")]),
    window=st.tuples(st.integers(-5, 5), finite),
    options=st.dictionaries(text, json_values, max_size=2),
    weights=st.dictionaries(text, st.floats(max_value=1, allow_nan=False), max_size=2),
    either=st.none() | st.integers(-5, 5) | text,
)
generators = st.builds(fakes.Local.Config, cache_tokens=st.integers(1, 99)) | st.builds(
    fakes.Engine.Config, memory_fraction=finite, sampling=st.none() | samplings
)
rewards = st.builds(fakes.Maths.Config, weight=finite) | st.builds(
    fakes.Length.Config, max_tokens=st.integers(1, 99), weight=finite
)
roots = st.builds(
    fakes.Root,
    dump_folder=text,
    name=st.none() | text,
    training=st.builds(
        fakes.TrainingConfig,
        steps=st.integers(1, 99),
        max_norm=finite | st.integers(0, 9),
        dtype=st.sampled_from(["bfloat16", "float32"]),
    ),
    optimizer=st.builds(fakes.Adam, lr=st.floats(1e-9, 1), betas=st.just((0.5, 0.75))).map(fakes.to_groups),
    checkpoint=st.builds(
        fakes.Checkpoint.Config,
        async_mode=st.just("async"),
        last=st.none() | st.lists(st.lists(text, max_size=2), max_size=2),
    ),
    activation_checkpoint=st.none()
    | st.builds(fakes.FullAC.Config, debug=st.booleans())
    | st.builds(fakes.SelectiveAC.Config, fqns=st.lists(text, max_size=2)),
    sampling=samplings,
    generator=generators,
    draft=st.none() | generators,
    reward=st.lists(rewards, min_size=1, max_size=3),
    data=st.lists(datasets, max_size=2),
    critic=st.none() | st.builds(fakes.Critic, lr=finite, head=st.none() | datasets),
)


@given(instance=roots, default=roots)
@settings(max_examples=50, deadline=None)
def test_what_was_written_passes_the_check_and_loads_again_over_any_defaults(
    instance: fakes.Root, default: fakes.Root
):
    table = tomli.loads(to_toml(instance, fakes.RULES))
    assert table == to_table(instance, fakes.RULES)
    check(table, SCHEMA, Document(table, "run.toml"))
    assert overlay(default, table, rules=fakes.RULES) == instance


@given(old=roots, new=roots)
@settings(max_examples=50, deadline=None)
def test_two_configurations_differ_exactly_when_something_is_listed(old: fakes.Root, new: fakes.Root):
    assert diff(to_table(old, fakes.RULES), to_table(old, fakes.RULES)) == []
    assert bool(diff(to_table(old, fakes.RULES), to_table(new, fakes.RULES))) == (old != new)


def test_a_users_class_is_written_with_its_path_and_loads_again():
    root = overlay(
        fakes.Root(), {"generator": {"type": "config_fakes:LocalChild", "cache_tokens": 3}}, rules=fakes.RULES
    )
    written = to_table(root, fakes.RULES)["generator"]
    assert written == {"type": "config_fakes:LocalChild", "cache_tokens": 3}
    again = overlay(fakes.Root(), {"generator": written}, rules=fakes.RULES)
    assert again.generator == root.generator


def test_hidden_keys_are_not_written():
    assert "global_batch_size" not in to_table(fakes.Root(), fakes.RULES)["training"]
    rules = {**fakes.RULES, (fakes.Root, "training"): Hidden()}
    assert "training" not in to_table(fakes.Root(), rules)


def test_a_value_of_another_type_than_declared_is_a_mistake_of_the_programmer():
    with pytest.raises(TypeError, match="'5' is not an integer >= 1"):
        to_table(fakes.Root(training=fakes.TrainingConfig(steps="5")), fakes.RULES)  # pyrefly: ignore


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", 1, 2)]),
        ({"a": {"b": 1}}, {"a": {}}, [("a.b", 1, None)]),
        ({}, {"a": 1}, [("a", None, 1)]),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, [("a", 1, 2), ("b", 1, 2)]),
        ({"a": "none"}, {"a": {"x": 1}}, [("a", "none", {"x": 1})]),
        ({"r": [{"w": 1}, {"w": 2}]}, {"r": [{"w": 1}, {"w": 3}]}, [("r.1.w", 2, 3)]),
        ({"r": [{"w": 1}]}, {"r": []}, [("r", [{"w": 1}], [])]),
        ({"x": [1, 2]}, {"x": [1, 3]}, [("x", [1, 2], [1, 3])]),
        ({"x": True}, {"x": 1}, [("x", True, 1)]),
        ({"x": [True]}, {"x": [1]}, [("x", [True], [1])]),
        ({"x": 1}, {"x": 1.0}, []),
        ({"x": float("nan")}, {"x": float("nan")}, []),
    ],
)
def test_differences_name_the_key_the_old_and_the_new_value(
    old: dict[str, Any], new: dict[str, Any], expected: list[tuple[str, Any, Any]]
):
    assert diff(old, new) == expected


def test_what_looks_like_a_credential_is_not_written():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Judge:
        api_key: str = "canary"
        hf_token: str = "canary"
        AWS_SECRET_ACCESS_KEY: str = "canary"
        tables: list[dict[str, Any]] = dataclasses.field(
            default_factory=lambda: [{"password": "canary", "weight": 1.0}]
        )
        max_tokens: int = 5
        stop_token: str = ""
        token_level: str = "kept"
        monkey: str = "kept"

    text = to_toml(Judge())
    assert "canary" not in text
    assert text.count("<redacted>") == 4
    assert text.count("kept") == 2
    assert to_table(Judge())["api_key"] == "canary"  # what the run itself reads
