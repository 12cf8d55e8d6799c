"""Leaving samples without a gradient out of the forward-backward changes the work, not the result."""

import pytest
from safetensors.torch import load_file

from tests.integration import runs

pytestmark = pytest.mark.slow
CONFIG = runs.CONFIGS / "grpo.toml"
STEPS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory, initial_load_path):
    folder = tmp_path_factory.mktemp("skip")
    common = ("checkpoint.initial_load_path", initial_load_path, "training.steps", STEPS)
    common += ("loss.kl.coefficient", 0.0)
    return [
        runs.start(CONFIG, *common, "batching.skip_zero_advantages", flag, folder=folder / flag).succeed()
        for flag in ("true", "false")
    ]


def test_the_policy_is_the_same(pair):
    skipping, whole = (load_file(run.folder / "export" / "model.safetensors") for run in pair)
    for name, value in whole.items():
        difference = (skipping[name] - value).norm() / value.norm()
        assert difference <= 1e-5, name


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
