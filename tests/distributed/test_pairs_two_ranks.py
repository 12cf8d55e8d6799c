"""One step on preferences: the same loss and gradients in every layout, on one rank and on two.

The computation is in pair_worker.py. "Equal" for gradients: per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in
fp32, before clipping, on 8 preferences of uneven length, the reference other than the policy.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.distributed import comparing, launching, pair_worker
from tests.distributed.comparing import random_peer, unequal

pytestmark = pytest.mark.slow

LOSSES, LAYOUTS = list(pair_worker.LOSSES), list(pair_worker.LAYOUTS)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("pairs")
    random_peer("llama").save_pretrained(directory / "llama")
    launching.compute(pair_worker, directory)
    return launching.results(directory)


def gradients(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    return comparing.gradients(tensors, case, at_least=20, above=1e-7)


def test_the_layouts_differ_as_the_comparisons_below_assume(launch):
    assert launch.one["micro_batches"]["eight_of_one"] == 8
    assert launch.one["micro_batches"]["one_of_eight"] == 1
    assert launch.one["micro_batches"]["packed"] >= 3
    assert launch.two[0]["micro_batches"]["eight_of_one"] == 4


@pytest.mark.parametrize("loss", LOSSES)
def test_one_micro_batch_of_eight_equals_eight_of_one_and_packed_equals_padded_on_one_rank_and_two(
    launch, loss
):
    expected = gradients(launch.alone, f"{loss}/one_of_eight")
    for tensors in (launch.alone, launch.sharded):
        for layout in LAYOUTS:
            assert unequal(gradients(tensors, f"{loss}/{layout}"), expected) == [], layout


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_metrics_are_equal_too(launch, loss):
    expected = launch.one["metrics"][f"{loss}/one_of_eight"]
    assert expected["loss"] > 0
    assert 0 < expected["accuracy"] < 1
    for report in (launch.one, *launch.two):
        for layout in LAYOUTS:
            assert report["metrics"][f"{loss}/{layout}"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("fault", ["mean", "leaking"])
@pytest.mark.parametrize("loss", LOSSES)
def test_planted_faults_a_mean_per_micro_batch_and_leaking_attention_are_noticed(launch, loss, fault):
    for tensors in (launch.alone, launch.sharded):
        expected = gradients(launch.alone, f"{loss}/one_of_eight")
        assert len(unequal(gradients(tensors, f"{loss}/fault/{fault}"), expected)) == len(expected)


def test_planted_fault_a_kl_baseline_per_micro_batch_is_noticed(launch):
    expected = gradients(launch.alone, "kto/one_of_eight")
    assert launch.one["metrics"]["kto/one_of_eight"]["kl_baseline"] > 0
    for tensors in (launch.alone, launch.sharded):
        assert len(unequal(gradients(tensors, "kto/fault/baseline"), expected)) == len(expected)


def test_the_reward_scorer_gives_each_sample_the_same_reward_in_every_layout_and_on_two_ranks(launch):
    expected = launch.one["scores"]["one_of_eight"]
    assert len(expected) == 16
    assert torch.tensor(expected).std() > 0.05
    for report in (launch.one, *launch.two):
        for layout in ("one_of_eight", "packed"):
            assert report["scores"][layout] == pytest.approx(expected, rel=1e-5, abs=1e-5)
