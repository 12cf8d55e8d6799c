"""Tiny random Llama models, the same in every process, and the log-probabilities that transformers gives."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 130  # not a multiple of 64, vLLM's padding


def llama_config(*, is_tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=is_tied,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def write_model_dir(directory: Path, *, is_tied: bool) -> str:
    """A Hugging Face directory without weights."""
    llama_config(is_tied=is_tied).save_pretrained(directory)
    return str(directory)


@functools.cache
def llama(seed: int, *, is_tied: bool) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config(is_tied=is_tied)).eval()


def weights(seed: int, *, is_tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by their Hugging Face name, ``lm_head.weight`` included."""
    yield from llama(seed, is_tied=is_tied).state_dict().items()


def reference_logprobs(
    model: LlamaForCausalLM, prompt: Sequence[int], completion: Sequence[int], *, temperature: float
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` of each completion token."""
    token_ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(token_ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
