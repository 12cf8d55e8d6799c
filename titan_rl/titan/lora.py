r"""Low-rank adapters: ``[lora]``, TorchTitan's converter, and what a model with adapters is without them.

TorchTitan's ``LoRAConverter`` makes linear layers :math:`y = W x + (\alpha / r) B A x`, with ``W`` and the
rest frozen (Hu et al. 2021, arXiv 2106.09685, section 4.1). Here: which layers it is given, the
configuration of a model without adapters, switching them off, and merging them. Not here: the stream of
weights (:mod:`titan_rl.titan.weights`) and PEFT's layout (:mod:`titan_rl.titan.peft`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titan_rl.errors import ConfigError

A, B = ".lora_a.weight", ".lora_b.weight"
_WEIGHT = ".weight"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_FUSED = (("wq", "wk", "wv"), ("w1", "w3"))
"""Layers that vLLM keeps in one: it takes the tensors of all of them, or of none."""
_HF_NAMES = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


@dataclass(kw_only=True, slots=True)
class LoraSection:
    """Table ``[lora]``: low-rank adapters beside frozen weights, with TorchTitan's ``LoRAConverter``."""

    rank: Annotated[int, Ge(1)] = 8
    """Rank r of an adapter: A is ``[r, in]`` and B ``[out, r]``. B starts at 0, so that training starts from
    the model itself."""

    alpha: Annotated[float, Gt(0)] = 16.0
    """What an adapter adds is multiplied by ``alpha / rank``."""

    target_modules: list[str] | None = None
    """TorchTitan's names of the linear layers with adapters, of ``["wq", "wkv", "wo", "w1", "w2", "w3"]``:
    queries, keys and values (one each), output; gate, down, up. Left out: all of them."""

    push: Literal["merged", "adapter"] = "merged"
    """What goes to the generator after the first push: the adapted weights with their adapters merged, or the
    adapters alone, which only vLLM takes. In bf16 a small change is lost in a merged weight."""


def adapted_spec(spec: ModelSpec, section: LoraSection) -> ModelSpec:
    """A model with adapters, of which nothing else is trained whatever the parallelism.

    Args:
        spec: Of the model without; it stays as it is.
        section: ``[lora]``.

    Raises:
        ConfigError: as for :func:`with_adapters`.
    """
    parallelize = functools.partial(_parallelize, spec.parallelize_fn)
    return replace(spec, model=with_adapters(spec.model, section), parallelize_fn=parallelize)


def _parallelize(parallelize_fn: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    """Parallelise, and freeze again: with ``spmd_types`` TorchTitan 0.3.0 makes all parameters trainable."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parallel = parallelize_fn(model, **options)
    for name, parameter in parallel.named_parameters(remove_duplicate=False):
        if _unwrapped(name) not in trained:
            parameter.requires_grad_(False)
    return parallel


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def with_adapters(model_config: Any, section: LoraSection) -> Any:
    """The configuration of a decoder whose linear layers have adapters and whose other parameters are frozen.

    Args:
        model_config: TorchTitan's configuration; it stays as it is.
        section: ``[lora]``.

    Raises:
        ConfigError: a name fits no layer, the rank is not low, or the model is not supported.
    """
    _refuse_unsupported(model_config, section)
    layers = {name.rsplit(".", 1)[-1]: cfg for name, cfg in _layers(model_config)}
    names = list(layers) if section.target_modules is None else section.target_modules
    _check_names(names, layers)
    for name in names:
        _check_rank(section.rank, name, layers[name])
    converter: Any = LoRAConverter.Config(
        rank=section.rank, alpha=section.alpha, target_modules=names
    ).build()
    return converter.convert(copy.deepcopy(model_config))


def without_adapters(model_config: Any) -> Any:
    """The configuration that :func:`with_adapters` was given: nothing has adapters, nothing is frozen.

    Args:
        model_config: Of a decoder, before or after ``update_from_config``; it stays as it is.
    """
    root = copy.deepcopy(model_config)
    for _, cfg, parent, attribute in reversed(list(root.traverse(Module.Config, recurse=True))):
        plain = _plain(cfg)
        if parent is None:
            root = plain
        elif isinstance(parent, list):
            parent[attribute] = plain
        else:
            setattr(parent, attribute, plain)
    return root


def _plain(cfg: Any) -> Any:
    """A configuration as the class that TorchTitan's converter derived its own class from."""
    kind = type(cfg)
    has_adapter = isinstance(cfg, Linear.Config) and hasattr(cfg, "rank")
    if not has_adapter and not kind.__qualname__.startswith("Frozen"):
        return cfg
    base: Any = kind.__mro__[1]
    return base(**{field.name: getattr(cfg, field.name) for field in fields(base) if field.init})


def _layers(model_config: Any) -> Iterator[tuple[str, Any]]:
    """Name and configuration of every linear layer that can have an adapter: those of the blocks."""
    for name, cfg, _, _ in model_config.traverse(Linear.Config, recurse=True):
        if name.startswith("layers."):
            yield name, cfg


def _refuse_unsupported(model_config: Any, section: LoraSection) -> None:
    targets = section.target_modules
    if any(getattr(layer, "moe", None) is not None for layer in model_config.layers):
        raise ConfigError(
            "[lora]",
            "be left out for a mixture of experts, whose experts TorchTitan's adapters do not reach",
            "a table",
            "Choose a dense model, or train all weights.",
        )
    is_fused = next(iter(model_config.traverse(FusedQKVLinear.Config, recurse=True)), None) is not None
    if is_fused and (targets is None or {"wq", "wkv", "wqkv"} & set(targets)):
        raise ConfigError(
            "lora.target_modules",
            "leave out queries, keys and values in a model that computes them in one product",
            "all" if targets is None else targets,
            "TorchTitan's flavors do; build the model from a directory with model.hf_assets_path instead.",
        )


def _check_names(names: list[str], layers: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in layers]
    if not names or unknown or len(set(names)) != len(names):
        translated = list(dict.fromkeys(_HF_NAMES[name] for name in unknown if name in _HF_NAMES))
        hint = f"TorchTitan's names of these are {', '.join(translated)}." if translated else ""
        raise ConfigError(
            "lora.target_modules",
            f"name layers of the model, each once: {', '.join(layers)}",
            names,
            hint or "Leave it out for all of them.",
        )


def _check_rank(rank: int, name: str, layer: Any) -> None:
    smallest = min(layer.in_features, layer.out_features)
    if rank >= smallest:
        raise ConfigError(
            "lora.rank",
            f"be below {smallest}, the smaller side of {name}, of which an adapter is the low-rank change",
            rank,
            "8 to 64 is usual.",
        )


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with adapters, by TorchTitan's names as they stand in a state dict."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_a") and hasattr(module, "lora_b"):
            found[_unwrapped(name)] = module
    return found


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Generator[None]:
    """Compute what the frozen weights alone give: what the adapters add is multiplied by 0.

    Args:
        models: Parts of a decoder, with or without adapters.
    """
    layers: list[Any] = [layer for model in models for layer in adapted_layers(model).values()]
    scales = [layer._lora_scaling for layer in layers]
    for layer in layers:
        layer._lora_scaling = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer._lora_scaling = scale


def is_adapter(name: str) -> bool:
    """Whether a tensor of a state dict belongs to an adapter.

    >>> is_adapter("layers.0.attention.wo.lora_b.weight"), is_adapter("layers.0.attention.wo.weight")
    (True, False)
    """
    return name.endswith((A, B))


def changing_names(layers: Iterable[str], *, with_siblings: bool) -> set[str]:
    """Names of the adapters, and of the weights that they change when they are merged.

    Args:
        layers: Names of the layers with adapters.
        with_siblings: Also the weights of the layers that an engine keeps in one with them.
    """
    found = set()
    for layer in layers:
        parent, _, name = layer.rpartition(".")
        siblings = next((group for group in _FUSED if name in group), (name,)) if with_siblings else (name,)
        found |= {f"{parent}.{sibling}{_WEIGHT}" for sibling in siblings} | {layer + A, layer + B}
    return found


@torch.no_grad()
def merged(
    tensors: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    r"""Put adapters into the weights that they change: :math:`W + s B A`.

    Args:
        tensors: TorchTitan's names and full tensors; a layer's weight and its adapter stand close together.
        scales: ``alpha / rank`` by name of layer, for every layer with an adapter.

    Yields:
        The tensors without adapters, in their order. A merged one is a new tensor, in its weight's dtype,
        added up in fp32.

    Raises:
        ValueError: a weight or a half of its adapter is missing.
    """
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        suffix = next((end for end in (A, B, _WEIGHT) if name.endswith(end)), None)
        layer = name.removesuffix(suffix or "")
        if suffix is None or layer not in scales:
            yield name, tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[suffix] = tensor
        if len(parts) == 3:
            del waiting[layer]
            weight = parts[_WEIGHT]
            value = torch.addmm(weight.float(), parts[B].float(), parts[A].float(), alpha=scales[layer])
            yield layer + _WEIGHT, value.to(weight.dtype)
    if waiting:
        raise ValueError(f"An adapter must come with its weight; got a part of {next(iter(waiting))} only.")
