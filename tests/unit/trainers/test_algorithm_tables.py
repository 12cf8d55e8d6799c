"""The tables of an algorithm need no ``type``: check and overlay know what its preset chose."""

from typing import Any

import pytest

from titan_rl.algorithms.registries import ALGORITHMS
from titan_rl.config.dump import to_table
from titan_rl.config.entry import load_schema
from titan_rl.config.registry import resolve
from titan_rl.config.schema import check
from titan_rl.config.toml import Document
from titan_rl.trainers.configuration import RULES, configure, default_config

MODEL = "titan_rl/assets/tiny_llama"


def without_types(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_types(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if key != "type"
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_key_of_every_table_can_be_set_without_its_type(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    config = default_config("rl")
    for section, value in resolve(name, ALGORITHMS, "type")().sections().items():
        setattr(config, section, value)
    whole = to_table(config, RULES)
    tables = {section: without_types(whole[section]) for section in ("advantage", "loss")}
    table = {"algorithm": {"type": name}, "model": {"hf_assets_path": MODEL}, **tables}
    document = Document(table, "run.toml")
    check(document.table, load_schema("rl"), document)
    configured = configure(document, "rl")
    assert (configured.advantage, configured.loss) == (config.advantage, config.loss)
