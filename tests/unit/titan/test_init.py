"""Shards of a random model on a CPU are slices of one whole draw.

A fake process group lets this process stand on rank 1 of 4; nothing here communicates. All ranks together are
in tests/distributed/test_fsdp_two_ranks.py.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.common import Linear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module

from titan_rl.titan import device
from titan_rl.titan.init import copy_full

device.install()

RANK, WORLD_SIZE = 1, 4
ROWS = slice(3, 6)  # rank 1's of 10 rows over 4 ranks
NORMAL = partial(nn.init.normal_, std=0.02)


@pytest.fixture
def make_mesh():
    """A mesh of a given shape. The rank is the same in the whole file: torch caches layouts by mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    yield lambda shape=(WORLD_SIZE,): init_device_mesh("cpu", shape)
    dist.destroy_process_group()


def sharded(module, mesh, placements, name="weight", dtype=torch.float32):
    """Put a sharded parameter of zeros in the place of one of a module's."""
    whole = module._parameters[name]
    local = torch.zeros(_local_shape(whole.shape, mesh, placements), dtype=dtype)
    parameter = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    module._parameters[name] = nn.Parameter(parameter)
    return module._parameters[name]


def _local_shape(shape, mesh, placements):
    size = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunk = -(-size[placement.dim] // mesh.size(axis))
            start = mesh.get_local_rank(axis) * chunk
            size[placement.dim] = max(0, min(chunk, size[placement.dim] - start))
    return size


def linear(**param_init):
    return Linear.Config(in_features=3, out_features=10, param_init=param_init or {"weight": NORMAL}).build()


def whole_draw(seed=3):
    module = linear()
    torch.manual_seed(seed)
    module.init_states()
    return module.weight.detach().clone()


def test_a_shard_is_a_slice_of_the_draw_of_one_rank(make_mesh):
    module = linear()
    parameter = sharded(module, make_mesh(), [Shard(0)])
    torch.manual_seed(3)
    module.init_states()
    assert module.weight is parameter  # optimisers and FSDP hold this object
    assert parameter.requires_grad
    assert torch.equal(parameter.to_local(), whole_draw()[ROWS])


def test_planted_fault_torchtitans_own_initialisation_gives_no_such_slice(make_mesh, monkeypatch):
    captured = [cell.cell_contents for cell in Module._init_self_parameters.__closure__]
    (titans,) = [function for function in captured if callable(function)]
    monkeypatch.setattr(Module, "_init_self_parameters", titans)
    module = linear()
    parameter = sharded(module, make_mesh(), [Shard(0)])
    torch.manual_seed(3)
    module.init_states()
    assert not torch.equal(parameter.to_local(), whole_draw()[ROWS])


def test_replicas_hold_the_same_and_shards_of_columns_fit(make_mesh):
    module = linear()
    parameter = sharded(module, make_mesh((2, 2)), [Replicate(), Shard(1)])
    torch.manual_seed(3)
    module.init_states()
    assert torch.equal(parameter.to_local(), whole_draw()[:, 2:])


def test_low_precision_is_drawn_in_its_own_dtype(make_mesh):
    module = linear()
    parameter = sharded(module, make_mesh(), [Shard(0)], dtype=torch.bfloat16)
    torch.manual_seed(3)
    module.init_states()
    torch.manual_seed(3)
    expected = torch.empty(10, 3, dtype=torch.bfloat16).normal_(std=0.02)
    assert torch.equal(parameter.to_local(), expected[ROWS])


def test_the_stream_of_random_numbers_goes_on_as_on_one_rank(make_mesh):
    whole_draw()
    expected = torch.rand(3)
    module = linear()
    sharded(module, make_mesh(), [Shard(0)])
    torch.manual_seed(3)
    module.init_states()
    assert torch.equal(torch.rand(3), expected)


def test_a_parameter_that_is_left_to_another_module_keeps_its_values(make_mesh):
    module = linear(weight=skip_param_init)
    parameter = sharded(module, make_mesh(), [Shard(0)])
    with torch.no_grad():
        parameter.to_local().fill_(7.0)
    module.init_states()
    assert parameter.to_local().eq(7.0).all()


def test_a_failing_initialiser_leaves_the_sharded_parameter_in_place(make_mesh):
    def fail(parameter):
        raise ArithmeticError("no draw")

    module = linear(weight=fail)
    parameter = sharded(module, make_mesh(), [Shard(0)])
    with pytest.raises(ArithmeticError, match="no draw"):
        module.init_states()
    assert module.weight is parameter


def test_parameters_that_are_whole_are_initialised_by_torchtitan():
    module = linear()
    torch.manual_seed(3)
    NORMAL(module.weight)
    assert torch.equal(module.weight, whole_draw())


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_full_tensor_is_copied_into_a_parameter_of_any_placement(make_mesh, placement):
    mesh = make_mesh()
    module = linear()
    parameter = sharded(module, mesh, [placement])
    full = torch.arange(30.0).view(10, 3)
    copy_full(parameter, full)
    assert torch.equal(parameter.to_local(), full[ROWS] if placement == Shard(0) else full)


def test_a_full_tensor_is_copied_into_a_plain_parameter():
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    copy_full(parameter, torch.full((2, 3), 1.5))
    assert parameter.eq(1.5).all()
