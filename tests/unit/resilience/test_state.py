"""The run's counters in a checkpoint, and what a resume refuses."""

import math
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save

from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.resilience.state import RunState, seed_process


def used_state(**changed) -> RunState:
    state = RunState(**{"seed": 5, "data_fingerprint": "prompts/encoder"} | changed)
    for number, name in enumerate(RunState.FIELDS, start=1):
        setattr(state, name, 10**number)
    state.mean_mismatch = 1.5e-7
    return state


def test_everything_comes_back(tmp_path):
    stored = used_state()
    save({"rl_state": stored.state_dict()}, checkpoint_id=str(tmp_path))
    restored = RunState(seed=5, data_fingerprint="prompts/encoder")
    fresh = {"rl_state": restored.state_dict()}
    dcp.load(fresh, checkpoint_id=str(tmp_path))
    restored.load_state_dict(fresh["rl_state"])
    for name in (*RunState.FIELDS, "mean_mismatch"):
        assert getattr(restored, name) == getattr(stored, name)
        assert getattr(restored, name) != getattr(RunState(seed=5, data_fingerprint=""), name)


def test_it_is_tensors_alone_and_counts_beyond_32_bits():
    state = used_state()
    state.cursor = 2**40
    tensors = state.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    other = used_state()
    other.load_state_dict(tensors)
    assert other.cursor == 2**40


def test_counters_are_whole_numbers_afterwards():
    state = used_state()
    state.load_state_dict(used_state().state_dict())
    assert all(type(getattr(state, name)) is int for name in RunState.FIELDS)
    assert RunState(seed=5, data_fingerprint="").mean_mismatch == math.inf


@pytest.mark.parametrize(
    ("changed", "where", "shown"),
    [
        ({"seed": 6}, "debug.seed", "stay 5 when a run is resumed"),
        ({"data_fingerprint": "others/encoder"}, "data.source", "stay the same when a run is resumed"),
        ({"data_fingerprint": "prompts/other"}, "data.source", "stay the same when a run is resumed"),
    ],
)
def test_another_seed_or_other_prompts_are_refused_and_nothing_is_taken_over(changed, where, shown):
    state = RunState(**{"seed": 5, "data_fingerprint": "prompts/encoder"} | changed)
    with pytest.raises(ConfigError, match=shown) as caught:
        state.load_state_dict(used_state().state_dict())
    assert caught.value.where == where
    assert "dump_folder" in str(caught.value)
    assert state.cursor == 0


@pytest.mark.parametrize("seed", [0, 2**62, 2**63 + 1, -1])
def test_any_seed_fits_into_the_checkpoint(seed):
    state = used_state(seed=seed)
    used_state(seed=seed).load_state_dict(state.state_dict())


def test_process_wide_draws_depend_on_run_iteration_and_rank():
    def draws(*key):
        seed_process(*key)
        return random.random(), torch.rand(1).item()

    base = draws(1, 2, 3)
    assert draws(1, 2, 3) == base
    others = [draws(*key) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert len({base, *others}) == 4


def test_derived_seeds_are_spread_out_and_fixed_for_ever():
    seeds = {derive_seed(0, "train", i, f"p{i}", j, 0) for i in range(100) for j in range(8)}
    assert len(seeds) == 800
    assert len({seed >> 55 for seed in seeds}) > 200  # high bits vary too
    assert derive_seed(1, "a") != derive_seed("1", "a")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    # Written down: a change would silently draw other rollouts in every run that is resumed.
    assert derive_seed(7, "train", 0, "p0", 0, 0) == 8347264955162819698
