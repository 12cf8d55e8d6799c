"""Random transformers models in Hugging Face directories, and TorchTitan's model of such a directory."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from titan_rl.titan import device
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.weights import load_hf

device.install()

_CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
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


def make_peer(kind: str, *, seed: int = 0, **changed: Any) -> LlamaForCausalLM | Qwen3ForCausalLM:
    """A random model whose norms are not all ones. Where a value is None, the key is left out."""
    config_class, model_class = _CLASSES[kind]
    values = {key: value for key, value in (_COMMON | changed).items() if value is not None}
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
    load_hf(model, spec.state_dict_adapter(spec.model, None), str(directory))
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
