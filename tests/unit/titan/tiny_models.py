"""Random transformers models in Hugging Face directories, and TorchTitan's model of such a directory."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from titan_rl.titan import device
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.experts import use_cpu_experts
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.models import build_adapter
from titan_rl.titan.weights import load_hf

device.install()

_CLASSES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
"""Sizes of a Qwen3-MoE beside those of every kind: the layer in the middle is dense."""
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def make_peer(kind: str, *, seed: int = 0, **changed: Any) -> Any:
    """A random model whose norms are not all ones. Where a value is None, the key is left out."""
    config_class, model_class = _CLASSES[kind]
    sizes = _COMMON | (EXPERTS if kind == "qwen3_moe" else {}) | changed
    values = {key: value for key, value in sizes.items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**values)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    return model


def build_titan(spec: Any) -> Any:
    """TorchTitan's model of a spec, on the CPU, whole, randomly initialised."""
    use_cpu_attention(spec.model)
    use_cpu_experts(spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng():
        model.init_weights(buffer_device=None)
    return model.eval()


def load_titan(directory: Path) -> Any:
    """TorchTitan's model of a directory, with the weights in it."""
    spec = spec_from_hf(directory)
    model = build_titan(spec)
    load_hf(model, build_adapter(spec, spec.model), str(directory))
    return model


def titan_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of whole rows, one document each."""
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    with torch.no_grad():
        return model(ids, positions, model.get_attention_masks(positions))


def peer_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def tokens(length: int = 150, rows: int = 2) -> torch.Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(7))
