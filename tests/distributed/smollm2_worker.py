"""What test_smollm2_logits.py computes, on one rank or on two: SmolLM2-135M's logits; see launching.py.

Every rank writes those of its share of ``texts.json`` to ``world<N>.rank<R>.safetensors``.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed import fsdp_worker
from titan_rl.titan.weights import load_hf

ROWS = 6


def run(directory: Path) -> None:
    """Load the model on this rank, sharded when there are two, and compute."""
    model_dir, texts = json.loads((directory / "texts.json").read_text())
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fsdp_worker.build(Path(model_dir))
    load_hf(model.policy, model.adapter, model_dir)
    # As many as the other's: each forward pass gathers the weights. Rows are filled up behind their text.
    mine = list(range(rank, len(texts), size))
    logits: dict[str, torch.Tensor] = {}
    for first in range(0, len(mine), ROWS):
        chosen = mine[first : first + ROWS]
        longest = max(len(texts[index]) for index in chosen)
        rows = [texts[index] + [0] * (longest - len(texts[index])) for index in chosen]
        found = fsdp_worker.logits(model, rows)
        logits |= {str(i): row[: len(texts[i])].contiguous() for i, row in zip(chosen, found, strict=True)}
    save_file(logits, directory / f"world{size}.rank{rank}.safetensors")
