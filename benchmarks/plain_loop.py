"""GRPO in one file and without a framework: transformers trains, vLLM generates in the same process.

    python -m benchmarks.plain_loop WORKLOAD.json STEPS.jsonl

What a careful person writes first: groups from vLLM with its log-probabilities, rewards inline, completions
sorted by length into padded micro-batches, logits of completion tokens only, one optimiser step, weights
copied back. No seeds per completion, no check of what the generator serves, no files. Against it the cost of
titan_rl is measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams  # noqa: TID251
from vllm.platforms import current_platform  # noqa: TID251

from benchmarks.trl.clock import StepClock
from benchmarks.trl.rewards import REWARDS
from benchmarks.trl.workloads import of_step, read


def main() -> None:
    """Train."""
    spec, rows = read(Path(sys.argv[1]))
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    engine = build_engine(spec)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=spec["lr"], betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    sampling = SamplingParams(
        n=spec["group_size"], temperature=spec["temperature"], max_tokens=spec["max_tokens"], logprobs=0
    )
    clock = StepClock(Path(sys.argv[2]))
    for step in range(spec["steps"]):
        prompts = of_step(rows, step, spec["prompts"])
        samples = roll_out(engine, sampling, tokenizer, spec, prompts)
        mismatch = backward(policy, samples, spec)
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        push(engine, policy)
        clock.tick(
            samples=len(samples),
            prompt_tokens=sum(len(sample["prompt"]) for sample in samples),
            completion_tokens=sum(len(sample["completion"]) for sample in samples),
            reward=sum(sample["reward"] for sample in samples) / len(samples),
            mismatch=mismatch,
        )


def build_engine(spec: dict[str, Any]) -> LLM:
    """vLLM in this process, with the weights of the model's directory."""
    current_platform.simple_compile_backend = "eager"  # else the sampler waits for a C++ compiler
    return LLM(
        spec["model"],
        dtype="float32",
        max_model_len=(64 if spec["system_prompt"] else spec["prompt_tokens"][1]) + spec["max_tokens"],
        max_num_seqs=256,
        block_size=32,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )


def roll_out(
    engine: LLM, sampling: SamplingParams, tokenizer: Any, spec: dict[str, Any], prompts: list[dict[str, str]]
) -> list[dict[str, Any]]:
    """Completions with rewards and advantages."""
    asked = [{"prompt_token_ids": encode(tokenizer, spec, row["prompt"])} for row in prompts]
    samples = []
    for row, output in zip(prompts, engine.generate(asked, sampling, use_tqdm=False), strict=True):
        texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in output.outputs]
        rewards = torch.tensor([REWARDS[spec["reward"]](text, row["answer"]) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for one, reward, advantage in zip(output.outputs, rewards, advantages, strict=True):
            logprobs = [
                entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)
            ]
            samples.append(
                {
                    "prompt": output.prompt_token_ids,
                    "completion": list(one.token_ids),
                    "logprobs": torch.tensor(logprobs),
                    "reward": float(reward),
                    "advantage": float(advantage),
                }
            )
    return samples


def encode(tokenizer: Any, spec: dict[str, Any], prompt: str) -> list[int]:
    """Tokens of a prompt, through the chat template where there is a system prompt."""
    if not spec["system_prompt"]:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "system", "content": spec["system_prompt"]}, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def backward(policy: Any, samples: list[dict[str, Any]], spec: dict[str, Any]) -> float:
    """Accumulate the gradient of the mean loss per token; returns the mean mismatch with the generator."""
    num_tokens = sum(len(sample["completion"]) for sample in samples)
    total = 0.0
    trained = [sample for sample in samples if sample["advantage"]]
    trained.sort(key=lambda sample: len(sample["prompt"]) + len(sample["completion"]))
    for start in range(0, len(trained), spec["micro_rows"]):
        rows = trained[start : start + spec["micro_rows"]]
        ids = pad_sequence([torch.tensor([*r["prompt"], *r["completion"]]) for r in rows], batch_first=True)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        theirs = torch.zeros(ids.shape)
        advantages = torch.tensor([row["advantage"] for row in rows])[:, None].expand(ids.shape)
        for number, row in enumerate(rows):  # predictions: the token before each completion token
            spot = slice(len(row["prompt"]) - 1, len(row["prompt"]) + len(row["completion"]) - 1)
            mask[number, spot], theirs[number, spot] = True, row["logprobs"]
        hidden = policy.model(ids).last_hidden_state  # causal, and padded on the right: no mask needed
        logits = policy.lm_head(hidden[mask]) / spec["temperature"]
        targets = ids.roll(-1, dims=1)[mask]
        logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        ratio = (logprobs - logprobs.detach()).exp()  # one step per batch: the old policy is this one
        clipped = ratio.clamp(0.8, 1.2)
        (-torch.minimum(ratio * advantages[mask], clipped * advantages[mask]).sum() / num_tokens).backward()
        total += float((logprobs.detach() - theirs[mask]).abs().sum())
    return total / max(num_tokens, 1)


def push(engine: LLM, policy: Any) -> None:
    """Give the weights to vLLM, whose cached prompts are then stale."""
    tensors = dict(policy.state_dict())
    engine.collective_rpc(lambda worker: worker.reload_weights(weights_iterator=iter(tensors.items())))
    engine.reset_prefix_cache()


if __name__ == "__main__":
    main()
