"""What test_vllm_generator.py asks of vLLM, run as torchrun ranks; writes what happened as JSON.

Usage: torchrun --standalone --nproc-per-node N -m tests.integration.vllm_scenarios {single,pair} DIRECTORY
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.integration.tiny_models import (
    ADAPTER_RANK,
    VOCAB_SIZE,
    adapter,
    delta,
    moe_weights,
    weights,
)
from titan_rl.errors import TitanRLError
from titan_rl.generation.protocol import GeneratorContext, generate
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.types import Completion, GenerationRequest, SamplingParams, WeightUpdate

MAX_MODEL_LEN = 128
SECONDS = 120.0
STOP = tuple(range(7, 17))
PREFIX = tuple((17 * i) % VOCAB_SIZE for i in range(40))  # longer than one KV block


def requests(*, first_seed: int = 2**40, name: str = "r", count: int = 12) -> list[GenerationRequest]:
    """Prompts that share a prefix, at temperatures 1, 0.5 and 0."""
    return [
        GenerationRequest(
            id=f"{name}{i}",
            prompt_token_ids=(*PREFIX[: 3 + 10 * (i % 4)], i % 5, 90 + i % 3),
            sampling=SamplingParams(max_tokens=24, temperature=(1.0, 0.5, 0.0)[i % 3], stop_token_ids=STOP),
            seed=first_seed + i,
        )
        for i in range(count)
    ]


def long_requests(name: str, lengths: Iterable[int]) -> list[GenerationRequest]:
    """Requests of exactly these lengths: nothing stops them. Their seeds differ in the high bits only."""
    return [
        GenerationRequest(f"{name}{i}", PREFIX, SamplingParams(max_tokens=n), seed=5 + i * 2**40)
        for i, n in enumerate(lengths)
    ]


def update(version: int, seed: int, *, is_tied: bool = True, without: tuple[str, ...] = ()) -> WeightUpdate:
    tensors = ((n, t) for n, t in weights(seed, is_tied=is_tied) if not n.endswith(without or ("?",)))
    return WeightUpdate(kind="full", version=version, base_version=None, tensors=tensors)


def plain(completions: Iterable[Completion]) -> list[dict[str, Any]]:
    return [
        {
            "id": c.request_id,
            "token_ids": c.token_ids,
            "logprobs": c.logprobs,
            "finish_reason": c.finish_reason.value,
            "policy_versions": c.policy_versions,
        }
        for c in completions
    ]


def error_of(call: Callable[[], object]) -> str:
    """The message of the titan_rl error that the call raises, or "" if it raises none."""
    try:
        call()
    except TitanRLError as error:
        return str(error)
    return ""


def start(
    model_dir: Path,
    *,
    degree: int = 1,
    agree: Callable[[bool], bool] | None = None,
    lora_rank: int | None = None,
) -> VllmGenerator:
    config = VllmGenerator.Config(tensor_parallel_degree=degree, max_num_seqs=64, kv_cache_gib=0.125)
    context = GeneratorContext(
        model_dir=str(model_dir),
        model_config=None,
        adapter=None,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        seed=0,
        device_type="cpu",
        run_threads=1,
        agree=agree,
        lora_rank=lora_rank,
    )
    return VllmGenerator(config, context)


def process_state() -> list[Any]:
    """Random state of torch, Python and numpy, and the number of threads."""
    return [
        torch.get_rng_state().tolist(),
        list(random.getstate()[1]),
        np.random.get_state()[1].tolist(),
        torch.get_num_threads(),
    ]


def sampling(generator: VllmGenerator) -> dict[str, Any]:
    """The same requests alone, in company, with other seeds; and finishing order."""
    facts: dict[str, Any] = {"batch": plain(generate(generator, requests(), SECONDS))}
    generator.submit([*requests(first_seed=5, name="other", count=24), *reversed(requests())])
    facts["in_company"] = plain(generator.completions(SECONDS))
    facts["siblings"] = plain(generate(generator, long_requests("g", [16] * 8), SECONDS))
    seen, submitted = [], False
    generator.submit(long_requests("s", [2, 20]))
    for completion in generator.completions(SECONDS):
        seen.append([completion.request_id, len(completion.token_ids)])
        if not submitted:
            generator.submit(long_requests("late", [3]))
            submitted = True
    facts["finishing_order"] = seen
    return facts


def control(generator: VllmGenerator) -> dict[str, Any]:
    """Abort, deadline, pause, and what is refused."""
    facts: dict[str, Any] = {}
    generator.submit(long_requests("a", [8, 8, 8]))
    generator.abort(["a1", "unknown"])
    facts["after_abort"] = [c.request_id for c in generator.completions(SECONDS)]
    generator.submit(long_requests("t", [8, 9]))
    facts["deadline"] = error_of(lambda: list(generator.completions(0.0)))
    facts["load_in_flight"] = error_of(lambda: generator.load_weights(update(9, seed=2)))
    facts["probe_in_flight"] = error_of(lambda: generator.prompt_logprobs([PREFIX]))
    generator.pause()
    facts["while_paused"] = [len(list(generator.completions(SECONDS))), generator.status().num_in_flight]
    generator.resume()
    facts["after_deadline"] = [len(c.token_ids) for c in generator.completions(SECONDS)]
    facts["same_id_twice"] = error_of(lambda: generator.submit(long_requests("d", [2]) * 2))
    facts["too_long"] = error_of(lambda: generator.submit(long_requests("l", [MAX_MODEL_LEN])))
    facts["probe_temperature"] = error_of(lambda: generator.prompt_logprobs([PREFIX], 0.5))
    facts["in_flight_at_the_end"] = generator.status().num_in_flight
    return facts


def single(directory: Path) -> dict[str, Any]:
    before = process_state()
    generator = start(directory / "tied")
    facts: dict[str, Any] = {
        "before_first_load": error_of(lambda: generator.submit(requests())),
        "version_before_first_load": generator.status().policy_version,
        "num_threads_can_be_set": (torch.set_num_threads(2), torch.get_num_threads())[1],
    }
    torch.set_num_threads(before[-1])
    receipt = generator.load_weights(update(0, seed=1))
    facts["receipt"] = [receipt.version, dict(receipt.checksums), receipt.unwritten]
    facts |= sampling(generator) | control(generator)
    generator.load_weights(update(1, seed=2))
    facts["batch_second_weights"] = plain(generate(generator, requests(), SECONDS))
    incomplete = {}
    for missing in (
        "lm_head.weight",
        "embed_tokens.weight",
        "0.self_attn.k_proj.weight",
        "model.norm.weight",
    ):
        incomplete[missing] = generator.load_weights(update(2, seed=3, without=(missing,))).unwritten
    facts["unwritten"] = incomplete
    facts["after_incomplete"] = error_of(lambda: generator.submit(requests()))
    twice = WeightUpdate("full", 2, None, [*list(weights(3, is_tied=True))[:6], *weights(4, is_tied=True)])
    facts["name_twice"] = error_of(lambda: generator.load_weights(twice))
    facts["version_after_failure"] = generator.status().policy_version
    facts["unwritten_after_failure"] = generator.load_weights(update(3, seed=3)).unwritten
    facts["batch_third_weights"] = plain(generate(generator, requests(), SECONDS))
    facts["probe"] = generator.prompt_logprobs([PREFIX, PREFIX[:2]])
    facts |= deltas(generator)
    generator.close()
    facts["groups_after_close"] = dist.is_initialized()
    generator = start(directory / "untied")
    generator.load_weights(update(0, seed=1, is_tied=False))
    generator.load_weights(update(1, seed=2, is_tied=False))
    facts["batch_untied"] = plain(generate(generator, requests(), SECONDS))
    generator.close()
    facts["adapters"] = adapters(directory)
    generator = start(directory / "moe")
    for seed in (1, 2):
        expert_update = WeightUpdate("full", seed, None, moe_weights(seed))
        facts["unwritten_moe"] = generator.load_weights(expert_update).unwritten
    facts["probe_moe"] = generator.prompt_logprobs([PREFIX])
    facts["process_state_kept"] = [a == b for a, b in zip(before, process_state(), strict=True)]
    return facts


def deltas(generator: VllmGenerator) -> dict[str, Any]:
    """Some tensors replaced in an engine that serves version 3; then one of three that vLLM keeps in one."""
    receipt = generator.load_weights(WeightUpdate("delta", 4, 3, delta(4)))
    facts: dict[str, Any] = {"delta": [receipt.version, sorted(receipt.checksums), receipt.unwritten]}
    facts["batch_after_delta"] = plain(generate(generator, requests(), SECONDS))
    facts["delta_to_another"] = error_of(
        lambda: generator.load_weights(WeightUpdate("delta", 6, 5, delta(4)))
    )
    facts["delta_in_part"] = generator.load_weights(WeightUpdate("delta", 5, 4, delta(4)[:2])).unwritten
    facts["version_after_part"] = generator.status().policy_version
    return facts


def adapters(directory: Path) -> dict[str, Any]:
    """An engine that takes adapters: none, one, the next, and one under the id of the one before."""
    generator = start(directory / "tied", lora_rank=ADAPTER_RANK)
    # Late, because it imports vLLM, which the generator has to do.
    module = importlib.import_module("titan_rl.generation.vllm_adapters")
    facts: dict[str, Any] = {"unwritten": [generator.load_weights(update(0, seed=1)).unwritten]}
    facts["base"] = plain(generate(generator, requests(), SECONDS))

    def push(version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        receipt = generator.load_weights(WeightUpdate("lora", version, None, tensors))
        facts["unwritten"].append(receipt.unwritten)
        return receipt

    receipt = push(1, adapter(5))
    facts["checksums"] = dict(receipt.checksums)
    facts["first"] = plain(generate(generator, requests(), SECONDS))
    push(2, adapter(6))
    facts["second"] = plain(generate(generator, requests(), SECONDS))
    facts["probe"] = generator.prompt_logprobs([PREFIX])
    facts["altered"] = [list(generator.altered_weights())]
    facts["rank_too_large"] = error_of(lambda: push(3, [(n, t.repeat(9, 9)) for n, t in adapter(6)]))
    facts["left"] = [str(path) for path in module.SHARED_MEMORY.glob(module.launch_prefix() + "*policy*")]
    push(3, adapter(6)[2:])  # without the first layer's queries
    generator.load_weights(update(4, seed=2))
    facts["new_base_alone"] = plain(generate(generator, requests(), SECONDS))
    push(5, adapter(5))
    facts["new_base"] = plain(generate(generator, requests(), SECONDS))
    module._ids = itertools.repeat(next(module._ids) - 1)  # planted fault: the id of the adapter before
    facts["old_id"] = error_of(lambda: push(6, adapter(6)))
    facts["version_after_old_id"] = generator.status().policy_version
    generator.close()
    return facts


def pair(directory: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def agree(flag: bool) -> bool:
        packed = torch.tensor([int(flag)])
        dist.broadcast(packed, src=0)
        return bool(packed.item())

    generator = start(directory / "tied", degree=2, agree=agree)
    facts: dict[str, Any] = {"unwritten": generator.load_weights(update(0, seed=1)).unwritten}
    facts["batch"] = plain(generate(generator, requests(), SECONDS))
    facts["missing"] = generator.load_weights(update(1, seed=2, without=("0.mlp.up_proj.weight",))).unwritten
    generator.load_weights(update(1, seed=2))
    # The first rank's clock decides: the second one's has run out in the first case, not in the second.
    facts["second_clock_out"] = plain(generate(generator, requests(), SECONDS if rank == 0 else 0.0))
    generator.submit(long_requests("t", [4]))
    facts["first_clock_out"] = error_of(lambda: list(generator.completions(0.0 if rank == 0 else SECONDS)))
    # Late, because it imports vLLM, which the generator has to do.
    names = importlib.import_module("titan_rl.generation.vllm_shared_memory")
    facts["shared_memory"] = [str(path) for path in names.SHARED_MEMORY.glob(names.launch_prefix() + "*")]
    generator.close()
    # A second engine of the same group, whose memory has the first one's name.
    generator = start(directory / "tied", degree=2, agree=agree)
    facts["unwritten_by_second"] = generator.load_weights(update(0, seed=1)).unwritten
    facts["batch_of_second"] = plain(generate(generator, requests(), SECONDS))
    return facts


def main(what: str, directory: Path) -> None:
    torch.set_num_threads(1)
    facts = {"single": single, "pair": pair}[what](directory)
    rank = dist.get_rank()
    (directory / f"{what}{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
