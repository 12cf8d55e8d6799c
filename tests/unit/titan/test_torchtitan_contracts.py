"""TorchTitan behaves as the replacements, the overrides and the calls of this package assume."""

import importlib
import inspect
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules
from torchtitan import trainer as titan_trainer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, fsdp, pipeline_parallel
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts
from torchtitan.models import _supported_models, llama3, qwen3
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
)
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from titan_rl.titan import sharded_model
from titan_rl.titan.attention import CpuDocumentAttention
from titan_rl.titan.models import no_loss
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.value_model import ValueHead


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_modules_initialise_their_own_parameters_in_the_method_that_is_replaced():
    calls = []

    class Recording(Module):
        def __init__(self, child=None):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self._param_init = {"weight": nn.init.ones_}
            self.child = child

        def _init_self_parameters(self):
            calls.append(self)
            super()._init_self_parameters()

    inner = Recording()
    outer = Recording(inner)
    outer.init_states()
    assert calls == [inner, outer]
    assert outer.weight.sum() == inner.weight.sum() == 2


def test_fsdp_finds_the_gradient_division_among_its_module_globals():
    assert "disable_fsdp_gradient_division" in fsdp.apply_fsdp_to_decoder.__code__.co_names
    assert fsdp.apply_fsdp_to_decoder.__globals__ is vars(fsdp)
    assert parameters(fsdp.disable_fsdp_gradient_division) == ["model"]
    importers = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torchtitan.models")
        and "disable_fsdp_gradient_division" in vars(module)
        and "flux" not in name  # an image model, which RL does not know
    ]
    assert importers == []


def test_masks_are_made_by_the_global_that_is_replaced():
    assert "_compiled_create_block_mask" in attention.create_attention_mask.__code__.co_names
    assert attention.create_attention_mask.__globals__ is vars(attention)


def test_the_decoder_asks_the_method_that_is_replaced_for_masks():
    asked = []

    class Other(Decoder):
        def _create_flex_attention_mask_for_document(self, positions, attn_config):
            asked.append((positions, attn_config))
            return "spans"

    assert parameters(Decoder._create_flex_attention_mask_for_document)[1:] == ["positions", "attn_config"]
    decoder = Other.__new__(Other)
    nn.Module.__init__(decoder)
    chosen = SimpleNamespace(inner_attention=CpuDocumentAttention.Config())
    decoder.config = SimpleNamespace(first_attention=chosen)
    positions = torch.zeros(1, 4)
    assert decoder.get_attention_masks(positions) == "spans"
    assert asked == [(positions, chosen)]


def test_the_decoder_makes_masks_of_functions_that_are_given():
    names = ["self", "positions", "attn_config", "mask_mods"]
    assert parameters(Decoder._create_flex_attention_mask) == names


def test_our_attention_takes_what_torchtitan_gives_to_its_own():
    assert parameters(CpuDocumentAttention.forward) == parameters(FlexAttention.forward)


def test_the_device_is_a_global_that_other_modules_copy():
    assert {"device_type", "device_module"} <= set(vars(utils))
    copies = [name for name, module in sys.modules.items() if name.startswith("torchtitan.")]
    copies = [name for name in copies if "device_type" in vars(sys.modules[name])]
    assert "torchtitan.distributed.utils" in copies
    assert len(copies) >= 4  # so that replacing utils' alone would not do


def test_the_decoder_without_its_head_returns_hidden_states():
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = []
    with torch.device("cpu"):
        model = spec.model.build()
    model.init_states()
    tokens = torch.tensor([[3, 5]])
    head = model(tokens)
    model._skip_lm_head = True
    assert torch.equal(model.lm_head(model(tokens)), head)


def test_a_sharded_model_prepares_a_micro_batch_as_the_trainer_does(monkeypatch):
    """Masks, then this rank's slice of the rows, then annotations, all with the trainer's arguments."""
    assert parameters(Trainer.post_dataloading_process) == ["self", "input_dict", "labels"]
    assert parameters(prepare_context_parallel_input) == [
        "inputs",
        "labels",
        "extra_kwargs",
        "cp_mesh",
        "device",
        "load_balancer_type",
        "ptrr_mask_key",
    ]
    assert parameters(annotate_input_spmd_types) == ["parallel_dims", "inputs", "labels", "extra_kwargs"]
    asked = []

    def slice_(*arguments):
        asked.append(("slice", *arguments[3:]))
        return arguments[0][:, ::2], arguments[1][:, ::2], arguments[2] | {"sliced": True}

    def annotate(dims, *arguments):
        asked.append(("annotate", dims))
        return arguments

    for module in (titan_trainer, sharded_model):
        monkeypatch.setattr(module, "prepare_context_parallel_input", slice_)
        monkeypatch.setattr(module, "annotate_input_spmd_types", annotate)
    trainer, rows = (
        _trainer_of_a_decoder(),
        SimpleNamespace(input_ids=torch.arange(6).view(1, 6), positions=torch.tensor([[0, 1, 2, 0, 1, 2]])),
    )
    places = torch.arange(6).view(1, 6)
    mesh = trainer.parallel_dims.get_mesh("cp")
    theirs = Trainer.post_dataloading_process(
        trainer, {"input": rows.input_ids, "positions": rows.positions}, places
    )
    inputs, kwargs, index = ShardedModel(trainer, trainer.model_parts, trainer.model_config).prepare(rows)
    assert torch.equal(inputs, theirs[0])
    assert torch.equal(index, theirs[1])
    assert kwargs == theirs[2] == {"positions": rows.positions, "attention_masks": "masks", "sliced": True}
    assert (
        asked[:2]
        == asked[2:]
        == [
            ("slice", mesh, trainer.device, "headtail", "a key"),
            ("annotate", trainer.parallel_dims),
        ]
    )


def _trainer_of_a_decoder():
    """What both read of a trainer under context parallelism."""
    decoder = SimpleNamespace(lm_head=None, get_attention_masks=lambda positions: "masks")
    config = Decoder.Config.__new__(Decoder.Config)
    config.layers = [
        SimpleNamespace(attention=SimpleNamespace(inner_attention=FlexAttention.Config()), is_moe=False)
    ]
    mesh = SimpleNamespace(get_group=lambda: None)
    return SimpleNamespace(
        model_config=config,
        model_parts=[decoder],
        parallel_dims=SimpleNamespace(
            cp_enabled=True,
            get_mesh=lambda name: mesh,
            get_optional_mesh=lambda name: mesh if name == "cp" else None,
        ),
        config=SimpleNamespace(
            parallelism=ParallelismConfig(context_parallel_ptrr_mask_key="a key"), training=TrainingConfig()
        ),
        device=torch.device("cpu"),
        train_context=None,
        ntokens_seen=0,
    )


def test_an_axis_of_one_rank_has_no_mesh_and_degrees_are_known(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dims = ParallelDims.from_config(ParallelismConfig(), 1)
        assert [dims.get_optional_mesh(axis) for axis in ("pp", "tp", "cp")] == [None] * 3
        assert (dims.pp, dims.tp, dims.cp, dims.pp_enabled, dims.ep_enabled) == (1, 1, 1, False, False)
    finally:
        dist.destroy_process_group()


def test_the_checkpointer_reads_its_states_when_it_saves_and_loads():
    manager = CheckpointManager.__new__(CheckpointManager)
    manager.states, manager.exclude_from_loading = {}, []
    manager.states["rl_state"] = "ours"
    assert manager._flattened_model_states_sd() == {"rl_state": "ours"}
    assert manager._states_to_load(model_only=False) == {"rl_state": "ours"}
    assert parameters(CheckpointManager.save) == ["self", "curr_step", "last_step"]
    assert parameters(CheckpointManager.load) == ["self", "step"]


def test_the_checkpointer_asks_the_methods_that_are_overridden():
    save, load = (inspect.getsource(getattr(CheckpointManager, name)) for name in ("_save", "_load"))
    for call in (
        "self._should_save(curr_step, last_step)",
        "self._create_checkpoint_id(curr_step)",
        "self._save_last_step(curr_step)",
        "self._purge_stale_checkpoints()",
        "self.maybe_wait_for_saving()",
        "self.save_future = result",
    ):
        assert call in save
    assert "self._create_checkpoint_id(curr_step)" in inspect.getsource(CheckpointManager._save_last_step)
    for call in ("self._find_load_step()", "self.dcp_load(", "self._create_checkpoint_id(step)"):
        assert call in load
    assert parameters(CheckpointManager.dcp_load)[1:] == [
        "state_dict",
        "checkpoint_id",
        "from_hf",
        "from_quantized",
    ]
    assert parameters(CheckpointManager._find_load_step) == ["self", "folder"]
    assert "self._wait_for_saving()" in inspect.getsource(CheckpointManager.maybe_wait_for_saving)
    # The loop of supervised runs comes to the safe point between two steps, after a save and a validation.
    loop = inspect.getsource(Trainer.train)
    order = ["self.should_continue_training()", "self.train_step(", "self.checkpointer.save(", "validate("]
    assert [loop.index(call) for call in order] == sorted(loop.index(call) for call in order)


def test_functions_that_are_called_take_the_arguments_that_are_given():
    assert parameters(set_pg_timeouts) == ["timeout", "parallel_dims"]
    assert parameters(clip_grad_norm_)[:2] == ["parameters", "max_norm"]
    assert {"foreach", "pp_mesh", "ep_enabled"} <= set(parameters(clip_grad_norm_))
    wanted = ["model", "parallel_dims", "training", "parallelism"]
    wanted += ["compile_config", "ac_config", "dump_folder"]  # as build_sharded gives them
    assert parameters(llama3.parallelize_llama) == wanted
    assert set(wanted) < set(parameters(qwen3.parallelize_qwen3))
    assert inspect.signature(qwen3.parallelize_qwen3).parameters["skip_dp"].default is False
    split = ["device", "model_config", "parallelize_fn", "loss_fn"]
    assert set(parameters(pipeline_llm)) == {"model", *wanted[1:], *split}
    for registry in (llama3.model_registry, qwen3.model_registry):
        assert registry("debugmodel", attn_backend="flex").pipelining_fn is pipeline_llm


# ------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_a_schedule_reads_its_loss_at_each_step_and_has_a_fixed_number_of_micro_batches(name):
    schedule_class = schedules.get_schedule_class(name)
    asked = ["arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"]
    assert set(asked) <= set(parameters(schedule_class.step))
    schedule = schedule_class.__new__(schedule_class)
    schedules._PipelineSchedule.__init__(schedule, 3, no_loss)
    assert schedule._n_microbatches == 3
    assert schedule._has_backward  # which a schedule without a loss has not, whatever it is given later
    schedule._loss_fn = lambda output, target: (output, target)
    schedule._internal_losses = []
    assert schedule._compute_loss("states", "number") == ("states", "number")
    schedule._maybe_compute_loss(SimpleNamespace(is_last=True), "states", ["number 0", "number 1"], 1)
    assert schedule._internal_losses == [("states", "number 1")]


def test_torchtitan_builds_schedules_that_add_gradients_up():
    source = inspect.getsource(pipeline_parallel._build_pipeline_schedule)
    assert source.count("loss_fn=") == source.count("scale_grads=False") == 2


def test_the_trainer_has_a_schedule_only_with_a_pipeline():
    assert inspect.getsource(Trainer.__init__).count("self.pp_schedule,") == 2  # set, and passed on
    assert not hasattr(Trainer, "pp_schedule")


# ------------------------------------------------------------------------------------- layouts of a head


def test_a_layout_says_how_each_axis_holds_a_tensor():
    data, context, tensor = MeshAxisName.DP, MeshAxisName.CP, MeshAxisName.TP
    weight = dense_param_placement(tp=spmd.I).per_axis_spmd_types()
    assert weight == {data: spmd.R, context: spmd.R, tensor: spmd.I}
    states = dense_activation_placement(tp=spmd.R).per_axis_spmd_types()
    assert states == {data: spmd.S(0), context: spmd.S(1), tensor: spmd.R}


def test_a_module_is_parallelised_by_the_configuration_that_it_holds_then():
    wanted = {"state_shardings", "in_src_shardings", "in_dst_shardings", "out_src_shardings"}
    assert wanted <= {field.name for field in fields(ShardingConfig)}
    assert parameters(Module.parallelize) == ["self", "parallel_dims"]
    head = ValueHead.Config(
        in_features=3, out_features=1, bias=True, param_init={}, sharding_config=colwise_config()
    ).build()
    assert head._sharding_config.state_shardings["weight"].per_axis_spmd_types()[MeshAxisName.TP] == spmd.S(0)
    reached = []
    head._distribute_states = lambda dims: reached.append(head._sharding_config)
    head._maybe_wrap_with_local_region = lambda forward, dims: forward
    head.parallelize(SimpleNamespace(spmd_backend="partial_dtensor"))
    (config,) = reached
    for name in ("weight", "bias"):
        assert config.state_shardings[name].per_axis_spmd_types()[MeshAxisName.TP] == spmd.I
    assert config.out_src_shardings.per_axis_spmd_types()[MeshAxisName.TP] == spmd.I


def test_the_trainer_has_the_hooks_that_ours_overrides():
    source = inspect.getsource(Trainer.__init__)
    assert "config.loss.build(" in source
    assert "compile_config=" in source
    for keyword in ("dp_world_size", "dp_rank", "tokenizer", "seq_len", "local_batch_size"):
        assert f"{keyword}=" in source  # what SupervisedDataLoader receives
    assert parameters(Trainer.train) == ["self"]
    assert parameters(Trainer.close) == ["self"]
    for name in (
        "training",
        "parallelism",
        "checkpoint",
        "compile",
        "comm",
        "metrics",
        "loss",
        "dump_folder",
    ):
        assert name in {field.name for field in fields(Trainer.Config)}


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_supported_models_have_a_registry_with_an_attention_backend(name):
    assert name in _supported_models
    module = importlib.import_module(f"torchtitan.models.{name}")
    assert list(inspect.signature(module.model_registry).parameters)[:2] == ["flavor", "attn_backend"]
    assert "debugmodel" in vars(module)[f"{name}_configs"]
