import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import config_fakes as fakes
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.dump import to_table
from titan_rl.config.locations import ManyConfigError
from titan_rl.config.overlay import overlay
from titan_rl.config.reference import make_reference
from titan_rl.config.schema import check, make_schema
from titan_rl.config.toml import Document, load_document
from titan_rl.config.validation import find_errors
from titan_rl.errors import ConfigError

SCHEMA = make_schema(fakes.Root(), fakes.RULES)


def part(*path: str) -> dict[str, Any]:
    found = SCHEMA
    for key in path:
        found = found["properties"][key]
        found = found["anyOf"][0] if "properties" in found.get("anyOf", [{}])[0] else found
    return found


def test_the_schema_is_a_valid_schema_and_json():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


def test_a_key_carries_its_type_default_bounds_and_docstring():
    assert part("training", "steps") == {
        "description": "How many train steps to run",
        "type": "integer",
        "minimum": 1,
        "default": 10000,
    }
    assert part("training", "dtype") == {"enum": ["bfloat16", "float32"], "default": "float32"}
    assert part("training", "max_norm")["description"] == "Max norm for\ngradient clipping"
    assert part("sampling", "temperature") == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 2,
        "default": 1.0,
    }
    assert part("compile")["description"] == "What is compiled."
    assert part("critic")["properties"]["head"]["anyOf"][0]["required"] == ["path"]
    assert "description" not in part("training")  # dataclasses write a docstring where there is none


def test_every_section_refuses_unknown_keys():
    def sections(schema: Any) -> list[dict[str, Any]]:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        here = (
            [schema] if isinstance(schema, dict) and schema.get("properties", {}).get("type") is None else []
        )
        return [s for s in here if "properties" in s] + [found for item in inner for found in sections(item)]

    found = sections(SCHEMA)
    assert len(found) >= 10
    assert all(section["additionalProperties"] is False for section in found)


def test_a_choice_has_one_branch_a_name_and_one_for_the_users_own_class():
    branches = SCHEMA["properties"]["generator"]["anyOf"][0]["oneOf"]
    assert [branch["properties"]["type"].get("const") for branch in branches] == ["local", "engine", None]
    assert branches[0]["description"] == "The exact generator."
    assert ["required" in branch for branch in branches] == [False, True, True]
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid({"generator": {"type": "mine.module:Mine", "anything": [1]}})
    assert not validator.is_valid({"generator": {"type": "mine.module", "anything": [1]}})


def test_an_editor_accepts_what_only_a_file_may_hold_and_the_check_does_not():
    table = {"critic": False, "reward": False, "generator": False}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"base": "other.toml", **table})
    for key in table:
        with pytest.raises(ConfigError, match=r"Only an inherited section can be removed|Write it as"):
            check({key: False}, SCHEMA, Document({}, "run.toml"))


def test_an_infinite_default_does_not_break_the_json():
    default = fakes.Root(training=fakes.TrainingConfig(max_norm=float("inf")))
    schema = make_schema(default, fakes.RULES)
    text = json.dumps(schema, allow_nan=False)
    assert (
        json.loads(text)["properties"]["training"]["anyOf"][0]["properties"]["max_norm"]["default"] == "inf"
    )
    check({"training": {"max_norm": float("inf")}}, schema, Document({}, "run.toml"))


def test_the_defaults_of_the_schema_are_those_of_the_instance():
    default = fakes.Root(critic=fakes.Critic(lr=7.0), generator=fakes.Engine.Config(memory_fraction=0.25))
    properties = make_schema(default, fakes.RULES)["properties"]
    assert properties["critic"]["anyOf"][0]["properties"]["lr"]["default"] == 7.0
    local, engine, _ = properties["generator"]["anyOf"][0]["oneOf"]
    assert engine["properties"]["memory_fraction"]["default"] == 0.25
    assert engine["properties"]["type"]["default"] == "engine"
    assert local["required"] == ["type"]


def test_a_file_is_checked_with_its_lines_and_without_torch(tmp_path: Path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "base.toml").write_text("[training]\nstps = 3\n")
    (tmp_path / "run.toml").write_text('base = "base.toml"\n\n[sampling]\ntemperature = 3\n')
    code = (
        "import json, sys\n"
        "import titan_rl.config.schema, titan_rl.config.toml, titan_rl.config.overrides\n"
        "import titan_rl.config.reference, titan_rl.config.registry\n"
        "import titan_rl.config.overlay, titan_rl.config.dump\n"
        "from titan_rl.errors import ConfigError\n"
        "document = titan_rl.config.toml.load_document('run.toml')\n"
        "document = titan_rl.config.overrides.apply_overrides(document, ['--sampling.group-size', '0'])\n"
        "try: titan_rl.config.schema.check(document.table, json.load(open('schema.json')), document)\n"
        "except ConfigError as error: print(error)\n"
        "print([name for name in ('torch', 'torchtitan', 'vllm', 'config_fakes') if name in sys.modules])\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "command line: sampling.group_size must be an integer >= 1; got 0. The default is 8.",
        "base.toml:2: training.stps must be a key of [training]; got 3. Did you mean 'steps'?",
        "run.toml:4: sampling.temperature must be a number > 0 and <= 2; got 3. The default is 1.0.",
        "[]",
    ]


def test_positions_are_those_of_the_file_even_inside_an_array_of_tables(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[[reward]]\ntype = "math"\n[[reward]]\ntype = "length"\nweight = 1.0\n')
    document = load_document(path)
    with pytest.raises(ConfigError) as caught:
        check(document.table, SCHEMA, document)
    assert str(caught.value) == (
        f"{path}:3: reward.1.max_tokens must be given; got no value. Add max_tokens = ... to [reward.1]."
    )


junk = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["none", "local", "a:B", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "lr", "q"]), inner),
    max_leaves=5,
)
tables = st.dictionaries(
    st.sampled_from([*SCHEMA["properties"], "unknown"]),
    junk | st.dictionaries(st.sampled_from(["steps", "top_k", "stop", "type", "weights", "lr"]), junk),
    max_size=4,
)


@given(table=tables)
@settings(max_examples=100, deadline=None)
def test_whatever_is_written_the_check_and_the_overlay_agree(table: dict[str, Any]):
    table.pop("base", None)
    is_custom = '"a:B"' in json.dumps(table)  # the check cannot know a user's class
    errors = find_errors(table, SCHEMA, path=(), locate=None)
    if errors:
        with pytest.raises(ConfigError) as caught:
            overlay(fakes.Root(), table, rules=fakes.RULES)
        found = caught.value.errors if isinstance(caught.value, ManyConfigError) else [caught.value]
        if not is_custom:
            assert sorted(map(str, found)) == sorted(map(str, errors))
    elif not is_custom:
        made = overlay(fakes.Root(), table, rules=fakes.RULES)
        assert overlay(fakes.Root(), to_table(made, fakes.RULES), rules=fakes.RULES) == made


def test_the_reference_names_every_key_once_with_its_default():
    text = make_reference(SCHEMA)
    assert "## `[training]`\n\n| key | value | default | meaning |\n|---|---|---|---|\n" in text
    assert "| `steps` | an integer >= 1 | `10000` | How many train steps to run |" in text
    assert "| `max_norm` | a number | `1.0` | Max norm for gradient clipping |" in text
    assert '| `stop` | an array of strings with at least 1 element(s) | `["</s>"]` |  |' in text
    assert "| `weights` | a table whose values are each a number <= 1 | `{}` |  |" in text
    assert '| `name` | a string or "none" | `"none"` |  |' in text
    assert "| `path` | a string | required | Where the prompts are. |" in text
    assert "global_batch_size" not in text
    assert "## `[critic]`\n\nThe value model. Off unless it is there.\n" in text
    assert (
        '`type` is one of `"local"`, `"engine"`, or `"package.module:Class"`. The default is `"local"`.'
        in text
    )
    assert '## `[[reward]]` with `type = "length"`' in text
    assert '## `[activation_checkpoint]` with `type = "none"`' not in text
    assert text.count("| `memory_fraction` |") == 2  # in [generator] and in [draft]


def test_the_reference_escapes_what_would_end_a_cell():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "default": "x|y", "description": "b|c"}},
    }
    assert r'| `a` | a string | `"x\|y"` | b\|c |' in make_reference(schema)
