"""Runs of mixtures of experts under expert parallelism, with the local generator and with the real vLLM."""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 104,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}
SHORT = (
    "training.steps", 2,
    "data.prompts_per_iteration", 4,
    "evaluation.num_prompts", 2,
    "checkpoint.initial_load_path", "none",
    "checkpoint.interval", 2,
    "model.allow_random_init", "true",
    "parallelism.expert_parallel_degree", 2,
)  # fmt: skip
has_vllm = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not has_vllm, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("experts")
    model = directory / "model"
    shutil.copytree(runs.ROOT / "titan_rl" / "assets" / "tiny_llama", model)
    (model / "config.json").write_text(json.dumps(CONFIG))

    def start(name: str) -> runs.Run:
        chosen = (*SHORT, "model.hf_assets_path", model, *wanted[name])
        return runs.start(runs.CONFIGS / "grpo.toml", *chosen, folder=directory / name, ranks=2)

    local = ("algorithm.type", "ppo", "model.load_balance_coeff", 0.01, "model.export", "false")
    wanted: dict[str, tuple[object, ...]] = {
        "local": local,
        "exported_with_a_bias": ("model.load_balance_coeff", 0.01),
    }
    wanted["deepseek"] = (
        "model.name", "deepseek_v3",
        "model.flavor", "debugmodel",
        "model.export", "false",
        "sampling.group_size", 2,
    )  # fmt: skip
    if has_vllm:
        wanted["vllm"] = ("generator.type", "vllm")
        wanted["vllm_with_a_bias"] = ("generator.type", "vllm", *local[2:])
    return runs.all_of({name: partial(start, name) for name in wanted})


def test_policy_and_critic_train_their_biases_and_the_local_generator_follows(started) -> None:
    run = started["local"].succeed()
    assert run.status["outcome"] == "done"
    metrics = run.metrics()
    for prefix in ("moe/", "critic/moe_"):
        assert 0 < metrics[f"{prefix}load_entropy"][2] <= 1
        assert metrics[f"{prefix}load_fraction_min"][2] < 1 / 8 < metrics[f"{prefix}load_fraction_max"][2]
    assert max(metrics["weight_sync/probe_difference"].values()) < 5e-4
    stored = runs.forked(_biases, str(run.folder / "checkpoint" / "step-2"))
    assert {name.removeprefix("critic.model.") for name in stored} == {
        f"layers.{layer}.moe.expert_bias_E" for layer in (0, 1)
    }
    assert len(stored) == 4
    for values in stored.values():
        assert any(values)
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        assert max(map(abs, values)) <= 2 * 2 * 0.01  # two steps of at most twice the coefficient


def test_deepseek_by_name_trains_and_the_local_generator_follows(started) -> None:
    metrics = started["deepseek"].succeed().metrics()
    assert max(metrics["weight_sync/probe_difference"].values()) < 5e-4
    assert max(metrics["loss/mismatch_abs_max"].values()) < 5e-4
    assert metrics["moe/load_fraction_max"][2] > 1 / 8 > metrics["moe/load_fraction_min"][2]


def _biases(path: str) -> dict[str, list[float]]:
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size) for name, entry in metadata.items() if name.endswith("expert_bias_E")
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


@pytest.mark.parametrize("name", ["exported_with_a_bias", pytest.param("vllm_with_a_bias", marks=needs_vllm)])
def test_a_bias_that_the_generator_or_the_export_has_no_place_for_is_refused_at_start(started, name) -> None:
    run = started[name]
    assert all(run.wait())
    assert "model.load_balance_coeff must be 0 for vLLM and for exports" in run.output()
    assert not (run.folder / "rollouts").exists()


@needs_vllm
def test_vllm_serves_what_two_ranks_with_half_the_experts_each_train(started) -> None:
    run = started["vllm"].succeed()
    metrics = run.metrics()
    assert max(metrics["weight_sync/probe_difference"].values()) < 5e-4
    assert max(metrics["loss/mismatch_abs_max"].values()) < 5e-4
    assert 0 < metrics["moe/load_entropy"][2] <= 1
    exported = json.loads((run.folder / "export" / "config.json").read_text())
    assert {key: exported[key] for key in CONFIG} == CONFIG
    assert runs.forked(_experts, str(run.folder / "export")) == 2 * 8 * 3


def _experts(path: str) -> int:
    from safetensors.torch import load_file

    return sum(".mlp.experts." in name for name in load_file(Path(path) / "model.safetensors"))
