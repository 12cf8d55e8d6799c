"""The shipped schemas and the configuration reference are those of the dataclasses."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("make_schemas", ROOT / "scripts" / "make_schemas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shipped_schemas_and_reference_are_what_the_script_writes():
    files = load_script().render()
    assert {path.name for path in files} == {
        "rl.json",
        "supervised.json",
        "preference.json",
        "reward_model.json",
        "configuration_rl.md",
        "configuration_supervised.md",
        "configuration_preference.md",
        "configuration_reward_model.md",
    }
    stale = [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "Run `python scripts/make_schemas.py`."
