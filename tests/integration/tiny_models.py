"""Tiny random models, the same in every process, and the log-probabilities that transformers gives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 130  # not a multiple of 64, vLLM's padding


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "dtype": "float32",
}


def llama_config(*, is_tied: bool) -> LlamaConfig:
    return LlamaConfig(
        **_COMMON, intermediate_size=128, tie_word_embeddings=is_tied, architectures=["LlamaForCausalLM"]
    )


def moe_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **_COMMON,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )


def write_model_dirs(directory: Path) -> None:
    """Hugging Face directories without weights."""
    llama_config(is_tied=True).save_pretrained(directory / "tied")
    llama_config(is_tied=False).save_pretrained(directory / "untied")
    moe_config().save_pretrained(directory / "moe")


@functools.cache
def llama(seed: int, *, is_tied: bool) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config(is_tied=is_tied)).eval()


def weights(seed: int, *, is_tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by their Hugging Face name, ``lm_head.weight`` included."""
    yield from llama(seed, is_tied=is_tied).state_dict().items()


DELTA = (
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj",
    "1.mlp.down_proj",
)


def delta(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Some tensors of a tied model: those of one fused layer of vLLM's, and of a plain one."""
    return [(n, t) for n, t in weights(seed, is_tied=True) if n.removesuffix(".weight").endswith(DELTA)]


@functools.cache
def after_delta(seed: int, *, delta_seed: int) -> LlamaForCausalLM:
    """The tied model of a seed with the delta of another."""
    model = copy.deepcopy(llama(seed, is_tied=True))
    model.load_state_dict(dict(delta(delta_seed)), strict=False)
    return model


ADAPTER_RANK = 5


def adapter(seed: int) -> list[tuple[str, torch.Tensor]]:
    """A low-rank adapter of every linear layer of the tied model but its head, under PEFT's names."""
    generator, found = torch.Generator().manual_seed(seed), []
    for name, tensor in weights(1, is_tied=True):
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = tensor.shape
            for half, shape in (("A", (ADAPTER_RANK, columns)), ("B", (rows, ADAPTER_RANK))):
                found.append((f"{module}.lora_{half}.weight", 0.1 * torch.randn(shape, generator=generator)))
    return found


@functools.cache
def adapted(seed: int, *, adapter_seed: int) -> LlamaForCausalLM:
    """The tied model of a seed with an adapter merged into it."""
    model, halves = copy.deepcopy(llama(seed, is_tied=True)), dict(adapter(adapter_seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            low, high = (
                halves.get(f"base_model.model.{name.removesuffix('weight')}lora_{half}.weight")
                for half in "AB"
            )
            if low is not None and high is not None:
                parameter += high @ low
    return model


@functools.cache
def moe(seed: int) -> Qwen3MoeForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(moe_config()).eval()


def moe_weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by the names of a checkpoint, where each expert has its own; transformers stacks them."""
    for name, tensor in moe(seed).state_dict().items():
        stem, is_expert, kind = name.partition("mlp.experts.")
        if not is_expert:
            yield name, tensor
            continue
        projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, stacked in enumerate(tensor):
            for projection, part in zip(projections, stacked.chunk(len(projections)), strict=True):
                yield f"{stem}mlp.experts.{expert}.{projection}.weight", part


def reference_logprobs(
    model: LlamaForCausalLM | Qwen3MoeForCausalLM,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    temperature: float,
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` of each completion token."""
    token_ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(token_ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
