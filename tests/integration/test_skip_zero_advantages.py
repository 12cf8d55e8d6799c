"""Leaving out samples without a gradient, and sharing prompts, change the work and not the result."""

import pytest
from safetensors.torch import load_file

from tests.integration import runs

pytestmark = pytest.mark.slow
CONFIG = runs.CONFIGS / "grpo.toml"
STEPS = 4


@pytest.fixture(scope="module")
def work(tmp_path_factory, initial_load_path):
    folder = tmp_path_factory.mktemp("skip")
    common = ("checkpoint.initial_load_path", initial_load_path, "training.steps", STEPS)
    common += ("loss.kl.coefficient", 0.0)
    options = {
        "least": (),
        "all": ("batching.skip_zero_advantages", "false"),
        "alone": ("batching.share_prompts", "off"),
    }
    return {
        name: runs.start(CONFIG, *common, *own, folder=folder / name).succeed()
        for name, own in options.items()
    }


@pytest.fixture(scope="module")
def pair(work):
    return work["least"], work["all"]


@pytest.mark.parametrize("other", ["all", "alone"])
def test_the_policy_is_the_same(work, other):
    least, whole = (
        load_file(work[name].folder / "export" / "model.safetensors") for name in ("least", other)
    )
    for name, value in whole.items():
        difference = (least[name] - value).norm() / value.norm()
        assert difference <= 1e-5, name


def test_prompts_are_shared_by_themselves(work):
    shared, alone = (work[name].metrics()["batch/micro_batches"] for name in ("least", "alone"))
    assert all(shared[step] <= alone[step] for step in alone)
    assert sum(shared.values()) < sum(alone.values())


def test_rollouts_and_losses_are_the_same_and_less_was_computed(pair):
    skipping, whole = (run.metrics() for run in pair)
    assert any(value > 0 for value in whole["reward/equal_groups_fraction"].values())
    for step in range(1, STEPS + 1):
        for name in ("reward/mean", "throughput/trained_tokens"):
            assert skipping[name][step] == whole[name][step]
        assert skipping["loss/policy_loss"][step] == pytest.approx(whole["loss/policy_loss"][step], abs=1e-6)
        assert skipping["grad_norm"][step] == pytest.approx(whole["grad_norm"][step], rel=1e-4)
    computed = sum(skipping["throughput/computed_tokens"].values())
    assert computed < sum(whole["throughput/computed_tokens"].values())
