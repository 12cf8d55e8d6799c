"""The names of TorchTitan and vLLM in use exist, are all listed, and behave as the patches assume."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import fsdp
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts
from torchtitan.models import _supported_models, llama3, qwen3
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from titan_rl.titan.attention import CpuDocumentAttention
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


def exists(module_name: str, name: str) -> bool:
    """A module's attribute, a submodule, or an attribute of a class, declared or set on its instances."""
    try:
        target = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return False
    for part in name.split("."):
        if isinstance(target, type) and not hasattr(target, part):
            return any(
                part in inspect.get_annotations(cls)
                or re.search(rf"self\.{part}\b[^=\n(]*=", inspect.getsource(cls))
                for cls in target.__mro__
                if cls.__module__.startswith(("torchtitan", "vllm"))
            )
        if not hasattr(target, part):
            return hasattr(target, "__path__") and find_spec(f"{module_name}.{name}") is not None
        target = getattr(target, part)
    return True


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
from tests.unit.titan.test_symbols import exists
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
    for name in ("vllm.py", "vllm_engine.py"):
        for node in ast.walk(trees()[PACKAGE / "generation" / name]):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EngineArgs":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif isinstance(node, ast.FunctionDef) and node.name in (
                "_device_arguments",
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
        for name in ("device.py", "init.py", "attention.py")
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
        "device_module",
        "device_type",
        "disable_fsdp_gradient_division",
    }
    assert assigned <= replaced


_PATCHED = {"titan_module", "titan_utils", "titan_fsdp", "titan_attention", "attention", "decoder", "module"}


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
            elif isinstance(node, ast.Call) and _name(node.func) in (
                "import_module",
                "__import__",
                "find_spec",
            ):
                modules = [a.value for a in node.args if isinstance(a, ast.Constant)]
            elsewhere += [f"{path.name}: {module}" for module in modules if _is_of(str(module), library)]
    assert elsewhere == []


_IMPORTERS = ("import_module", "__import__", "find_spec")


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


# --------------------------------------------------------------- what replacements and overrides assume


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_modules_initialise_their_own_parameters_in_the_method_that_is_replaced():
    calls = []

    class Recording(Module):
        def __init__(self, child=None):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self._param_init = {"weight": nn.init.ones_}
            self.child = child

        def _init_self_parameters(self):
            calls.append(self)
            super()._init_self_parameters()

    inner = Recording()
    outer = Recording(inner)
    outer.init_states()
    assert calls == [inner, outer]
    assert outer.weight.sum() == inner.weight.sum() == 2


def test_fsdp_finds_the_gradient_division_among_its_module_globals():
    assert "disable_fsdp_gradient_division" in fsdp.apply_fsdp_to_decoder.__code__.co_names
    assert fsdp.apply_fsdp_to_decoder.__globals__ is vars(fsdp)
    assert parameters(fsdp.disable_fsdp_gradient_division) == ["model"]
    importers = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torchtitan.models")
        and "disable_fsdp_gradient_division" in vars(module)
        and "flux" not in name  # an image model, which RL does not know
    ]
    assert importers == []


def test_masks_are_made_by_the_global_that_is_replaced():
    assert "_compiled_create_block_mask" in attention.create_attention_mask.__code__.co_names
    assert attention.create_attention_mask.__globals__ is vars(attention)


def test_the_decoder_asks_the_method_that_is_replaced_for_masks():
    asked = []

    class Other(Decoder):
        def _create_flex_attention_mask_for_document(self, positions, attn_config):
            asked.append((positions, attn_config))
            return "spans"

    assert parameters(Decoder._create_flex_attention_mask_for_document)[1:] == ["positions", "attn_config"]
    decoder = Other.__new__(Other)
    nn.Module.__init__(decoder)
    chosen = SimpleNamespace(inner_attention=CpuDocumentAttention.Config())
    decoder.config = SimpleNamespace(first_attention=chosen)
    positions = torch.zeros(1, 4)
    assert decoder.get_attention_masks(positions) == "spans"
    assert asked == [(positions, chosen)]


def test_our_attention_takes_what_torchtitan_gives_to_its_own():
    assert parameters(CpuDocumentAttention.forward) == parameters(FlexAttention.forward)


def test_the_device_is_a_global_that_other_modules_copy():
    assert {"device_type", "device_module"} <= set(vars(utils))
    copies = [name for name, module in sys.modules.items() if name.startswith("torchtitan.")]
    copies = [name for name in copies if "device_type" in vars(sys.modules[name])]
    assert "torchtitan.distributed.utils" in copies
    assert len(copies) >= 4  # so that replacing utils' alone would not do


def test_the_decoder_without_its_head_returns_hidden_states():
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = []
    with torch.device("cpu"):
        model = spec.model.build()
    model.init_states()
    tokens = torch.tensor([[3, 5]])
    head = model(tokens)
    model._skip_lm_head = True
    assert torch.equal(model.lm_head(model(tokens)), head)


def test_the_trainer_prepares_inputs_as_ours_expects():
    assert parameters(Trainer.post_dataloading_process) == ["self", "input_dict", "labels"]
    fake = SimpleNamespace(
        model_config=None,
        parallel_dims=SimpleNamespace(cp_enabled=False),
        config=SimpleNamespace(parallelism=SimpleNamespace(spmd_backend="partial_dtensor")),
        ntokens_seen=10,
    )
    tokens, positions = torch.ones(2, 3), torch.zeros(2, 3)
    inputs, labels, kwargs = Trainer.post_dataloading_process(
        fake, {"input": tokens, "positions": positions}, tokens
    )
    assert inputs is tokens
    assert labels is tokens
    assert kwargs == {"positions": positions}
    assert fake.ntokens_seen == 16  # which is why ours restores the count


def test_the_checkpointer_reads_its_states_when_it_saves_and_loads():
    manager = CheckpointManager.__new__(CheckpointManager)
    manager.states, manager.exclude_from_loading = {}, []
    manager.states["rl_state"] = "ours"
    assert manager._flattened_model_states_sd() == {"rl_state": "ours"}
    assert manager._states_to_load(model_only=False) == {"rl_state": "ours"}
    assert parameters(CheckpointManager.save) == ["self", "curr_step", "last_step"]
    assert parameters(CheckpointManager.load) == ["self", "step"]


def test_the_checkpointer_asks_the_methods_that_are_overridden():
    save, load = (inspect.getsource(getattr(CheckpointManager, name)) for name in ("_save", "_load"))
    for call in (
        "self._should_save(curr_step, last_step)",
        "self._create_checkpoint_id(curr_step)",
        "self._save_last_step(curr_step)",
        "self._purge_stale_checkpoints()",
        "self.maybe_wait_for_saving()",
        "self.save_future = result",
    ):
        assert call in save
    assert "self._create_checkpoint_id(curr_step)" in inspect.getsource(CheckpointManager._save_last_step)
    for call in ("self._find_load_step()", "self.dcp_load(", "self._create_checkpoint_id(step)"):
        assert call in load
    assert parameters(CheckpointManager.dcp_load)[1:] == [
        "state_dict",
        "checkpoint_id",
        "from_hf",
        "from_quantized",
    ]
    assert parameters(CheckpointManager._find_load_step) == ["self", "folder"]
    assert "self._wait_for_saving()" in inspect.getsource(CheckpointManager.maybe_wait_for_saving)
    # The loop of supervised runs comes to the safe point between two steps, after a save and a validation.
    loop = inspect.getsource(Trainer.train)
    order = ["self.should_continue_training()", "self.train_step(", "self.checkpointer.save(", "validate("]
    assert [loop.index(call) for call in order] == sorted(loop.index(call) for call in order)


def test_functions_that_are_called_take_the_arguments_that_are_given():
    assert parameters(set_pg_timeouts) == ["timeout", "parallel_dims"]
    assert parameters(clip_grad_norm_)[:2] == ["parameters", "max_norm"]
    assert "foreach" in parameters(clip_grad_norm_)
    wanted = ["model", "parallel_dims", "training", "parallelism"]
    wanted += ["compile_config", "ac_config", "dump_folder"]  # as build_sibling gives them
    assert parameters(llama3.parallelize_llama) == wanted
    assert set(wanted) < set(parameters(qwen3.parallelize_qwen3))
    assert inspect.signature(qwen3.parallelize_qwen3).parameters["skip_dp"].default is False


def test_the_trainer_has_the_hooks_that_ours_overrides():
    source = inspect.getsource(Trainer.__init__)
    assert "config.loss.build(" in source
    assert "compile_config=" in source
    for keyword in ("dp_world_size", "dp_rank", "tokenizer", "seq_len", "local_batch_size"):
        assert f"{keyword}=" in source  # what SupervisedDataLoader receives
    assert parameters(Trainer.train) == ["self"]
    assert parameters(Trainer.close) == ["self"]
    for name in (
        "training",
        "parallelism",
        "checkpoint",
        "compile",
        "comm",
        "metrics",
        "loss",
        "dump_folder",
    ):
        assert name in {field.name for field in fields(Trainer.Config)}


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_supported_models_have_a_registry_with_an_attention_backend(name):
    assert name in _supported_models
    module = importlib.import_module(f"torchtitan.models.{name}")
    assert list(inspect.signature(module.model_registry).parameters)[:2] == ["flavor", "attn_backend"]
    assert "debugmodel" in vars(module)[f"{name}_configs"]
