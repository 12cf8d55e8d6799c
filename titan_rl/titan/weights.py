"""Weights between the sharded policy and the Hugging Face layout: the stream, loading, and export.

Tensors are gathered to their full shape, a bucket at a time (:mod:`titan_rl.titan.buckets`), and then given
to TorchTitan's state-dict adapter one by one. The adapters never see shards: on those they can fail when the
heads do not divide.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_rl.errors import ConfigError
from titan_rl.titan import safe_reading
from titan_rl.titan.buckets import BUCKET_BYTES, full_buckets, one_by_one
from titan_rl.titan.checkpoint_errors import CHECKPOINT_ERRORS, cause_of
from titan_rl.titan.init import replicated
from titan_rl.titan.lora import adapted_layers, is_adapter, merged
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.state import parts

TIED_HEAD = "lm_head.weight"
SCALAR_HEAD = "score.weight"
TIED_EMBEDDING = "model.embed_tokens.weight"
_ROUTER_BIAS = ".moe.expert_bias_E"
ASSET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
_SHARD_BYTES = 4 * 2**30


class WeightStream:
    """The policy's weights as ``(Hugging Face name, full tensor)`` pairs, in one order on all ranks.

    Without a state-dict adapter the names are TorchTitan's own. Low-rank adapters are merged into the weights
    that they change, so that whoever reads sees a model without them.
    """

    def __init__(
        self,
        model: nn.Module | ShardedModel,
        adapter: BaseStateDictAdapter | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        names: Container[str] | None = None,
        with_adapters: bool = True,
    ) -> None:
        """Prepare the stream.

        Args:
            model: The policy, sharded or not.
            adapter: TorchTitan's adapter of this model, or None.
            bucket_bytes: Most that is gathered ahead of whoever reads the stream.
            names: TorchTitan's names of what is gathered; None: everything. With a weight belongs its
                low-rank adapter.
            with_adapters: Whether low-rank adapters are merged; otherwise the frozen weights come alone.
        """
        self._with_adapters = with_adapters
        self._model, self._adapter, self._bucket_bytes, self._names = model, adapter, bucket_bytes, names
        self._is_tied = is_tied(model)
        layers = adapted_layers_of(model).items()
        self._scales = {name: layer._lora_scaling for name, layer in layers}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once. Every rank must consume all of it: each bucket takes collectives.

        Raises:
            ConfigError: the adapter drops a trainable parameter.
        """
        for key, full in self._without_adapters():
            if self._is_tied and key == TIED_HEAD:
                continue  # the embedding is yielded under both names below
            for name, tensor in self._to_hf(key, full).items():
                yield name, tensor
                if self._is_tied and name == TIED_EMBEDDING:
                    # A generator that packed its own copy of the head keeps a stale one otherwise.
                    yield TIED_HEAD, tensor

    def _without_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._with_adapters:
            return merged(self._full_state(), self._scales)
        return ((name, full) for name, full in self._full_state() if not is_adapter(name))

    def _full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        options: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "names": self._names}
        if isinstance(self._model, ShardedModel):
            return self._model.full_state(**options)
        return one_by_one(full_buckets(self._model, **options))

    def _to_hf(self, key: str, full: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if self._adapter is None:
            return {key: full}
        converted = self._adapter.to_hf({key: full})
        if not converted:
            raise ConfigError(
                f"model tensor {key}",
                "be known to the model's state-dict adapter, so that it can reach the generator",
                "no Hugging Face name",
                "Extend the adapter's from_hf_map, or build the model without it (a router's expert_bias_E: "
                "model.load_balance_coeff = 0). What is trained but not pushed goes stale.",
            )
        return converted


def is_tied(model: nn.Module | ShardedModel) -> bool:
    """Whether the embedding and the head of a decoder are one tensor."""
    return any(bool(getattr(part, "enable_weight_tying", False)) for part in _stages(model))


def adapted_layers_of(model: nn.Module | ShardedModel) -> dict[str, Any]:
    """The layers with low-rank adapters, by TorchTitan's names."""
    return {name: layer for part in _stages(model) for name, layer in adapted_layers(part).items()}


def _stages(model: nn.Module | ShardedModel) -> Sequence[nn.Module]:
    return model.parts if isinstance(model, ShardedModel) else [model]


def has_hf_weights(directory: str) -> bool:
    """Whether a directory holds safetensors weights."""
    return bool(directory) and any(Path(directory).glob("*.safetensors"))


def load_checkpoint(
    model: ShardedModel,
    path: str,
    *,
    where: str = "checkpoint.initial_load_path",
    with_adapters: bool = True,
) -> None:
    """Load the model of a TorchTitan checkpoint, written on any number of ranks. Collective.

    Args:
        model: Whose weights are replaced; its low-rank adapters too, if ``with_adapters``.
        path: A ``step-N`` directory.
        where: The key that names the path, for errors.
        with_adapters: Whether the checkpoint is to have the low-rank adapters that the model has, or none.

    Raises:
        ConfigError: it is not a checkpoint, or another model's.
    """
    whole = dict(model.state_dict())
    state = {name: value for name, value in whole.items() if with_adapters or not is_adapter(name)}
    try:
        if not with_adapters:
            _refuse_adapters(path, where)
        safe_reading.load(state, path)
    except CHECKPOINT_ERRORS as error:
        raise ConfigError(
            where,
            "be a TorchTitan checkpoint of this model",
            path,
            f"Loading it failed: {cause_of(error)}.",
        ) from error
    model.load_state_dict(whole | state)


def _refuse_adapters(path: str, where: str) -> None:
    """Refuse to start low-rank adapters from a checkpoint that has some, whose base is not its model."""
    names = safe_reading.tensor_shapes(safe_reading.read_metadata(Path(path)))
    if any(is_adapter(name) for name in names):
        raise ConfigError(
            where,
            "be a checkpoint without low-rank adapters: those of [lora] start anew",
            path,
            "Merge them with `titan-rl export`, and name the directory in model.hf_assets_path.",
        )


@torch.no_grad()
def load_hf(
    model: nn.Module | ShardedModel,
    adapter: BaseStateDictAdapter | None,
    directory: str,
    *,
    has_scalar_head: bool = False,
) -> bool:
    """Load the safetensors of a directory into a model, sharded or not, whether or not heads divide.

    Args:
        model: The policy.
        adapter: TorchTitan's adapter of this model.
        directory: Model directory in Hugging Face layout.
        has_scalar_head: The model has a scalar head: it is loaded from a reward model's directory and left as
            it is when the directory is a language model's, whose own head is ignored.

    Returns:
        Whether the head was loaded.

    Raises:
        ConfigError: a parameter is missing, unexpected or of another shape, or a file is unreadable.
    """
    if adapter is None:
        raise ConfigError(
            "model.hf_assets_path",
            "hold weights only for a model with a state-dict adapter",
            directory,
            "Start from a checkpoint with checkpoint.initial_load_path instead.",
        )
    names = _index_files(Path(directory))
    tied = is_tied(model)
    if tied and TIED_EMBEDDING in names:
        _check_tied(names, directory)
        names[TIED_HEAD] = names[TIED_EMBEDDING]
    stored = {TIED_HEAD: TIED_EMBEDDING} if tied else {}
    if has_scalar_head:
        names.pop(TIED_HEAD, None)
        if SCALAR_HEAD in names:
            names[TIED_HEAD], stored = names.pop(SCALAR_HEAD), {TIED_HEAD: SCALAR_HEAD}
    used: set[str] = set()
    for prefix, module in (part for stage in _stages(model) for part in parts(stage)):
        if has_scalar_head and prefix == "lm_head." and TIED_HEAD not in names:
            continue
        wanted = {key for key, _ in module.state_dict(prefix=prefix).items()}
        hf_names = [n for n in names if native_names(adapter, n) & wanted]
        full = {n: _read(names[n], stored.get(n, n)) for n in hf_names}
        if tied:
            # The adapters insist on a head or an embedding in every bucket; the name alone satisfies them.
            full.setdefault(TIED_HEAD, torch.empty(0))
        try:
            native = {k: v for k, v in adapter.from_hf(full).items() if k in wanted}
        except RuntimeError as error:  # a projection cannot be cut into the model's heads
            raise ConfigError(
                f"{directory}: the tensors of {prefix.removesuffix('.')}",
                "have the shapes that config.json says",
                str(error),
                "The weights and config.json do not belong together.",
            ) from error
        _load_part(module, prefix, native, wanted, directory)
        used |= set(hf_names)
    used = model.union(used) if isinstance(model, ShardedModel) else used
    unused = {n for n in set(names) - used if not n.endswith("rotary_emb.inv_freq")}
    if unused:
        raise ConfigError(
            directory,
            "hold only tensors of the model",
            sorted(unused)[:3],
            "The config.json beside them describes another model.",
        )
    return TIED_HEAD in names


def _check_tied(names: Mapping[str, Path], directory: str) -> None:
    """Refuse a head of its own beside an embedding that the model ties to the head."""
    if TIED_HEAD not in names:
        return
    if not torch.equal(_read(names[TIED_HEAD], TIED_HEAD), _read(names[TIED_EMBEDDING], TIED_EMBEDDING)):
        raise ConfigError(
            f"{directory}: {TIED_HEAD}",
            f"equal {TIED_EMBEDDING} in a model that ties them",
            "other values",
            "Set tie_word_embeddings to false in its config.json.",
        )


def native_names(adapter: Any, hf_name: str) -> set[str]:
    """TorchTitan's name of a Hugging Face tensor, by the adapter's own table."""
    parts = hf_name.split(".")
    numbers = [p for p in parts if p.isdigit()]
    abstract = ".".join("{}" if p.isdigit() else p for p in parts)
    native = adapter.from_hf_map.get(abstract)
    return {native.format(*numbers)} if native else set()


def _load_part(
    module: nn.Module, prefix: str, native: Mapping[str, torch.Tensor], wanted: set[str], where: str
) -> None:
    present = module.state_dict(prefix=prefix)
    # A router's load-balancing bias is left behind by training with one; other models have none.
    biases = {key for key in wanted - set(native) if key.endswith(_ROUTER_BIAS)}
    native = dict(native) | {key: torch.zeros(present[key].shape) for key in biases}
    adapters = {key: tensor for key, tensor in present.items() if is_adapter(key)}  # in no file: they stay
    missing = sorted(wanted - set(native) - set(adapters))
    if missing:
        raise ConfigError(
            where,
            "hold every parameter of the model",
            f"no {missing[0]}" + (f" and {len(missing) - 1} more missing" if missing[1:] else ""),
            "The weights are incomplete: download or convert them again.",
        )
    example = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
    state = {}
    for key, tensor in native.items():
        if tensor.shape != present[key].shape:
            raise ConfigError(
                f"{where}: {key}",
                f"have shape {list(present[key].shape)}",
                list(tensor.shape),
                "The weights and config.json do not belong together.",
            )
        # Experts lie on a mesh of their own; what a hook of the state dict has gathered is no DTensor.
        like = present[key] if isinstance(present[key], DTensor) else example
        tensor = tensor.contiguous()
        state[key.removeprefix(prefix)] = tensor if like is None else replicated(tensor, like=like)
    state |= {key.removeprefix(prefix): tensor for key, tensor in adapters.items()}
    module.load_state_dict(state, strict=True)


def _index_files(directory: Path) -> dict[str, Path]:
    """Which safetensors file holds which tensor: the files that the index names, or all if there is none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                str(index), 'be JSON with a "weight_map"', str(error), "Download it again."
            ) from error
        paths = [directory / file for file in files]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    names: dict[str, Path] = {}
    for path in paths:
        for name in _tensor_names(path):
            if name in names:
                raise ConfigError(
                    str(directory),
                    "hold every tensor once",
                    f"{name} in {names[name].name} and in {path.name}",
                    "Remove the file that does not belong to the model.",
                )
            names[name] = path
    return names


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            str(path), "be a readable safetensors file", str(error), "It is missing, truncated or damaged."
        ) from error


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def export_hf(
    stream: Iterable[tuple[str, torch.Tensor]],
    *,
    directory: Path,
    hf_config: Mapping[str, Any],
    assets: str,
    is_tied: bool,
) -> None:
    """Write a model directory that ``transformers`` and vLLM load. All ranks call it; rank 0 writes.

    The directory appears complete or not at all.

    Args:
        stream: ``(name, full tensor)`` pairs, consumed on all ranks.
        directory: Where to write; replaced if it exists.
        hf_config: Contents of ``config.json``; its ``dtype`` becomes the one that is written.
        assets: Directory with the tokenizer files, copied beside the weights; may be empty.
        is_tied: Leave out the head, which ``transformers`` ties to the embedding.
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    partial = directory.with_name(directory.name + ".partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    writer = _ShardWriter(partial) if is_writer else None
    for name, tensor in stream:
        if writer is not None and not (is_tied and name == TIED_HEAD):
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        # The file's own dtype, or else transformers would round what was trained to another one.
        described = {key: value for key, value in hf_config.items() if key != "torch_dtype"}
        write_assets(partial, hf_config=described | {"dtype": writer.dtype}, assets=assets)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)


def write_assets(directory: Path, *, hf_config: Mapping[str, Any], assets: str) -> None:
    """Write ``config.json`` and copy the tokenizer files and ``generation_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    for name in ASSET_FILES if assets else ():
        source = Path(assets) / name
        if source.is_file():
            shutil.copyfile(source, directory / name)


class _ShardWriter:
    """Collects tensors into safetensors files of at most 4 GiB and writes their index."""

    def __init__(self, directory: Path) -> None:
        self.dtype = "float32"
        self._directory = directory
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[tuple[str, Sequence[str]]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > _SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        file = f"shard-{len(self._shards) + 1}.safetensors"
        save_file(self._pending, str(self._directory / file), metadata={"format": "pt"})
        self._shards.append((file, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self._directory / self._shards[0][0]).rename(self._directory / "model.safetensors")
            return
        weight_map = {}
        for number, (file, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._directory / file).rename(self._directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
