"""One torchrun rank of test_tiny_run.py: train, sample with the run's generator, then load what was exported.

Started by torchrun with CONFIG.toml --dump_folder FOLDER and further overrides; writes FOLDER/facts.json.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl.config.entry import read_checked
from titan_rl.generation.protocol import generate
from titan_rl.titan.api import init_logger
from titan_rl.trainers.configuration import configure
from titan_rl.types import GenerationRequest, SamplingParams

PROMPTS, TOKENS = 64, 32


def random_prompts() -> list[list[int]]:
    """Of any tokens but the special ones: after a sum, a model of sums says little more than "stop"."""
    draw = random.Random(0)
    return [[1, *(draw.randrange(3, 104) for _ in range(3 + i % 9))] for i in range(PROMPTS)]


def requests(prompts: list[list[int]], *, temperature: float) -> list[GenerationRequest]:
    """Nothing stops them: all are of the same length."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=temperature)
    return [GenerationRequest(f"r{i}", tuple(prompt), sampling, seed=i) for i, prompt in enumerate(prompts)]


def main(arguments: list[str]) -> None:
    init_logger()
    config = configure(*read_checked(arguments[0], arguments[1:]))
    trainer = config.build()
    trainer.train()
    prompts = random_prompts()
    facts: dict[str, Any] = {"prompts": prompts}
    for name, temperature in (("greedy", 0.0), ("warm", 1.0), ("cool", 0.5)):
        completions = generate(trainer.generator, requests(prompts, temperature=temperature), 300)
        facts[name] = [{"token_ids": c.token_ids, "logprobs": c.logprobs} for c in completions]
    trainer.close()
    facts["exported"] = greedy_with_vllm(config.dump_folder + "/export", prompts)
    Path(config.dump_folder, "facts.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def greedy_with_vllm(directory: str, prompts: list[list[int]]) -> list[list[int]]:
    """What vLLM makes of the exported files, started as its users start it."""
    # It reads its environment when it is imported, and that is the generator's business.
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    engine = LLM(
        model=directory,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=2**27,
        enforce_eager=True,
        distributed_executor_backend="external_launcher",
    )
    greedy = VllmSamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(sys.argv[1:])
