"""The names of TorchTitan and vLLM in use exist and are all listed; only their homes import them."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.titan.existence import exists
from titan_rl.titan.symbols import (
    TORCHTITAN_IMPORTS,
    TORCHTITAN_REACHED,
    VLLM_IMPORTS,
    VLLM_REACHED,
    markdown,
)

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "titan_rl"
HOMES = {"torchtitan": PACKAGE / "titan", "vllm": PACKAGE / "generation"}
EXEMPT = PACKAGE / "titan" / "symbols.py"


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def names(table: dict[str, dict[str, str]]) -> set[tuple[str, str]]:
    return {(module, name) for module, found in table.items() for name in found}


def imported(library: str) -> set[tuple[str, str]]:
    """Names that the package imports, and those that a registry names as ``"module:Class"``."""
    found = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_of(node.module or "", library):
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if _is_of(alias.name, library)}
            elif path != EXEMPT and (match := _registry_entry(node, library)):
                found.add(match)
    return found


def _is_of(module: str, library: str) -> bool:
    return module == library or module.startswith(library + ".")


def _registry_entry(node: ast.AST, library: str) -> tuple[str, str] | None:
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return None
    match = re.fullmatch(rf"({library}[\w.]*):(\w+)", node.value)
    return (match[1], match[2]) if match else None


# ------------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize(("module", "name"), sorted(names(TORCHTITAN_IMPORTS) | names(TORCHTITAN_REACHED)))
def test_every_name_of_torchtitan_exists(module, name):
    assert exists(module, name)


def test_a_name_that_does_not_exist_is_noticed():
    assert not exists("torchtitan.trainer", "Trainer.no_such_method")
    assert not exists("torchtitan.trainer", "NoSuchTrainer")
    assert not exists("torchtitan.no_such_module", "Trainer")


_RESOLVE = """
import json, sys
from titan_rl.generation.vllm_env import set_vllm_environment
set_vllm_environment(None)
from tests.unit.titan.existence import exists
from vllm import EngineArgs
from dataclasses import fields
missing = [pair for pair in json.load(sys.stdin) if not exists(*pair)]
print("RESULT" + json.dumps([missing, [field.name for field in fields(EngineArgs)]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_name_of_vllm_exists_and_its_engine_takes_our_arguments():
    wanted = [*sorted(names(VLLM_IMPORTS) | names(VLLM_REACHED)), ("vllm", "LLMEngine.no_such_method")]
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    missing, known = json.loads(line.removeprefix("RESULT"))
    assert missing == [["vllm", "LLMEngine.no_such_method"]]
    assert engine_arguments() - {"arguments"} <= set(known)
    assert len(engine_arguments()) >= 15


def engine_arguments() -> set[str]:
    """Keywords of EngineArgs(...) and keys of the dictionaries that are merged into them."""
    found = set()
    for name in ("vllm.py", "vllm_adapters.py", "vllm_engine.py"):
        for node in ast.walk(trees()[PACKAGE / "generation" / name]):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EngineArgs":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif isinstance(node, ast.FunctionDef) and node.name in (
                "_device_arguments",
                "adapter_arguments",
                "cpu_arguments",
                "__init__",
            ):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Dict):
                        found |= {key.value for key in inner.keys if isinstance(key, ast.Constant)}
    return found


@pytest.mark.parametrize(("library", "table"), [("torchtitan", TORCHTITAN_IMPORTS), ("vllm", VLLM_IMPORTS)])
def test_the_table_lists_the_imports_of_the_package_and_no_others(library, table):
    late = {("vllm.platforms", "current_platform")}  # vllm.py asks for it by importlib
    assert imported(library) == names(table)
    assert library != "vllm" or late <= names(table)


@pytest.mark.parametrize("table", [TORCHTITAN_REACHED, VLLM_REACHED])
def test_every_name_that_is_reached_occurs_in_the_package(table):
    words = set()
    for path, tree in trees().items():
        if path == EXEMPT:
            continue
        for node in ast.walk(tree):
            words |= {getattr(node, key, None) for key in ("attr", "id", "arg", "name")}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    assert {name.split(".")[-1] for _, name in names(table)} <= words


def test_every_assignment_into_torchtitan_is_marked_in_the_table():
    replaced = {name.split(".")[-1] for found in TORCHTITAN_REACHED.values() for name in _marked(found)}
    assigned = {
        target.attr
        for name in ("device.py", "init.py", "attention.py", "clipping.py")
        for node in ast.walk(trees()[HOMES["torchtitan"] / name])
        if isinstance(node, ast.Assign)
        for outer in node.targets
        for target in getattr(outer, "elts", [outer])
        if isinstance(target, ast.Attribute) and _root(target) in _PATCHED
    }
    assert assigned == {
        "_compiled_create_block_mask",
        "_create_flex_attention_mask_for_document",
        "_init_self_parameters",
        "clip_grad_norm_",
        "device_module",
        "device_type",
        "disable_fsdp_gradient_division",
    }
    assert assigned <= replaced


_PATCHED = {
    "dist_utils",
    "titan_module",
    "titan_utils",
    "titan_fsdp",
    "titan_attention",
    "attention",
    "decoder",
    "module",
}


def _marked(found: dict[str, str]) -> list[str]:
    return [name for name, why in found.items() if why.startswith(("REPLACED", "OVERRIDDEN", "SET"))]


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def test_the_page_is_current():
    page = (ROOT / "docs" / "symbols.md").read_text(encoding="utf-8")
    assert page == markdown(), "run python scripts/make_symbols.py"


# ------------------------------------------------------------------------------------- who may import what


@pytest.mark.parametrize("library", ["torchtitan", "vllm"])
def test_only_its_home_imports_the_library(library):
    elsewhere = []
    for path, tree in trees().items():
        if HOMES[library] in path.parents:
            continue
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and _name(node.func) in _IMPORTERS:
                modules = [a.value for a in node.args if isinstance(a, ast.Constant)]
            elsewhere += [f"{path.name}: {module}" for module in modules if _is_of(str(module), library)]
    assert elsewhere == []


_IMPORTERS = ("import_module", "__import__", "find_spec")


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))
