"""One rank of test_local_generator.py: a sharded policy pushes its weights to this rank's own generator."""

import json
from pathlib import Path

import torch.distributed as dist
from torchtitan.distributed import utils as dist_utils

from tests.distributed.fsdp_worker import build
from titan_rl.generation.local import LocalGenerator
from titan_rl.generation.protocol import GeneratorContext, generate
from titan_rl.titan.weights import WeightStream, load_hf
from titan_rl.types import GenerationRequest, SamplingParams, WeightUpdate


def make_requests() -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=10)
    return [GenerationRequest(f"p{i}", tuple(range(1, 4 + 3 * i)), params, seed=i) for i in range(4)]


def make_generator(model_config: object, adapter: object) -> LocalGenerator:
    context = GeneratorContext(
        model_dir="",
        model_config=model_config,
        adapter=adapter,
        max_model_len=64,
        dtype="float32",
        seed=0,
        device_type="cpu",
        run_threads=1,
    )
    return LocalGenerator(LocalGenerator.Config(), context)


def push_and_generate(directory: str, tensor_parallel_degree: int) -> dict[str, object]:
    rank = build(
        Path(directory),
        data_parallel_shard_degree=dist.get_world_size() // tensor_parallel_degree,
        tensor_parallel_degree=tensor_parallel_degree,
    )
    load_hf(rank.policy, rank.adapter, directory)
    generator = make_generator(rank.model_config, rank.adapter)
    stream = WeightStream(rank.policy, rank.adapter)
    receipt = generator.load_weights(WeightUpdate("full", 3, None, stream))
    # Ranks go different ways from here on: nothing below may communicate.
    requests = make_requests() if dist.get_rank() == 0 else make_requests()[::-1][:3]
    completions = generate(generator, requests, 120)
    return {
        "backend": dist_utils.get_spmd_backend(),
        "is_sharded": any(
            hasattr(p, "placements") and p.to_local().shape != p.shape for p in rank.policy.parameters()
        ),
        "unwritten": receipt.unwritten,
        "checksums": dict(receipt.checksums),
        "completions": {c.request_id: [c.token_ids, c.logprobs] for c in completions},
    }


def run(directory: Path) -> None:
    results = [push_and_generate(str(directory), degree) for degree in (1, 2)]
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
