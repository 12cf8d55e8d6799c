"""What test_smollm2_logits.py computes, on one rank or on two: SmolLM2-135M's logits; see launching.py.

Every rank writes those of its share of ``texts.json`` to ``world<N>.rank<R>.safetensors``.
"""

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed import fsdp_worker
from titan_rl.titan.weights import load_hf


def run(directory: Path) -> None:
    """Load the model on this rank, sharded when there are two, and compute."""
    model_dir, texts = json.loads((directory / "texts.json").read_text())
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fsdp_worker.build(Path(model_dir))
    load_hf(model.policy, model.adapter, model_dir)
    mine = range(rank, len(texts), size)  # as many as the other's: each forward pass gathers the weights
    logits = {str(index): fsdp_worker.logits(model, [texts[index]])[0].contiguous() for index in mine}
    save_file(logits, directory / f"world{size}.rank{rank}.safetensors")
