"""Whole plans: four models on up to 4,096 ranks, and contradictions with both keys and a way out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchtitan.models.llama3 import model_registry as llama3

from titan_rl.config.entry import read_checked
from titan_rl.titan.meta_model import shard_on_meta
from titan_rl.tools.plan.arithmetic import batch_plan
from titan_rl.tools.plan.flops import forward_flops_per_token
from titan_rl.tools.plan.plan import as_json, make_plan
from titan_rl.tools.plan.render import render
from titan_rl.tools.plan.run_facts import GIB, read_run
from titan_rl.trainers.configuration import configure

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "docs" / "examples" / "scaling.toml"
MODELS = {
    "0.6B": ("qwen3", "0.6B"),
    "8B": ("llama3", "8B"),
    "70B": ("llama3", "70B"),
    "MoE": ("qwen3", "30B-A3B"),
}
# Layouts for which a plan finds nothing wrong on devices of 80 GiB.
TP, PP, EP = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "expert"))
GENERATOR_TP, MEMORY = "generator.tensor_parallel_degree", "generator.gpu_memory_utilization"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


def configured(overrides, *, device="cuda"):
    arguments = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    return configure(*read_checked(str(CONFIG), arguments), device_type=device)


def plan(world_size=8, overrides=None, *, device="cuda", gib=80.0):
    return make_plan(
        configured(overrides or {}, device=device),
        world_size=world_size,
        device_type=device,
        device_bytes=int(gib * GIB),
    )


def of_model(name):
    model, flavor = MODELS[name]
    return {"model.name": model, "model.flavor": flavor}


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        ("0.6B", 1, {}),
        ("0.6B", 8, {}),
        ("0.6B", 64, {}),
        ("0.6B", 4096, {"parallelism.data_parallel_replicate_degree": 64}),
        ("8B", 8, {}),
        ("8B", 64, {TP: 2, "parallelism.context_parallel_degree": 2}),
        ("8B", 4096, {TP: 8, "parallelism.data_parallel_replicate_degree": 8}),
        ("70B", 64, {TP: 8, GENERATOR_TP: 8}),
        ("70B", 4096, {TP: 8, PP: 4, "training.local_batch_size": 8, GENERATOR_TP: 8}),
        ("MoE", 64, {EP: 8, TP: 2, GENERATOR_TP: 4}),
        ("MoE", 4096, {EP: 64, TP: 4, PP: 2, "training.local_batch_size": 4, GENERATOR_TP: 4}),
    ],
)
def test_plans_of_small_and_large_runs_hold_together(name, world_size, layout):
    found = plan(world_size, of_model(name) | layout)
    assert [str(error) for error in found.contradictions] == []
    degrees, items = found.facts.degrees, found.memory.items
    assert degrees.world_size == world_size
    # Every shard together is the model: padding, and unequal stages, make the largest a little more.
    copies = degrees.replicate
    even = found.numel * 4 * copies / world_size
    assert even <= items["parameters"] <= 1.6 * even
    assert items["optimiser state"] == pytest.approx(2 * items["parameters"], rel=0.01)
    assert items["reference"] == items["parameters"] == items["gradients"]
    assert found.generator.sequences >= 1
    written = json.loads(json.dumps(as_json(found)))
    assert written["memory"]["phases"]["training"] == found.memory.total("training")
    shown = render(found)
    assert "no contradictions" in shown
    assert f"= {world_size} rank(s) on cuda" in shown


@pytest.mark.parametrize(
    ("name", "world_size", "overrides"),
    [
        ("8B", 1, {}),
        ("70B", 1, {}),
        ("70B", 8, {TP: 8, GENERATOR_TP: 8}),
        ("MoE", 1, {}),
        ("MoE", 8, {EP: 8}),
    ],
)
def test_a_model_that_does_not_fit_is_told_by_how_much_and_what_to_change(name, world_size, overrides):
    found = plan(world_size, of_model(name) | overrides)
    phases = {p for p in found.memory.phases if found.memory.total(p) > 80 * GIB}
    messages = [str(error) for error in found.contradictions]
    assert "training" in phases
    for phase in phases:
        (message,) = [
            m for m in messages if m.startswith(f"the memory of a rank during {phase} must be at most")
        ]
        over = (found.memory.total(phase) - 80 * GIB) / GIB
        assert f", {over:.1f} too much: " in message
        assert "Shard over" in message
    assert "does not fit" in render(found)


def test_the_advised_number_of_ranks_fits():
    message = next(
        str(error) for error in plan(1, of_model("8B")).contradictions if "during training" in str(error)
    )
    world_size = int(message.split("(--world-size ")[1].split(")")[0])
    fits = plan(world_size, of_model("8B"))
    assert fits.memory.total("training") <= 80 * GIB
    assert plan(world_size // 2, of_model("8B")).memory.total("training") > 80 * GIB


def test_llama3_8b_over_64_ranks_by_hand():
    found = plan(64)
    assert found.numel == 8_030_261_248
    assert found.memory.items["parameters"] == 8_030_261_248 * 4 // 64 == 501_891_328
    assert found.generator.bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found.memory.items["weights in transit"] == 128_256 * 4096 * 4


@pytest.mark.parametrize("name", ["8B", "MoE", "0.6B"])
def test_three_forward_passes_over_a_whole_row_are_torchtitans_operations(name):
    config = configured(of_model(name))
    sizes = shard_on_meta(config, config.model_spec, world_size=1)
    facts = read_run(config, world_size=1, device_type="cuda")
    ours = 3 * forward_flops_per_token(facts.architecture, sizes, context=config.training.seq_len)
    # TorchTitan counts the embedding's look-up as a product in a mixture of experts.
    assert ours == pytest.approx(sizes.flops_per_token, rel=0.0 if name == "8B" else 0.2)


def test_the_batch_is_that_of_validate():
    facts = plan(8).facts
    assert batch_plan(facts).rows_per_rank == 256


CONTRADICTIONS = {
    "ranks": (6, {TP: 4}, [TP, "6 rank(s)", "Start 4 or 8 ranks"]),
    "heads": (64, {TP: 64}, [TP, "[model]", "Set 8; possible are 1, 2, 4, 8"]),
    "stages": (64, {PP: 64, "training.local_batch_size": 64}, [PP, "32 layers ([model])", "Set at most 32"]),
    "rows": (8, {TP: 8, "training.seq_len": 8196}, ["training.seq_len", TP, "Set 8200 or 8192"]),
    "blocks": (
        8,
        {"parallelism.context_parallel_degree": 8, "training.seq_len": 8320},
        ["training.seq_len", "context_parallel_degree = 8", "Set 9216 or 8192"],
    ),
    "experts": (
        6,
        {"model.name": "qwen3", "model.flavor": "30B-A3B", EP: 3},
        [EP, "128 experts ([model])", "Set 2"],
    ),
    "no experts": (8, {EP: 2}, [EP, "without experts ([model])", "Remove it"]),
    "tied": (
        8,
        {"model.name": "qwen3", "model.flavor": "0.6B", PP: 2, "training.local_batch_size": 2},
        [PP, "([model])", "data_parallel_shard_degree"],
    ),
    "generator ranks": (6, {GENERATOR_TP: 4}, [GENERATOR_TP, "ranks (6)", "Set 2; possible are 1, 2"]),
    "generator heads": (24, {GENERATOR_TP: 12}, [GENERATOR_TP, "32 attention heads ([model])", "Set 8"]),
    "schedule": (
        8,
        {PP: 2, "parallelism.pipeline_parallel_schedule": "DualPipeV"},
        ["parallelism.pipeline_parallel_schedule", PP, 'Set "Interleaved1F1B"'],
    ),
    "micro-batches": (8, {PP: 4}, ["training.local_batch_size", PP, "Set 4 or more"]),
    "length": (
        8,
        {"training.seq_len": 2048},
        [
            "training.seq_len",
            "data.max_prompt_tokens + sampling.max_tokens = 4096",
            "Set training.seq_len = 4096",
        ],
    ),
    "steps": (
        8,
        {"algorithm.steps_per_iteration": 1000},
        ["algorithm.steps_per_iteration", "data.prompts_per_iteration = 512"],
    ),
    "cache": (
        8,
        {MEMORY: 0.15},
        [MEMORY, "data.max_prompt_tokens + sampling.max_tokens = 4096", GENERATOR_TP, "Set 0.2"],
    ),
    "sampling": (8, {"sampling.top_p": 0.9}, ["sampling.top_p", "sampling.temperature"]),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_contradiction_is_found_with_both_keys_and_a_way_out(kind):
    world_size, overrides, parts = CONTRADICTIONS[kind]
    messages = [str(error) for error in plan(world_size, overrides).contradictions]
    assert any(all(part in message for part in parts) for message in messages), messages


def test_all_contradictions_are_told_at_once():
    overrides = {TP: 3, "sampling.top_p": 0.9, "training.seq_len": 2048}
    keys = [error.where for error in plan(8, overrides).contradictions]
    assert keys == [TP, TP, "training.seq_len", "training.seq_len", "sampling.top_p"]


def test_on_a_cpu_the_cache_has_a_size_of_its_own():
    small = plan(1, {"generator.kv_cache_gib": 0.5}, device="cpu", gib=0)
    (message,) = [str(error) for error in small.contradictions]
    assert message.startswith("generator.kv_cache_gib must leave a KV cache of 1 GiB for one sequence")
    assert small.facts.compute_bytes == 4


def test_torchtitan_has_the_last_word_on_a_layout(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("not today")

    config = configured({})
    monkeypatch.setattr(config.model_spec, "parallelize_fn", refuse)
    found = make_plan(config, world_size=8, device_type="cuda", device_bytes=80 * GIB)
    assert "TorchTitan said: not today" in str(found.contradictions[0])
    assert "1 contradiction(s)" in render(found)
    assert "memory" not in as_json(found)


def test_the_model_of_the_configuration_stays_as_it_is():
    config = configured({})
    before = repr(llama3("8B").model.layers[0].attention.rope)
    shard_on_meta(config, config.model_spec, world_size=64)
    assert repr(config.model_spec.model.layers[0].attention.rope) == before


MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def test_the_command_plans_70b_on_4096_ranks_within_4_gib_and_says_so_in_json():
    layout = [f"--{TP}", "8", f"--{PP}", "4", "--training.local_batch_size", "8", f"--{GENERATOR_TP}", "8"]
    command = ["plan", str(CONFIG), "--world-size", "4096", "--json", "--model.flavor", "70B", *layout]
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, sys.executable, "-m", "titan_rl.cli", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(result.stdout)
    assert written["contradictions"] == []
    assert written["bubble"] == pytest.approx(3 / 11)
    assert written["mesh"] == {
        "replicate": 1, "shard": 128, "context": 1, "tensor": 8, "pipeline": 4, "expert": 1
    }  # fmt: skip
    assert int(result.stderr.splitlines()[-1]) * 1024 < 4 * GIB


def test_the_command_exits_with_2_and_the_line_of_the_key(tmp_path, capsys):
    from titan_rl import cli

    file = tmp_path / "run.toml"
    file.write_text(CONFIG.read_text().replace("seq_len = 8192", "seq_len = 2048"))
    assert cli.main(["plan", str(file), "--world-size", "8"]) == 2
    shown = capsys.readouterr().out
    assert f"{file}:" in shown
    assert "training.seq_len must hold a whole sample" in shown


def test_other_trainers_are_refused(capsys):
    from titan_rl import cli

    path = str(ROOT / "train_configs" / "tiny_dpo.toml")
    assert cli.main(["plan", path, "--world-size", "2"]) == 2
    assert 'trainer must be "rl"' in capsys.readouterr().err
