"""Scalars over the data-parallel ranks, as far as one process can tell. Two ranks: test_fsdp_two_ranks.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titan_rl.titan.collectives import Collectives


@pytest.fixture(autouse=True)
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone():
    return Collectives(SimpleNamespace(dp_enabled=False), torch.device("cpu"))


def in_a_group():
    """A data-parallel group of one, so that the reduction itself runs."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("batch",))
    return Collectives(
        SimpleNamespace(dp_enabled=True, get_mesh=lambda name: mesh[name]), torch.device("cpu")
    )


@pytest.mark.parametrize("make", [alone, in_a_group])
@pytest.mark.parametrize("how", ["sum", "max", "min"])
def test_one_rank_gets_its_own_values_back_under_their_names(make, how):
    collectives = make()
    values = {"b": 3, "a": -0.1, "c": 2.0**53 + 2}
    assert collectives.reduce(values, how) == values
    assert collectives.reduce({}, how) == {}
    assert collectives.reduce_scalar(0.3, how) == 0.3
    place = (collectives.rank, collectives.world_size, collectives.data_rank, collectives.data_size)
    assert place == (0, 1, 0, 1)


@pytest.mark.parametrize("make", [alone, in_a_group])
def test_numbers_and_bytes_come_back(make):
    collectives = make()
    for numbers in ([], [3, -(2**62), 0]):
        assert collectives.gather_integers(numbers) == [numbers]
    for content in (b"", b"\0\xff" * 1000):
        assert collectives.send([content]) == [content]


@pytest.mark.parametrize("make", [alone, in_a_group])
def test_flags_and_texts_are_those_of_this_rank(make):
    collectives = make()
    assert collectives.any(True)
    assert not collectives.any(False)
    assert collectives.first("Grüße") == (0, "Grüße")
    assert collectives.first(None) is None
    assert collectives.first("") == (0, "")
    assert collectives.first("a" * 1999 + "ü") == (0, "a" * 1999)  # no half character
    collectives.barrier()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    assert str(in_a_group().reduce_scalar(value, "sum")) == str(value)
