"""Low-rank adapters on two gloo ranks of FSDP against one rank: a step of GRPO with its reference.

"Equal" for gradients: per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32; losses within 1e-5 of one.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import comparing, launching, lora_worker
from tests.distributed.comparing import random_peer, unequal

pytestmark = pytest.mark.slow

BOUND = 1e-5
LAYOUTS = lora_worker.LAYOUTS


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("lora")
    random_peer("llama").save_pretrained(directory / "llama")
    launching.compute(lora_worker, directory)
    return SimpleNamespace(
        one=json.loads((directory / "world1.rank0.json").read_text()),
        two=[json.loads((directory / f"world2.rank{rank}.json").read_text()) for rank in (0, 1)],
        alone=load_file(directory / "world1.safetensors"),
        sharded=load_file(directory / "world2.safetensors"),
    )


def gradients(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    return comparing.gradients(tensors, f"gradient/{case}", at_least=28)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_of_the_adapters_depends_on_neither_layout_nor_ranks(launch, layout, world_size):
    got = gradients(launch.alone if world_size == 1 else launch.sharded, layout)
    assert unequal(got, gradients(launch.alone, "one_of_eight")) == []


@pytest.mark.parametrize("case", ["one_rank_empty", "replicated"])
def test_gradients_are_equal_with_a_rank_without_samples_and_with_replicas(launch, case):
    assert unequal(gradients(launch.sharded, case), gradients(launch.alone, "one_of_eight")) == []


@pytest.mark.parametrize("fault", ["averaged_over_ranks", "off"])
def test_planted_faults_are_noticed(launch, fault):
    expected = gradients(launch.alone, "one_of_eight")
    prefix = f"gradient/fault/{fault}/"
    tensors = launch.sharded
    got = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    assert len(unequal(got, expected)) == len(expected)


def test_losses_and_the_norm_of_the_gradient_are_equal(launch):
    expected = launch.one["losses"]["one_of_eight"]
    assert expected["loss/kl_ref"] > 1e-3 if "loss/kl_ref" in expected else len(expected) > 3
    for rank in [launch.one, *launch.two]:
        for layout in LAYOUTS:
            assert rank["losses"][layout] == pytest.approx(expected, rel=BOUND, abs=BOUND)
        assert rank["clipped_from"] == pytest.approx(launch.one["clipped_from"], rel=BOUND)
    assert launch.one["clipped_from"] > 1e-3


def test_the_reference_is_the_base_model_bit_for_bit_and_the_policy_is_not(launch):
    for rank in [launch.one, *launch.two]:
        assert len(rank["reference_is_base"]) >= 2
        assert all(rank["reference_is_base"])
        assert rank["policy_differs"]
        assert all(rank["policy_differs"])


def test_frozen_weights_get_no_gradient(launch):
    assert [rank["frozen_with_gradient"] for rank in [launch.one, *launch.two]] == [[], [], []]


def test_the_stream_of_two_ranks_holds_the_merged_weights_of_one(launch):
    for rank in [launch.one, *launch.two]:
        assert rank["stream"] == rank["base_stream"]
    merged = {name: t for name, t in launch.alone.items() if name.startswith("merged/")}
    assert len(merged) == 21
    for name, tensor in merged.items():
        torch.testing.assert_close(launch.sharded[name], tensor, rtol=0, atol=BOUND)
