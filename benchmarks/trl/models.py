"""Random Llamas over the project's character tokenizer, whose end token has a chosen probability.

Weights are random, but one dimension of every embedding is large and no layer writes to it, so that after the
last norm it is nearly constant. The output row of a token then holds its bias: the special tokens are never
sampled, and the end token is with the probability that the workload asks for. So completions have equal or
geometrically distributed lengths on every side, without an option of any framework.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.trl.workloads import Shape

ASSETS = Path(__file__).parents[2] / "titan_rl" / "assets" / "tiny_llama"
VOCABULARY, SPECIAL, END = 104, 7, 2
_HEAD_DIM = 32
_NEVER = -30.0


def write_model(shape: Shape, directory: Path, *, seed: int = 0) -> Path:
    """Make a model and write it in Hugging Face layout, with the tokenizer.

    Args:
        shape: Which.
        directory: Where; replaced.
        seed: Of the weights.

    Returns:
        The directory.
    """
    shutil.rmtree(directory, ignore_errors=True)
    model = build(shape, seed=seed)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, directory / name)
    return directory


@torch.no_grad()
def build(shape: Shape, *, seed: int = 0) -> LlamaForCausalLM:
    """The model of a shape in fp32, with its biases set.

    Args:
        shape: Which.
        seed: Of the weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(shape)).eval()
        probe = torch.randint(SPECIAL, VOCABULARY, (16, 32))
    model.model.embed_tokens.weight[:, 0] = model.config.initializer_range * math.sqrt(shape.dim)
    for layer in model.model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight[0] = 0.0
    head = model.lm_head.weight
    head[:, 0] = 0.0
    hidden = model.model(probe).last_hidden_state
    constant = float(hidden[..., 0].mean())
    head[:SPECIAL, 0] = _NEVER / constant
    if shape.end_probability:
        # p = exp(b) / (exp(b) + sum of the others), and the others' logits are small.
        others = float((hidden @ head[SPECIAL:].T).exp().sum(-1).mean())
        head[END] = 0.0
        bias = math.log(others * shape.end_probability / (1 - shape.end_probability))
        head[END, 0] = bias / constant
    return model


def _config(shape: Shape) -> LlamaConfig:
    heads = shape.dim // _HEAD_DIM
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=shape.dim,
        intermediate_size=3 * shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        dtype="float32",
    )
