"""A weight push against saving a model and loading it again, for the generator of a run.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.weight_sync \\
        train_configs/smollm2_135m_arithmetic_grpo.toml [--pairs 7] [--section.key value ...]

The candidate is the push as a run does it, with checksums on both sides, the probe and the look at the
generator's own parameters. Two baselines write the policy as safetensors (into the page cache: nothing is
forced to the disk) and then

- load the file into the generator that is there, unchecked, or
- start a vLLM on it in a new process, as where trainer and generator know only each other's files (one rank).

With several ranks a third comparison is that of buckets with one tensor at a time.

Every run finds other weights in the generator, and every other run of a side has other weights to bring.
The gate is the generator's log-probabilities of some texts and the checksums of what it holds: bitwise.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks import paired
from titan_rl.config.entry import read_checked
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.titan.state import local
from titan_rl.titan.weights import TIED_EMBEDDING, TIED_HEAD, WeightStream, export_hf, is_tied
from titan_rl.trainers import assembly
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.rl import RLTrainer
from titan_rl.types import WeightUpdate

Bring = Callable[[], paired.Outputs]
"""Brings the policy's weights to a generator. Empty, or what that generator serves if it is another one."""
TEXT_TOKENS, NUM_TEXTS = 16, 4


class Bench:
    """A run's policy and generator, and what brings the one's weights to the other."""

    def __init__(self, trainer: RLTrainer, directory: Path) -> None:
        """Bind a trainer that is built.

        Args:
            trainer: Whose sides.
            directory: For the files, the same on all ranks.
        """
        self.trainer, self.directory = trainer, directory
        self._weights = [local(p).clone() for p in trainer.policy.parameters()]
        self._runs: dict[str, int] = {}
        self._version = 0
        vocab = trainer.model_config.vocab_size
        draw = torch.Generator().manual_seed(0)
        self.texts = torch.randint(vocab, (NUM_TEXTS, TEXT_TOKENS), generator=draw).tolist()

    def served(self) -> paired.Outputs:
        """What the generator serves, as texts: compared exactly."""
        generator: Any = self.trainer.generator
        return {
            "log-probabilities": repr(generator.prompt_logprobs([tuple(text) for text in self.texts])),
            "checksums": json.dumps(generator._checksums(), sort_keys=True),
        }

    def push(self) -> paired.Outputs:
        """The candidate. Empty, as of every side whose weights are in the generator afterwards."""
        self._version += 1
        self.trainer.sync.push(self._version)
        return {}

    def push_one_by_one(self) -> paired.Outputs:
        """Baseline of several ranks: the push, each tensor gathered when the one before it is loaded."""
        sync: Any = self.trainer.sync
        adapter = assembly.state_dict_adapter(self.trainer)
        buckets, sync._stream = sync._stream, WeightStream(self.trainer.policy, adapter, bucket_bytes=1)
        try:
            return self.push()
        finally:
            sync._stream = buckets

    def save(self) -> Path:
        """Write the policy in Hugging Face layout. Collective."""
        trainer, target = self.trainer, self.directory / "saved"
        export_hf(
            assembly.weight_stream(trainer),
            directory=target,
            hf_config=trainer.hf_config or {},
            assets=trainer.config.hf_assets_path,
            is_tied=is_tied(trainer.policy),
        )
        trainer.collectives.barrier()
        return target

    def save_and_load(self) -> paired.Outputs:
        """Baseline: the file into the engine that is there. vLLM's reload, or the local generator's sink."""
        tensors = _read(self.save())
        generator: Any = self.trainer.generator
        self._version += 1
        if not isinstance(self.trainer.config.generator, VllmGenerator.Config):
            generator.load_weights(WeightUpdate("full", self._version, None, tensors))
            return {}
        engine = generator._engine
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        engine.reset_prefix_cache()
        return {}

    def save_and_start(self) -> paired.Outputs:
        """Baseline: the file into a vLLM of its own process; returns what that serves."""
        job = {"model": str(self.save()), "texts": self.texts, "dtype": "float32"}
        command = [sys.executable, "-m", "benchmarks.weight_sync", "--serve", json.dumps(job)]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return {"log-probabilities": done.stdout.splitlines()[-1]}

    def prepare(self, name: str) -> None:
        """Other weights in the generator, then those that this run of the side has to bring."""
        generator: Any = self.trainer.generator
        generator._written = generator._checksums()  # a baseline's load is none of the push's own
        self._runs[name] = self._runs.get(name, 0) + 1
        self._set(0.5)
        self.push()
        self._set(1.0 if self._runs[name] % 2 else 1.0 + 2**-6)
        self.trainer.collectives.barrier()

    @torch.no_grad()
    def _set(self, factor: float) -> None:
        for parameter, weight in zip(self.trainer.policy.parameters(), self._weights, strict=True):
            local(parameter).copy_(weight * factor)


def _read(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the files, the embedding under both its names where the head is tied to it."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            for name in names:
                tensor = file.get_tensor(name)
                yield name, tensor
                if name == TIED_EMBEDDING and TIED_HEAD not in names:
                    yield TIED_HEAD, tensor


def measure(
    bench: Bench, baseline: tuple[str, Bring], *, question: str, pairs: int, target: float | None = 10.0
) -> paired.Comparison:
    """The push against a baseline, in turns. What is served is looked at when the clock has stopped."""
    sides = {baseline[0]: baseline[1], "push": bench.push}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(-1, pairs):  # the first is not counted
        served = {}
        for name in sides if pair % 2 else reversed(sides):
            bench.prepare(name)
            started = time.perf_counter()
            found = sides[name]()
            elapsed = time.perf_counter() - started
            served[name] = found or bench.served()
            if pair >= 0:
                seconds[name].append(elapsed)
        wanted = served[baseline[0]]
        paired.check_equal(wanted, {key: served["push"][key] for key in wanted}, tolerance=0.0)
    parameters = list(bench.trainer.policy.parameters())
    facts = {
        "parameters": sum(p.numel() for p in parameters),
        "ranks": dist.get_world_size(),
        "generator": type(bench.trainer.generator).__name__,
    }
    return paired.summarise(
        question,
        baseline=(baseline[0], seconds[baseline[0]]),
        candidate=("push", seconds["push"]),
        target=target,
        facts=facts,
    )


def serve(job: dict[str, Any]) -> None:
    """Start vLLM on a model directory, and print the log-probabilities of some texts as the last line."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=2 * TEXT_TOKENS,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=2**27,
    )
    options = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": text} for text in job["texts"]], options)
    scored = [zip(out.prompt_token_ids, out.prompt_logprobs, strict=True) for out in outputs]
    print([tuple(entry[token].logprob for token, entry in pairs if entry) for pairs in scored])


def main() -> None:
    """Build a run's two sides and compare."""
    options = paired.parser(__doc__)
    options.add_argument("config", help="TOML file of an RL run, and overrides")
    options.add_argument("--in-place", action="store_true", help="start no vLLM in a new process")
    arguments, overrides = options.parse_known_args()
    document, kind = read_checked(arguments.config, overrides)
    trainer: RLTrainer = configure(document, kind).build()
    with tempfile.TemporaryDirectory() as name:
        directory = trainer.collectives.first(name)  # the first rank's, which the others read
        bench = Bench(trainer, Path(directory[1] if directory else name))
        into = ("save, load into the engine", bench.save_and_load)
        found = [measure(bench, into, question="weights to the generator", pairs=arguments.pairs)]
        is_vllm = isinstance(trainer.config.generator, VllmGenerator.Config)
        if is_vllm and not arguments.in_place and dist.get_world_size() == 1:
            anew = ("save, start vLLM on it", bench.save_and_start)
            found.append(measure(bench, anew, question="weights to a new generator", pairs=arguments.pairs))
        if dist.get_world_size() > 1:
            single = ("push, tensor by tensor", bench.push_one_by_one)
            question = "weights in buckets"
            found.append(measure(bench, single, question=question, pairs=arguments.pairs, target=None))
        trainer.collectives.barrier()  # nobody reads any more
    if dist.get_rank() == 0:
        paired.report("weight_sync", found, folder=arguments.out)
    trainer.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
