"""One workload with TRL's ``GRPOTrainer``, in TRL's own environment (benchmarks/trl/setup.sh).

    python -m benchmarks.trl.run_trl WORKLOAD.json STEPS.jsonl FOLDER FLAGS

``FLAGS`` is a JSON object: fields of ``GRPOConfig`` that are tried, over those that make the work the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl.clock import StepClock
from benchmarks.trl.flags import VLLM_PATCH, flags_for
from benchmarks.trl.rewards import REWARDS
from benchmarks.trl.workloads import read


class _Clock(TrainerCallback):
    """Ticks at the end of an optimiser step, with what the reward function saw of it."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.seen: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.tick(**self.seen)


def main() -> None:
    """Train."""
    workload, steps, folder, tried = sys.argv[1:]
    spec, rows = read(Path(workload))
    flags = json.loads(tried)
    if flags.pop(VLLM_PATCH, False):
        _patch_weight_sync()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    callback = _Clock(StepClock(Path(steps)))
    reward = REWARDS[spec["reward"]]
    prompt_lengths = _prompt_lengths(spec, tokenizer)

    def score(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        rewards = [reward(text, answer) for text, answer in zip(texts, kwargs["answer"], strict=True)]
        callback.seen = {
            "samples": len(rewards),
            "prompt_tokens": sum(prompt_lengths(prompt) for prompt in prompts),
            "completion_tokens": sum(len(ids) for ids in kwargs["completion_ids"]),
            "reward": sum(rewards) / len(rewards),
        }
        return rewards

    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=score,
        args=GRPOConfig(output_dir=folder, **flags_for(spec, flags)),
        train_dataset=Dataset.from_list(
            [{"prompt": _prompt(spec, row), "answer": row["answer"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()


def _prompt(spec: dict[str, Any], row: dict[str, str]) -> Any:
    """Text, or messages for a chat model: TRL renders them with the tokenizer's template."""
    if not spec["system_prompt"]:
        return row["prompt"]
    return [
        {"role": "system", "content": spec["system_prompt"]},
        {"role": "user", "content": row["prompt"]},
    ]


def _prompt_lengths(spec: dict[str, Any], tokenizer: Any) -> Any:
    """From a prompt to its number of tokens."""
    if not spec["system_prompt"]:
        return lambda prompt: len(tokenizer(prompt)["input_ids"])
    return lambda prompt: len(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def _patch_weight_sync() -> None:
    """Let TRL's weight sync work on a CPU, where vLLM packs loaded weights and cannot load over them."""
    from trl.generation.vllm_generation import VLLMGeneration  # noqa: PLC0415

    def sync_weights(self: Any) -> None:
        tensors = [(name, parameter.data) for name, parameter in self._iter_named_params()]
        self.llm.collective_rpc(lambda worker: worker.reload_weights(weights_iterator=iter(tensors)))
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights


if __name__ == "__main__":
    main()
