"""The critic on two gloo ranks of FSDP against one: values, gradients, checkpoints, skipped steps.

The computation is in critic_worker.py: once on two forked ranks, once in this process with one.
"Equal" for gradients: per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.distributed import comparing, critic_worker, fsdp_worker, launching
from tests.distributed.comparing import random_peer, unequal

pytestmark = pytest.mark.slow

VALUES = 1e-5
MODELS = ("llama", "qwen3_tied")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("critic")
    for seed, name in enumerate(MODELS):
        random_peer(name, seed=seed).save_pretrained(directory / name)
    launching.compute(critic_worker, directory)
    return launching.results(directory)


def gradients(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    return comparing.gradients(tensors, f"gradient/{case}", at_least=17)


# --------------------------------------------------------------------------------------- values, gradients


def test_the_head_is_drawn_alike_on_one_rank_and_on_two(launch):
    assert torch.equal(launch.alone["head"], launch.sharded["head"])
    assert 0.2 < launch.alone["head"].std() < 0.4
    assert [rank["step"]["shard_rows"] for rank in [launch.one, *launch.two]] == [1, 1, 0]


@pytest.mark.parametrize("layout", critic_worker.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_depend_on_neither_layout_nor_ranks(launch, layout, world_size):
    expected = launch.alone["values/one_of_eight"]
    got = (launch.alone if world_size == 1 else launch.sharded)[f"values/{layout}"]
    assert expected.std() > 0.3
    assert (expected != 0).sum() == sum(fsdp_worker.LENGTHS)  # of every real token, the last ones too
    torch.testing.assert_close(got, expected, rtol=0, atol=VALUES)


@pytest.mark.parametrize("layout", critic_worker.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_of_a_step_depends_on_neither_layout_nor_ranks(launch, layout, world_size):
    assert launch.one["step"]["micro_batches"] == {"eight_of_one": 8, "one_of_eight": 1, "packed": 3}
    expected = gradients(launch.alone, "one_of_eight")
    got = gradients(launch.alone if world_size == 1 else launch.sharded, layout)
    assert unequal(got, expected) == []


@pytest.mark.parametrize("case", ["one_rank_empty", "resharded", "replicated", "recomputed"])
def test_gradients_are_equal_however_the_critic_is_spread(launch, case):
    assert unequal(gradients(launch.sharded, case), gradients(launch.alone, "one_of_eight")) == []


def test_gradients_beside_a_policy_that_ties_its_embedding_are_equal_on_one_rank_and_two(launch):
    assert unequal(gradients(launch.sharded, "tied"), gradients(launch.alone, "tied")) == []
    assert gradients(launch.alone, "tied")["lm_head.weight"].shape == (1, 72)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fault", ["mean_per_micro_batch", "leaking"])
def test_planted_faults_are_noticed(launch, fault, world_size):
    tensors = launch.alone if world_size == 1 else launch.sharded
    expected = gradients(launch.alone, "one_of_eight")
    assert len(unequal(gradients(tensors, f"fault/{fault}"), expected)) == len(expected)


def test_planted_fault_a_mean_over_ranks_is_noticed(launch):
    expected = gradients(launch.alone, "one_of_eight")
    got = gradients(launch.sharded, "fault/averaged_over_ranks")
    assert len(unequal(got, expected)) == len(expected)


def test_masked_tokens_get_no_gradient_at_all(launch):
    for rank in [launch.one, *launch.two]:
        assert rank["step"]["masked"]["masked"] == 0.0
        assert rank["step"]["masked"]["trained"] > 1e-4


def test_a_value_model_is_the_same_under_tensor_parallelism(launch):
    assert [rank["tensor_parallel"] for rank in [launch.one, *launch.two]] == [[1, 256]] * 3
    values = launch.alone["tensor_parallel/values"]
    assert values.std() > 0.1
    torch.testing.assert_close(launch.sharded["tensor_parallel/values"], values, rtol=0, atol=VALUES)
    case = "tensor_parallel"
    assert unequal(gradients(launch.sharded, case), gradients(launch.alone, case)) == []


# ------------------------------------------------------------------------------------- checkpoints, faults


def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(launch):
    for rank in [launch.one, *launch.two]:
        state = rank["state"]
        assert state["loaded"] == state["saved"]
        assert state["resumed"] == state["end"]
        assert state["resumed_norms"] == state["norms"][2:]
        assert state["end"]["steps"] == [4, 0]
        # The comparisons above compare with something: everything has changed on the way.
        weights = [key for key in state["saved"] if key.startswith("model/") and "lm_head" not in key]
        assert len(weights) >= 19
        assert all(state["end"][key] != state["saved"][key] != state["start"][key] for key in weights)
        assert state["start"]["rates"] != state["saved"]["rates"]


def test_a_checkpoint_of_two_ranks_is_read_by_one(launch):
    assert torch.equal(launch.alone["from_two_ranks/head"], launch.sharded["saved/head"])
    assert not torch.equal(launch.alone["from_two_ranks/head"], launch.alone["head"])
    assert launch.one["state"]["from_two_ranks"] == [2, 0]


def test_training_moves_the_weights_alike_on_one_rank_and_on_two(launch):
    names = [name for name in launch.alone if name.startswith("trained/")]
    assert len(names) >= 20
    for name in names:
        torch.testing.assert_close(launch.sharded[name], launch.alone[name], rtol=0, atol=1e-5)
    for a, b in zip(launch.one["state"]["norms"], launch.two[0]["state"]["norms"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert launch.one["state"]["norms"][0] > 0.5  # so that the gradient was clipped


def test_an_infinity_on_one_rank_skips_the_step_on_all_and_is_counted(launch):
    for rank in [launch.one, *launch.two]:
        found = rank["not_finite"]
        assert found["applied"] == [False, True]
        assert found["norm"][0] in ("nan", "inf")
        assert found["unchanged"][0] == {}
        assert len(found["unchanged"][1]) >= 19
        assert found["steps"] == [[0, 1], [1, 1]]
