"""What the tests of two ranks against one share: a small random model, gradients by case, and "equal"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.distributed import fsdp_worker

TOLERANCE = 1e-5
OF_TERMS = 1e-6
"""Of a sum that cancels, against the sum of its terms without their signs."""


def random_peer(name: str, *, seed: int = 0) -> LlamaForCausalLM | Qwen3ForCausalLM:
    """A model of transformers whose heads do not divide: 9 query heads, 3 key-value heads of 8, over 2 ranks.

    Args:
        name: ``llama`` or ``qwen3``, with ``_tied`` behind it where the embeddings are.
        seed: Of the weights.
    """
    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if name.startswith("llama") else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = config_class(
        vocab_size=fsdp_worker.VOCAB,
        hidden_size=72,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=name.endswith("_tied"),
    )
    torch.manual_seed(seed)
    return model_class(config)


@torch.no_grad()
def uneven_norms(model: torch.nn.Module) -> None:
    """Draw the weights of all norms: ones would hide a norm that is applied in the wrong place.

    Args:
        model: Of transformers; changed in place.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)


def gradients(
    tensors: dict[str, torch.Tensor], case: str, *, at_least: int, above: float = 1e-6
) -> dict[str, torch.Tensor]:
    """Gradients of one case by name, none of them missing and none of them zero.

    Args:
        tensors: Of every case, under ``<case>/<name>``.
        case: Which.
        at_least: That many of them.
        above: Their norms; a gradient of zero compares with nothing.
    """
    prefix = f"{case}/"
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    assert len(found) >= at_least
    assert all(value.norm() > above for value in found.values()), "a gradient of zero compares with nothing"
    return found


def unequal(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, sizes: Mapping[str, float] | None = None
) -> list[str]:
    """Names of the tensors for which ``||a - b|| <= 1e-5 ||b|| + 1e-8`` does not hold.

    Args:
        a: By name.
        b: What they should be.
        sizes: Of sums that cancel, the sum of their terms without their signs: 1e-6 of that is enough.
    """
    assert a.keys() == b.keys()
    return [
        name
        for name, right in b.items()
        if (a[name] - right).norm()
        > max(TOLERANCE * float(right.norm()), OF_TERMS * (sizes or {}).get(name, 0.0)) + 1e-8
    ]
