"""Which gradients count as bad, and which micro-batch is kept."""

import math

import pytest
import torch
from safetensors.torch import load_file

from titan_rl.resilience import evidence
from titan_rl.resilience.guard import FEWEST, HISTORY, GradientGuard


def make_guard(norms=(1.0,) * FEWEST, *, spike_factor=10.0, max_norm=1.0):
    guard = GradientGuard(spike_factor=spike_factor, max_norm=max_norm)
    for norm in norms:
        guard.applied(norm)
    return guard


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step_on(norm):
    assert GradientGuard(spike_factor=0, max_norm=1.0).fault(norm) == f"the gradient norm is {norm}"


def test_a_spike_is_so_many_times_the_median():
    guard = make_guard([1.0, 2.0, 3.0, 100.0])  # median 2.5
    assert guard.fault(25.0) is None
    assert "26, more than 10 (resilience.spike_factor) times 2.5" in guard.fault(26.0)


def test_what_clipping_leaves_alone_is_no_spike():
    guard = make_guard([1e-6] * 8)
    assert guard.fault(1.0) is None
    assert guard.fault(1.01) is not None


def test_nothing_is_a_spike_before_enough_steps_are_known_or_with_a_factor_of_nought():
    assert make_guard([1.0] * (FEWEST - 1)).fault(1e9) is None
    assert make_guard(spike_factor=0.0).fault(1e9) is None


def test_steps_without_a_gradient_do_not_count():
    guard = make_guard([0.0] * 100)
    assert guard.fault(1e9) is None


def test_the_median_is_of_the_newest_and_survives_a_checkpoint():
    guard = make_guard([1.0] * HISTORY + [100.0] * (HISTORY // 2 + 1))
    assert guard.fault(500.0) is None
    restored = make_guard([7.0])
    restored.load_state_dict(guard.state_dict())
    assert restored.fault(500.0) is None
    assert guard.fault(1001.0) is not None
    assert restored.fault(1001.0) == guard.fault(1001.0)
    assert restored.state_dict()["norms"].shape == (HISTORY,)
    fewer = make_guard([3.0, 4.0])
    restored.load_state_dict(fewer.state_dict())
    assert torch.equal(restored.state_dict()["norms"][:2], torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert bool(restored.state_dict()["norms"][2:].isnan().all())


def test_the_newest_files_of_a_rank_stay(tmp_path):
    for step in range(1, evidence.MOST_KEPT + 4):
        tensors = {"input_ids": torch.tensor([[step]])}
        path = evidence.keep(tmp_path, step=step, rank=1, tensors=tensors, facts={"step": str(step)})
    evidence.keep(tmp_path, step=1, rank=0, tensors=tensors, facts={})
    names = sorted(p.name for p in (tmp_path / "bad_steps").iterdir())
    assert names[0] == "step-000001.rank-0.safetensors"
    assert len(names) == evidence.MOST_KEPT + 1
    assert names[1] == "step-000004.rank-1.safetensors"
    assert load_file(path)["input_ids"].tolist() == [[evidence.MOST_KEPT + 3]]
