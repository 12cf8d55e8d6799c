"""Between ``config.json`` of a Hugging Face model directory and TorchTitan's model configuration.

Llama and Qwen3, dense or with experts, both ways. Whatever a directory asks for that TorchTitan's model would
compute differently (biases, sliding windows, other RoPE scalings) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RoPE
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.errors import ConfigError
from titan_rl.titan.hf_experts import check_experts, has_experts, moe_from_hf, moe_to_hf, with_defaults

ARCHITECTURES = {
    "LlamaForCausalLM": "llama3",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
REWARD_ARCHITECTURES = {"LlamaForSequenceClassification": "llama3", "Qwen3ForSequenceClassification": "qwen3"}
"""The same with one label: a scalar head, ``score``, in place of the projection to the vocabulary."""
_DEFAULTS: dict[str, dict[str, Any]] = {"llama3": {}, "qwen3": {"num_key_value_heads": 32, "head_dim": 128}}
"""What transformers takes where ``config.json`` is silent, if it is not derived from other keys."""


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model directory.

    Raises:
        ConfigError: the directory or file is missing, or is not JSON.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            "model.hf_assets_path",
            "be a directory in Hugging Face layout with a config.json",
            str(directory),
            "Check the path; for the quickstart's model run `titan-rl prepare smollm2 models/smollm2-135m`.",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "be valid JSON", str(error), "Download or write it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), "be a JSON object", content, "Download or write it again.")
    return content


def spec_from_hf(
    directory: Path, *, attn_backend: str = "flex", architectures: Mapping[str, str] = ARCHITECTURES
) -> ModelSpec:
    """Build a TorchTitan model spec from a model directory's ``config.json``.

    Args:
        directory: Model directory in Hugging Face layout.
        attn_backend: TorchTitan's name of the attention implementation.
        architectures: The names that are accepted in the file, and what they stand for.

    Raises:
        ConfigError: the architecture is neither Llama nor Qwen3, or a feature is not supported.
    """
    hf = read_hf_config(directory)
    where = str(directory / "config.json")
    names = hf.get("architectures") or []
    kind = next((architectures[name] for name in names if name in architectures), None)
    if kind is None:
        raise ConfigError(
            f"{where}: architectures",
            f"name one of {', '.join(architectures)}",
            names,
            "Use model.name and model.flavor for TorchTitan's other models.",
        )
    hf = with_defaults(hf) if kind == "qwen3_moe" else _DEFAULTS[kind] | hf
    _refuse_unsupported(hf, where, kind)
    return ModelSpec(
        name="llama3" if kind == "llama3" else "qwen3",
        flavor=directory.name,
        model=_BUILDERS[kind](hf, where, attn_backend),
        parallelize_fn=parallelize_llama if kind == "llama3" else parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if kind == "qwen3_moe" else None,
        state_dict_adapter=Llama3StateDictAdapter if kind == "llama3" else Qwen3StateDictAdapter,
    )


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of a TorchTitan Llama 3 or Qwen3 model, for exports and generators.

    Args:
        spec: A spec whose model is a Llama3Model or a Qwen3Model.

    Raises:
        ConfigError: the model has no counterpart that titan_rl can write.
    """
    model: Any = spec.model
    kind = {v: k for k, v in ARCHITECTURES.items()}.get(spec.name)
    layers = getattr(model, "layers", None) or []
    if kind is None or not layers or layers[0].attention.rope.scaling not in ("none", "llama"):
        raise ConfigError(
            "model",
            f"be one of {', '.join(ARCHITECTURES)} to be written in Hugging Face layout",
            f"{spec.name} {spec.flavor}",
            'Set generator.type = "local" and model.export = false.',
        )
    block = layers[0]
    attention, rope = block.attention, block.attention.rope
    num_heads = attention.n_heads
    dense = next((layer.feed_forward for layer in layers if layer.feed_forward is not None), None)
    config: dict[str, Any] = {
        "architectures": [kind],
        "model_type": "llama" if spec.name == "llama3" else "qwen3",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
        "head_dim": attention.head_dim or model.dim // num_heads,
        "hidden_act": "silu",
        "hidden_size": model.dim,
        "initializer_range": 0.02,
        "intermediate_size": 4 * model.dim if dense is None else dense.w1.out_features,
        "max_position_embeddings": rope.max_seq_len,
        "num_attention_heads": num_heads,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": attention.n_kv_heads or num_heads,
        "rms_norm_eps": model.norm.eps,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": model.enable_weight_tying,
        "vocab_size": model.vocab_size,
    }
    if rope.scaling == "llama":
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return config | (moe_to_hf(layers) if any(layer.moe is not None for layer in layers) else {})


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def _refuse_unsupported(hf: dict[str, Any], where: str, kind: str) -> None:
    """Refuse what TorchTitan's model would silently compute differently."""
    windows = {kind for kind in hf.get("layer_types") or () if kind != "full_attention"}
    checks = [
        ("attention_bias", hf.get("attention_bias", False), False),
        ("mlp_bias", hf.get("mlp_bias", False), False),
        ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", hf.get("use_sliding_window", False), False),
        ("layer_types", sorted(windows) or ["full_attention"], ["full_attention"]),
        ("partial_rotary_factor", _rope_parameters(hf)[1].get("partial_rotary_factor", 1.0), 1.0),
        ("quantization_config", hf.get("quantization_config"), None),
    ]
    for key, value, wanted in checks:
        if value != wanted:
            raise ConfigError(
                f"{where}: {key}",
                f"be {wanted!r} for TorchTitan's {kind} model",
                value,
                "This model cannot be trained by titan_rl.",
            )


def _rope_parameters(hf: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """RoPE theta and scaling, from the layout of transformers 5 or an older one."""
    parameters = dict(hf.get("rope_parameters") or {})
    scaling = dict(hf.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
    if "partial_rotary_factor" in hf:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    return float(theta), {**parameters, **scaling}


def _rope(hf: dict[str, Any], where: str, head_dim: int, kind: type[RoPE.Config]) -> RoPE.Config:
    theta, scaling = _rope_parameters(hf)
    name = scaling.get("rope_type", scaling.get("type", "default"))
    common = {"dim": head_dim, "max_seq_len": int(hf["max_position_embeddings"]), "theta": theta}
    if name in ("default", "none"):
        return kind(**common, scaling="none")
    if name == "llama3" and kind is ComplexRoPE.Config:
        try:
            return kind(
                **common,
                scaling="llama",
                scaling_factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
            )
        except KeyError as error:
            raise ConfigError(
                f"{where}: rope_scaling", f"hold {error}", scaling, "Download or write the file again."
            ) from error
    raise ConfigError(
        f"{where}: rope_scaling",
        "be absent, or of type llama3 for a Llama model",
        name,
        "TorchTitan's model computes this scaling differently from transformers; it cannot be trained here.",
    )


def _sizes(hf: dict[str, Any], where: str) -> tuple[int, int, int, int]:
    """Width, query heads, key-value heads and head dimension."""
    for key in _SIZES:
        if not isinstance(hf.get(key), int) or hf[key] < 1:
            raise ConfigError(
                f"{where}: {key}", "be a positive integer", hf.get(key), "Download or write the file again."
            )
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_key_value_heads",
            f"divide num_attention_heads = {heads}",
            kv_heads,
            "Check the file.",
        )
    return dim, heads, kv_heads, int(hf.get("head_dim") or dim // heads)


def _parts(hf: dict[str, Any], dim: int) -> dict[str, Any]:
    """What Llama and Qwen3 share: embeddings, last norm, head, and initialisers."""
    std = float(hf.get("initializer_range", 0.02))
    normal = {"weight": partial(nn.init.normal_, std=std)}
    tied = bool(hf.get("tie_word_embeddings", False))
    vocab = int(hf["vocab_size"])
    return {
        "dim": dim,
        "vocab_size": vocab,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        "norm": _norm(hf, dim),
        "lm_head": Linear.Config(in_features=dim, out_features=vocab, param_init=normal),
    }


def _norm(hf: dict[str, Any], width: int) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=width,
        eps=float(hf.get("rms_norm_eps", 1e-6)),
        param_init={"weight": nn.init.ones_},
    )


def _block(
    hf: dict[str, Any], where: str, attn_backend: str, *, rope: type[RoPE.Config], qk_norm: bool
) -> dict[str, Any]:
    """Attention and norms of one layer. Weights are drawn with the file's initializer_range."""
    dim, heads, kv_heads, head_dim = _sizes(hf, where)
    normal = {"weight": partial(nn.init.normal_, std=float(hf.get("initializer_range", 0.02)))}
    return {
        "attention_norm": _norm(hf, dim),
        "ffn_norm": _norm(hf, dim),
        "attention": make_gqa_config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=None if head_dim * heads == dim and not qk_norm else head_dim,
            wqkv_param_init=normal,
            wo_param_init=normal,
            inner_attention=get_attention_config(attn_backend),
            fuse_qkv=False,
            rope=_rope(hf, where, head_dim, rope),
            qk_norm=_norm(hf, head_dim) if qk_norm else None,
        ),
    }


def _feed_forward(hf: dict[str, Any]) -> FeedForward.Config:
    normal = {"weight": partial(nn.init.normal_, std=float(hf.get("initializer_range", 0.02)))}
    return make_ffn_config(
        dim=hf["hidden_size"],
        hidden_dim=int(hf["intermediate_size"]),
        w1_param_init=normal,
        w2w3_param_init=normal,
    )


def _llama_config(hf: dict[str, Any], where: str, attn_backend: str) -> Llama3Model.Config:
    dim = _sizes(hf, where)[0]
    layers = [
        Llama3TransformerBlock.Config(
            **_block(hf, where, attn_backend, rope=ComplexRoPE.Config, qk_norm=False),
            feed_forward=_feed_forward(hf),
        )
        for _ in range(int(hf["num_hidden_layers"]))
    ]
    return Llama3Model.Config(layers=layers, **_parts(hf, dim))


def _qwen3_config(hf: dict[str, Any], where: str, attn_backend: str) -> Qwen3Model.Config:
    dim = _sizes(hf, where)[0]
    layers = [
        Qwen3TransformerBlock.Config(
            **_block(hf, where, attn_backend, rope=CosSinRoPE.Config, qk_norm=True),
            feed_forward=_feed_forward(hf),
        )
        for _ in range(int(hf["num_hidden_layers"]))
    ]
    return Qwen3Model.Config(layers=layers, **_parts(hf, dim))


def _qwen3_moe_config(hf: dict[str, Any], where: str, attn_backend: str) -> Qwen3Model.Config:
    check_experts(hf, where)
    config = _qwen3_config(hf, where, attn_backend)
    for index, layer in enumerate(config.layers):
        if has_experts(hf, index):
            layer.feed_forward, layer.moe = None, moe_from_hf(hf)
    return config


_BUILDERS = {"llama3": _llama_config, "qwen3": _qwen3_config, "qwen3_moe": _qwen3_moe_config}
