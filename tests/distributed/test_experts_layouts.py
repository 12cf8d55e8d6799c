"""Mixtures of experts in every layout against one rank: losses, all gradients, biases of routers, the stream.

The computation is in experts_worker.py: once in this process as the only rank, on padded rows, and on
two and on four gloo ranks, on packed ones. "Equal": per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32;
the loss and the gradient of the critic's bias within 1e-6 of their terms (steps.py).
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.distributed import experts_worker, launching
from tests.distributed.experts_worker import LAYOUTS, MODELS, NAMES, ONE, ExpertsSetup, step_of
from tests.distributed.steps import BIAS, check_equal, has_equal_loss, unequal
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.titan.router_load import RouterLoad

pytestmark = pytest.mark.slow
PADDED = "one_of_eight"
# Those of four ranks take a minute and a half: `make scale`.
CASES = [
    pytest.param(world_size, layout, marks=[pytest.mark.scale] if world_size > 2 else [])
    for world_size, layouts in LAYOUTS.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    experts_worker.write_model(directory)
    return directory


@pytest.fixture(scope="module")
def launched(directory) -> Callable[[int], Path]:
    """Launch of a world size, on first use."""

    @functools.cache
    def launch(world_size: int) -> Path:
        launching.on_ranks(experts_worker, directory, world_size)
        return directory

    return launch


@pytest.fixture(scope="module")
def alone(directory):
    """This process as the only rank: what each model gave, and more about DeepSeek-V3's routers."""
    with launching.only_rank(directory):
        found = {}
        for model in MODELS:
            setup = ExpertsSetup(directory, model, **ONE)
            found[model] = experts_worker.compute(setup, PADDED)
        shared = {
            model: experts_worker.compute(ExpertsSetup(directory, model, **ONE), "shared") for model in MODELS
        }
        return SimpleNamespace(
            found=found, shared=shared, counted=_count(setup), recomputed=_checkpointed(directory)
        )


def read(folder: Path, model: str, layout: str):
    stem = folder / f"{model}.{layout}"
    return load_file(f"{stem}.safetensors"), json.loads(Path(f"{stem}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_a_layout_gives_the_loss_and_gradients_of_one_rank(launched, alone, world_size, layout, model, name):
    found = read(launched(world_size), model, layout), alone.found[model]
    got, expected = (step_of(*each, name) for each in found)
    assert any("experts" in key for key in expected.gradients)
    assert any("router" in key for key in expected.gradients)
    assert name == "grpo" or any(key.startswith("critic.") and "experts" in key for key in expected.gradients)
    check_equal(got, expected)


@pytest.mark.parametrize("model", MODELS)
def test_planted_faults_of_1e_5_of_the_terms_of_a_sum_are_noticed(alone, model):
    expected = step_of(*alone.found[model], "ppo")
    bias = expected.gradients[BIAS] + 1e-5 * expected.sizes[BIAS]
    got = dataclasses.replace(
        expected,
        loss=expected.loss + 1e-5 * expected.sizes["loss"],
        gradients=expected.gradients | {BIAS: bias},
    )
    assert unequal(got, expected) == [BIAS]
    assert not has_equal_loss(got, expected)


@pytest.mark.parametrize("model", MODELS)
def test_planted_fault_tokens_that_do_not_come_back_are_noticed(launched, alone, model):
    got = step_of(*read(launched(2), model, "ep2"), "tokens_lost")
    expected = step_of(*alone.found[model], "grpo")
    assert len(unequal(got, expected)) > len(expected.gradients) / 2
    assert not has_equal_loss(got, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_the_stream_is_the_same_from_every_layout(launched, alone, world_size, layout, model):
    assert read(launched(world_size), model, layout)[1]["stream"] == alone.found[model][1]["stream"]


def test_the_stream_of_one_rank_is_the_file(directory, alone):
    stored = load_file(directory / "model" / "model.safetensors")
    assert sum(".experts." in name for name in stored) == 2 * 8 * 3
    assert alone.found["qwen3_moe"][1]["stream"] == {n: tensor_checksum(t) for n, t in stored.items()}


def test_the_stream_of_deepseek_holds_each_expert_and_the_bias_of_each_router(alone):
    _, rest = alone.found["deepseek_v3"]
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp"
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = {f"{prefix}.experts.{expert}.{projection}.weight" for expert in range(8)}
            assert names < rest["stream"].keys()
        bias = torch.tensor(rest["balance"]["before"]["policy"][f"layers.{layer}.moe.expert_bias_E"])
        assert bias.abs().min() > 0
        assert rest["stream"][f"{prefix}.gate.e_score_correction_bias"] == tensor_checksum(bias)


# ------------------------------------------------------------------------------------ the routers' biases


def _moved(before, counts):
    """Wang et al. 2024 as TorchTitan has it: a step against the sign of the excess load, then centred."""
    delta = 1e-3 * torch.sign(counts.mean() - counts)
    return torch.tensor(before) + delta - delta.mean()


def _count(setup: ExpertsSetup):
    """What the policy's routers do with each token of the step, seen from outside, and the step."""
    batch, policy = setup.batch("ppo", PADDED), setup.rank.policy
    moes = {int(name): block.moe for name, block in policy.parts[0].layers.items() if block.moe_enabled}
    counts = {layer: torch.zeros(8) for layer in moes}
    before = experts_worker.biases(policy)
    seen = {}
    handles = [
        moe.router.register_forward_hook(lambda m, a, out, layer=layer: seen.update({layer: out[1]}))
        for layer, moe in moes.items()
    ]
    for micro_batch in batch.micro_batches:
        policy.scores([micro_batch], lambda _, hidden: hidden.states[..., 0])
        for layer in moes:
            for chosen in seen[layer][micro_batch.sample_index >= 0].tolist():
                for expert in chosen:
                    counts[layer][expert] += 1
    for handle in handles:
        handle.remove()
    balance = setup.balance(PADDED)
    # What TorchTitan's own counters hold: every token of every pass in training mode, padding included.
    policy.scores(batch.micro_batches, lambda _, hidden: hidden.states[..., 0])
    own = {layer: moe.tokens_per_expert_E.clone() for layer, moe in moes.items()}
    real = sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
    return SimpleNamespace(counts=counts, before=before, after=balance["after"]["policy"], own=own, real=real)


def _checkpointed(directory: Path):
    """Assignments that a checkpointed critic counted, and what it hands to TorchTitan's hook."""
    setup = ExpertsSetup(directory, "deepseek_v3", **ONE)
    setup.rank.config.activation_checkpoint = FullAC.Config()
    batch, critic = setup.batch("ppo", PADDED), setup.critic
    critic.accumulate(
        batch.micro_batches,
        returns=batch.returns,
        old_values=batch.values,
        num_loss_tokens=batch.num_loss_tokens,
    )
    load: RouterLoad = critic.model._router_load
    counts = load.take()
    handed = [moe.tokens_per_expert_E.tolist() for moe in load._mixtures()]
    real = sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
    return SimpleNamespace(counts=counts, handed=handed, real=real)


def test_a_step_moves_the_bias_by_the_sign_of_the_load_of_its_real_tokens(alone):
    counted = alone.counted
    for layer, counts in counted.counts.items():
        assert counts.sum() == 3 * counted.real
        name = f"layers.{layer}.moe.expert_bias_E"
        expected = _moved(counted.before[name], counts)
        assert expected.tolist() != counted.before[name]
        torch.testing.assert_close(torch.tensor(counted.after[name]), expected, rtol=0, atol=1e-7)


def test_planted_fault_torchtitans_own_counters_would_move_it_elsewhere(alone):
    counted = alone.counted
    moves = [
        (_moved(counted.before[name], counts), _moved(counted.before[name], counted.own[layer]))
        for layer, counts in counted.counts.items()
        for name in [f"layers.{layer}.moe.expert_bias_E"]
    ]
    assert all(counted.own[layer].sum() > counts.sum() for layer, counts in counted.counts.items())
    assert any(not torch.equal(right, wrong) for right, wrong in moves)


def test_the_second_pass_of_a_checkpointed_layer_is_not_counted(alone):
    recomputed = alone.recomputed
    for counts, handed in zip(recomputed.counts.values(), recomputed.handed, strict=True):
        assert sum(counts) == 3 * recomputed.real
        assert handed == [2 * count for count in counts]  # TorchTitan's hook halves them


@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_the_biases_of_policy_and_critic_move_alike_in_every_layout(launched, alone, world_size, layout):
    found = read(launched(world_size), "deepseek_v3", layout), alone.found["deepseek_v3"]
    got, expected = (rest["balance"] for _, rest in found)
    assert got["load"]["policy"] == pytest.approx(expected["load"]["policy"], rel=1e-6)
    assert got["load"]["critic"] == pytest.approx(expected["load"]["critic"], rel=1e-6)
    for model in ("policy", "critic"):
        assert len(expected["after"][model]) == 2
        for name, after in expected["after"][model].items():
            assert after != expected["before"][model][name]
            assert got["after"][model][name] == pytest.approx(after, abs=1e-7)


@pytest.mark.parametrize("model", MODELS)
def test_rows_that_share_prompts_give_the_same_loss_gradients_load_and_biases(alone, model):
    (tensors, got), (_, expected) = alone.shared[model], alone.found[model]
    for name in NAMES:
        check_equal(step_of(tensors, got, name), step_of(*alone.found[model], name))
    for kind in ("policy", "critic"):  # a prompt's tokens count once for each sample that has them
        assert got["balance"]["load"][kind] == pytest.approx(expected["balance"]["load"][kind], rel=1e-6)
        for name, after in expected["balance"]["after"][kind].items():
            assert got["balance"]["after"][kind][name] == pytest.approx(after, abs=1e-7)


@pytest.mark.parametrize("model", MODELS)
def test_the_load_of_the_routers_is_reported(alone, model):
    load = alone.found[model][1]["balance"]["load"]
    for values in load.values():
        assert 0 < values["load_entropy"] < 1
        assert values["load_fraction_min"] < 1 / 8 < values["load_fraction_max"]
