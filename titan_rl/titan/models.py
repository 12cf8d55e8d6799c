"""Which model a run uses: a TorchTitan flavor by name, a user's package, or a Hugging Face directory."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import tyro
from annotated_types import Ge
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models import _supported_models
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.experts import use_cpu_experts
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.lora import LoraSection, adapted_spec, without_adapters
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.state import local

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

MIXTURES = ("qwen3", "deepseek_v3")
ROUTER_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
_ATTN_BACKENDS = ("flex", "flex_flash", "varlen")


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """Table ``[model]``."""

    # Suppressed: by the time tyro reads TorchTitan's command line, the model is chosen.
    name: Annotated[str, tyro.conf.Suppress] = ""
    """A TorchTitan model ("llama3", "qwen3", ...) or an importable module that has ``model_registry``.
    Empty: the model is built from ``config.json`` in ``hf_assets_path``."""

    flavor: Annotated[str, tyro.conf.Suppress] = ""
    """Flavor of ``name``, for example "debugmodel" or "0.6B"."""

    hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""
    """Directory in Hugging Face layout: tokenizer, and weights and ``config.json`` if there are any.
    A relative path is looked up in the working directory, then next to the TOML file, then where titan_rl is
    installed."""

    attn_backend: Annotated[str, tyro.conf.Suppress] = "flex"
    """TorchTitan's attention: "flex", "flex_flash" or "varlen". On a CPU always per document."""

    load_balance_coeff: Annotated[float, Ge(0)] | None = None
    """Mixtures of experts: how far a step moves the bias with which each router balances its experts without
    an auxiliary loss. 0: a model without that bias. Left out: what the flavor says; nothing for a Qwen3-MoE
    directory."""

    allow_random_init: bool = False
    """Train from random weights when neither a checkpoint nor weights in ``hf_assets_path`` exist."""

    export: bool = True
    """At the end write ``<dump_folder>/export`` in Hugging Face layout: weights, config, tokenizer. With
    ``[lora]`` the adapters are merged there, and stand in ``<dump_folder>/adapter`` in PEFT's layout."""


def build_spec(
    section: ModelSection, *, context_parallel: bool = False, lora: LoraSection | None = None
) -> ModelSpec:
    """Build the model spec that ``[model]`` names, ready for this process's device.

    Args:
        section: The table.
        context_parallel: Whether rows are split over ranks.
        lora: What adapters the model has; None: none.

    Raises:
        ConfigError: the model, flavor or directory does not exist or is not supported.
    """
    backend = _attn_backend(section.attn_backend)
    if section.name:
        spec = _spec_by_name(section, backend)
        _refuse_other_mixtures(section, spec)
    elif section.hf_assets_path:
        spec = spec_from_hf(Path(section.hf_assets_path), attn_backend=backend)
    else:
        raise ConfigError(
            "model",
            "name a model: name and flavor, or hf_assets_path",
            "neither",
            'Set [model] hf_assets_path = "models/..." or name = "qwen3" and flavor = "0.6B".',
        )
    if section.load_balance_coeff is not None:
        _set_router_bias(spec.model, section.load_balance_coeff)
    if titan_utils.device_type == "cpu":
        use_cpu_attention(spec.model, per_document=not context_parallel)
        use_cpu_experts(spec.model)
    return spec if lora is None else adapted_spec(spec, lora)


def _attn_backend(name: str) -> str:
    """TorchTitan's attention to build with. On a CPU flex, which :func:`use_cpu_attention` then replaces."""
    try:
        if name not in _ATTN_BACKENDS:
            raise ValueError(f"TorchTitan has {', '.join(_ATTN_BACKENDS)}")
        if titan_utils.device_type == "cpu":
            return "flex"
        get_attention_config(name)
    except ValueError as error:
        raise ConfigError(
            "model.attn_backend", "be an attention that works on this device", name, f"{error}."
        ) from error
    return name


def _spec_by_name(section: ModelSection, attn_backend: str) -> ModelSpec:
    """A spec from TorchTitan's or a user's ``model_registry``."""
    path = f"torchtitan.models.{section.name}" if section.name in _supported_models else section.name
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            "model.name",
            f"be one of {', '.join(sorted(_supported_models))} or an importable module",
            section.name,
            f"Importing it failed: {error}.",
        ) from error
    registry = getattr(module, "model_registry", None)
    if registry is None:
        raise ConfigError(
            "model.name",
            "name a module with a function model_registry(flavor, attn_backend=...)",
            section.name,
            'See docs/models.md, "your own model".',
        )
    try:
        return registry(section.flavor, attn_backend=attn_backend)
    except (KeyError, ValueError) as error:
        flavors = next((sorted(v) for k, v in vars(module).items() if k.endswith("_configs")), [])
        raise ConfigError(
            "model.flavor",
            f"be one of {', '.join(flavors)}" if flavors else f"be known to {section.name}",
            section.flavor,
            f"Its registry said: {error}.",
        ) from error


def _refuse_other_mixtures(section: ModelSection, spec: ModelSpec) -> None:
    """TorchTitan's other mixtures of experts compute their experts in ways that were never compared here."""
    model: Any = spec.model
    has_experts = any(getattr(layer, "moe", None) is not None for layer in model.layers)
    if has_experts and section.name in _supported_models and section.name not in MIXTURES:
        raise ConfigError(
            "model.name",
            f"be {' or '.join(MIXTURES)} for a mixture of experts of TorchTitan",
            section.name,
            "Its other mixtures are not supported; a module of your own is taken as it is.",
        )


def _set_router_bias(model_config: Any, coefficient: float) -> None:
    moes = [layer.moe for layer in model_config.layers if getattr(layer, "moe", None) is not None]
    if not moes:
        raise ConfigError(
            "model.load_balance_coeff",
            "be left out for a model without experts",
            coefficient,
            "Remove it.",
        )
    for moe in moes:
        moe.load_balance_coeff = coefficient or None


def build_adapter(spec: ModelSpec, model_config: Any) -> Any:
    """TorchTitan's adapter between a model's names and Hugging Face's; None where it has none.

    Args:
        spec: Of the model.
        model_config: Its configuration.
    """
    if spec.state_dict_adapter is None:
        return None
    # The path would be read for an index file only, which TorchTitan cannot parse in all its forms.
    adapter: Any = spec.state_dict_adapter(model_config, None)
    names = getattr(adapter, "from_hf_map", {})
    if "model.layers.{}.mlp.gate.weight" in names:
        # Qwen3-MoE has no name for a router's bias; the local generator gets it under DeepSeek-V3's.
        names.setdefault(ROUTER_BIAS, "layers.{}.moe.expert_bias_E")
    return adapter


def build_sibling(trainer: Trainer, *, offload_to_cpu: bool = False) -> ShardedModel:
    """Build a second, frozen model like the policy, under the policy's parallelism. Its weights are not set.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        offload_to_cpu: Keep the shards in host memory between forward passes (FSDP's CPU offload).

    Returns:
        The sharded model in evaluation mode, without gradients; it gives hidden states.
    """
    spec = cast(ModelSpec, trainer.config.model_spec)
    return _build_frozen(trainer, spec, copy.deepcopy(trainer.model_config), offload_to_cpu)


def build_frozen(trainer: Trainer, spec: ModelSpec, *, offload_to_cpu: bool = False) -> ShardedModel:
    """Build a frozen model of another architecture under the policy's parallelism. Its weights are not set.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        spec: From :func:`build_spec`; its configuration is changed.
        offload_to_cpu: As for :func:`build_sibling`.

    Raises:
        ValueError: TorchTitan refuses the model under this run's parallelism or row length.
    """
    spec.model.update_from_config(config=trainer.config)
    return _build_frozen(trainer, spec, spec.model, offload_to_cpu)


def _build_frozen(
    trainer: Trainer, spec: ModelSpec, model_config: BaseModel.Config, offload_to_cpu: bool
) -> ShardedModel:
    model = build_sharded(trainer, spec, model_config, offload_to_cpu=offload_to_cpu)
    model.skip_head()
    return frozen(model)


def frozen(model: ShardedModel) -> ShardedModel:
    """The same model in evaluation mode and without gradients."""
    for part in model.parts:
        part.eval().requires_grad_(False)
    return model


def build_sharded(
    trainer: Trainer,
    spec: ModelSpec,
    model_config: BaseModel.Config,
    *,
    offload_to_cpu: bool = False,
    ac_config: Any = None,
) -> ShardedModel:
    """Build a model beside the policy, under the policy's parallelism, with random weights.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        spec: How the architecture is parallelised.
        model_config: The architecture, after ``update_from_config``.
        offload_to_cpu: Keep the shards in host memory between uses (FSDP's CPU offload).
        ac_config: Activation checkpointing, or None.
    """
    config = trainer.config
    training = dataclasses.replace(config.training, enable_cpu_offload=offload_to_cpu)
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = model_config.build()
    options: dict[str, Any] = {
        "parallel_dims": trainer.parallel_dims,
        "training": training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": ac_config,
        "dump_folder": config.dump_folder,
    }
    schedule = None
    if trainer.parallel_dims.pp_enabled:
        split: Any = spec.pipelining_fn  # checked for the policy when the run was checked
        schedule, parts, _, _ = split(
            model,
            **options,
            device=trainer.device,
            model_config=model_config,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=no_loss,
        )
    else:
        parts = [spec.parallelize_fn(model, **options)]
    buffer_device = torch.device(titan_utils.device_type) if offload_to_cpu else None
    for part in parts:
        part.to_empty(device="cpu" if offload_to_cpu else titan_utils.device_type)
        with torch.no_grad():
            cast(BaseModel, part).init_weights(buffer_device=buffer_device)
    return ShardedModel(trainer, parts, model_config, schedule=schedule)


def no_loss(*args: Any, **kwargs: Any) -> Any:
    """Stands in a pipeline schedule until :class:`titan_rl.titan.pipeline.Pipeline` gives it a loss."""
    raise NotImplementedError("A pipeline schedule was run outside Pipeline.forward_backward.")


def build_unsharded(model_config: BaseModel.Config, *, max_seq_len: int) -> nn.Module:
    """Build a whole model on this process's device, for the local generator. Its weights are not set.

    It has no adapters: those of the policy are merged into the weights that it gets.

    Args:
        model_config: The policy's model configuration.
        max_seq_len: Positions that its RoPE cache must hold.
    """
    config: Any = without_adapters(model_config)
    for layer in config.layers:
        attention = getattr(layer, "attention", None)
        if attention is not None and getattr(attention, "rope", None) is not None:
            attention.rope = dataclasses.replace(attention.rope, max_seq_len=max_seq_len)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=titan_utils.device_type)
    with torch.no_grad():
        cast(BaseModel, model).init_weights(buffer_device=None)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def copy_shards(source: nn.Module | ShardedModel, target: nn.Module | ShardedModel) -> None:
    """Copy the weights and buffers of one sharded model into another of equal layout, shard by shard."""
    for kind in ("parameters", "buffers"):
        for ours, theirs in zip(getattr(target, kind)(), getattr(source, kind)(), strict=True):
            local(ours).copy_(local(theirs))
