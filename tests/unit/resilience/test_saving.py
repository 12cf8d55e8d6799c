"""The manager's own decisions that need no run: what differs from a checkpoint, and how a failure is told."""

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from titan_rl.errors import ConfigError, SaveError
from titan_rl.resilience.saving import CheckpointManager, _difference, _find_non_finite, describe


def test_tensors_that_are_missing_or_of_another_shape_are_named():
    stored = {"a": ((2, 3), "float32"), "b": ((4,), "float32")}
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "step": 7}
    assert _difference(state, stored) is None
    state |= {"b": torch.zeros(5), "c": torch.zeros(1)}
    assert _difference(state, stored) == "b [4] instead of [5], c missing instead of [1]"
    many = {f"layer.{index}": torch.zeros(1) for index in range(5)}
    assert _difference(many, stored).endswith(" and 2 more")


def test_a_failure_is_one_line_with_the_rank_that_failed():
    error = CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})
    assert describe(error) == "rank 1: OSError: [Errno 28] No space left on device"
    assert describe(SaveError("rank 0: OSError: full\nand more")) == "rank 0: OSError: full"
    assert describe(ValueError()) == "ValueError: ValueError()"


def test_a_remote_folder_is_refused():
    config = CheckpointManager.Config(enable=True, folder="gs://bucket/run")
    with pytest.raises(ConfigError, match=r"checkpoint\.folder must be a directory that all ranks share"):
        CheckpointManager(config, base_folder="unused")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(bad):
    state = {"model": {"a": torch.zeros(3), "step": 7}, "optimizer": {"b": {"moment": torch.zeros(2, 2)}}}
    state["optimizer"]["none"] = torch.zeros(0)
    assert _find_non_finite(state) is None
    state["optimizer"]["b"]["moment"] += 3.4e38  # whose sum is not finite
    assert _find_non_finite(state) is None
    state["optimizer"]["b"]["moment"][1, 0] = bad
    assert _find_non_finite(state).startswith("optimizer.b.moment from ")
