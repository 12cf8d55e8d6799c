"""Write the JSON Schemas and the configuration reference from the dataclasses (or --check them)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from titan_rl.config.presets import PRESETS
from titan_rl.config.reference import make_reference
from titan_rl.config.schema import make_schema
from titan_rl.trainers.configuration import RULES, TRAINER_CONFIGS, default_config, types_by_algorithm

ROOT = Path(__file__).resolve().parent.parent


_WHICH = {
    "rl": "Reinforcement learning, the default.",
    "supervised": "Pretraining and SFT.",
    "preference": "DPO and its variants, on pairs or labelled completions.",
    "reward_model": "A reward model, on pairs.",
}


def render() -> dict[Path, str]:
    """Contents of every generated file, by path."""
    files = {}
    for trainer in TRAINER_CONFIGS:
        schema = make_schema(default_config(trainer), RULES)
        schema["properties"]["trainer"] = {"description": _WHICH[trainer], "enum": [trainer]}
        if trainer == "rl":
            schema[PRESETS] = {"algorithm.type": types_by_algorithm()}
        files[ROOT / "titan_rl" / "schemas" / f"{trainer}.json"] = json.dumps(schema, indent=1) + "\n"
        files[ROOT / "docs" / f"configuration_{trainer}.md"] = make_reference(schema)
    return files


def main() -> int:
    """Write, or with ``--check`` only say what is out of date."""
    stale = [p for p, text in render().items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        print("\n".join(f"out of date: {p}" for p in stale))
        return bool(stale)
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
