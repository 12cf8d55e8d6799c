"""Low-rank adapters through the real command line: the score rises, the base stays, a resume is exact."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration import runs
from titan_rl.titan import safe_reading
from titan_rl.titan.lora import is_adapter

pytestmark = pytest.mark.slow

STEPS, HALF = 8, 4
LORA = ("lora.rank", 4, "lora.alpha", 8, "optimizer.lr", 4e-3, "loss.kl.coefficient", 0.01)


class Runs:
    """A run of eight steps, one that begins at its fourth, and two that are refused."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self.directory, self.initial = directory, checkpoint
        self.whole = self.start("whole").succeed()
        shutil.copytree(
            self.whole.folder / "checkpoint" / f"step-{HALF}",
            directory / "again" / "checkpoint" / f"step-{HALF}",
        )
        more = {
            "again": lambda: self.start("again"),
            "other": lambda: self.start("whole", "lora.alpha", 4, "training.steps", STEPS + 1),
            "from_lora": lambda: self.start("from_lora", "checkpoint.initial_load_path", self.step(STEPS)),
        }
        self.runs = runs.all_of(more)
        self.again = self.runs["again"].succeed()

    def start(self, name: str, *overrides: object) -> runs.Run:
        return runs.start(
            runs.CONFIGS / "grpo.toml",
            "checkpoint.initial_load_path", self.initial,
            "training.steps", STEPS,
            "checkpoint.interval", HALF,
            *LORA,
            *overrides,
            folder=self.directory / name,
        )  # fmt: skip

    def step(self, number: int, run: str = "whole") -> Path:
        return self.directory / run / "checkpoint" / f"step-{number}"


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("lora"), initial_load_path)


def model_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a checkpoint."""
    shapes = safe_reading.tensor_shapes(safe_reading.read_metadata(checkpoint))
    parts = ("layers.", "tok_embeddings.", "norm.", "lm_head.")
    state = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in shapes.items()
        if name.startswith(parts)
    }
    safe_reading.load(state, checkpoint, no_dist=True)
    return state


def test_the_held_out_score_rises_with_adapters_alone(started: Runs) -> None:
    summary = started.whole.summary
    assert summary["score_after"] - summary["score_before"] >= 0.5
    before, after = model_of(started.initial), model_of(started.step(STEPS))
    base = {name: tensor for name, tensor in after.items() if not is_adapter(name)}
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())
    halfway = model_of(started.step(HALF))
    adapters = [name for name in after if is_adapter(name)]
    assert len(adapters) > 10
    assert all(not torch.equal(after[name], halfway[name]) for name in adapters)


def test_the_kl_to_the_base_is_measured_and_grows_from_zero(started: Runs) -> None:
    kl = started.whole.metrics()["loss/reference_kl"]
    assert kl[1] == 0.0  # B is zero at first: bit for bit the base
    assert kl[STEPS] > 1e-3


def test_optimizer_state_is_kept_for_adapters_alone(started: Runs) -> None:
    shapes = safe_reading.tensor_shapes(safe_reading.read_metadata(started.step(STEPS)))
    moments = [name for name in shapes if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert moments
    assert all(".lora_a." in name or ".lora_b." in name for name in moments)


def test_a_resume_gives_the_weights_of_the_uninterrupted_run_bit_for_bit(started: Runs) -> None:
    output = started.again.output()
    assert f"step-{HALF}" in output
    whole, again = model_of(started.step(STEPS)), model_of(started.step(STEPS, "again"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_after_the_first_push_only_adapted_weights_are_sent(started: Runs) -> None:
    sent = started.whole.metrics()["weight_sync/bytes"]
    full = sum(t.numel() for t in model_of(started.initial).values()) * 4
    assert set(sent.values()) == {sent[1]}
    assert sent[1] < full


def test_another_table_is_refused_on_resume(started: Runs) -> None:
    assert started.runs["other"].wait() != [0]
    assert "lora.alpha must stay 8.0 when a run is resumed" in started.runs["other"].output()


def test_adapters_do_not_start_from_a_checkpoint_that_has_some(started: Runs) -> None:
    assert started.runs["from_lora"].wait() != [0]
    assert "must be a checkpoint without low-rank adapters" in started.runs["from_lora"].output()


def test_the_exports_are_the_merged_model_and_the_adapter(started: Runs) -> None:
    paths = started.whole.summary["paths"]
    merged = load_file(Path(paths["export"]) / "model.safetensors")
    assert not any("lora" in name for name in merged)
    adapter = load_file(Path(paths["adapter"]) / "adapter_model.safetensors")
    config = json.loads((Path(paths["adapter"]) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    name = "model.layers.0.mlp.down_proj"
    low, high = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    base = model_of(started.initial)["layers.0.feed_forward.w2.weight"]
    torch.testing.assert_close(merged[f"{name}.weight"], base + 2.0 * high @ low, rtol=0, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("push", ["merged", "adapter"])
def test_vllm_serves_each_version(initial_load_path: Path, tmp_path: Path, push: str) -> None:
    vllm = ("generator.type", "vllm", "generator.kv_cache_gib", 0.125, "model.export", "false")
    run = runs.torchrun(
        runs.CONFIGS / "grpo.toml",
        "checkpoint.initial_load_path", initial_load_path,
        "training.steps", STEPS,
        *LORA,
        *vllm,
        "lora.push", push,
        folder=tmp_path / push,
    ).succeed()  # fmt: skip
    metrics = run.metrics()
    assert max(metrics["weight_sync/probe_difference"].values()) <= 5e-4
    sent = metrics["weight_sync/bytes"]
    assert set(sent.values()) == {sent[1]}
    assert run.summary["score_after"] - run.summary["score_before"] >= 0.5
