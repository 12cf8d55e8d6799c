"""The critic's error against Monte-Carlo values, with a frozen policy.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.critic_error train_configs/tiny_grpo.toml \\
        --algorithm.type ppo --critic.warmup_iterations all --critic.optimizer.lr 1e-3 --training.steps 20

``critic.warmup_iterations = "all"`` keeps the policy frozen. Afterwards each held-out prompt is
continued once; at the prompt and after each of the first sampled tokens, 64 further continuations are sampled
and scored, and their mean reward is compared with the critic's value there. The same is done on as many
prompts that the critic has trained on: where only those are right, more steps help less than more prompts.

Held out from the critic is not held out from the policy: a policy that knows most prompts by heart has other
values on those that it has never seen. The two sets have the same standing towards the policy when they are
split with another ``data.source.split_seed`` than the policy's own, or when the policy has seen all or none.

The mean of 64 rewards is itself off by ``p (1 - p) / 64`` in the square, which no critic can predict; it is
printed beside the error and not subtracted from it. The standard error of the ratio of error to variance is
a jackknife over prompts.
"""

from __future__ import annotations

import sys

import torch

from titan_rl.batching.pack import pack
from titan_rl.config.entry import read_checked
from titan_rl.generation.protocol import generate
from titan_rl.resilience.seeds import derive_seed
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.rl import RLTrainer
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Reward,
    Rollout,
    Sample,
    SamplingParams,
    Turn,
)

NUM_PROMPTS, NUM_CONTINUATIONS, MAX_PREFIX = 100, 64, 2


def main() -> None:
    """Train the critic, measure, print."""
    document, trainer_name = read_checked(sys.argv[1], sys.argv[2:])
    trainer: RLTrainer = configure(document, trainer_name).build()
    trainer.train()
    if trainer.critic is None or trainer.state.policy_version:
        raise SystemExit('The policy must stay frozen: set critic.warmup_iterations = "all".')
    seen = trainer.data.train.take(0, min(NUM_PROMPTS, trainer.state.cursor))
    for name, prompts in (("held out", trainer.data.held_out_prompts()[:NUM_PROMPTS]), ("trained on", seen)):
        states = _states(trainer, prompts, name)
        measured = torch.tensor(_monte_carlo(trainer, states, name))
        predicted = torch.tensor([_value(trainer, tokens) for _, tokens, _ in states])
        print(f"{name}, {len(prompts)} prompts, {NUM_CONTINUATIONS} continuations each:")
        lengths = torch.tensor([length for _, _, length in states])
        owners = [prompt.id for prompt, _, _ in states]
        for length in range(MAX_PREFIX + 1):
            chosen = lengths == length
            of_length = [owner for owner, (_, _, n) in zip(owners, states, strict=True) if n == length]
            print(f"  after {length} tokens: {_comparison(measured[chosen], predicted[chosen], of_length)}")
        print(f"  all: {_comparison(measured, predicted, owners)}", flush=True)
    trainer.close()


def _comparison(measured: torch.Tensor, predicted: torch.Tensor, owners: list[str]) -> str:
    """Describe the error of values ``[N]`` against measured ones ``[N]``, and what it is held against."""
    error, variance = (predicted - measured).square().mean(), measured.var(correction=0)
    noise = (measured * (1 - measured)).mean() / (NUM_CONTINUATIONS - 1)  # unbiased for rewards of 0 and 1
    spread = standard_error(measured, predicted, owners)
    return (
        f"{len(measured)} states, mean value {measured.mean():.3f}, variance {variance:.4f}, "
        f"mean squared error {error:.4f} (noise of the measurement {noise:.4f}), "
        f"ratio {error / variance:.3f} +- {spread:.3f}"
    )


def standard_error(measured: torch.Tensor, predicted: torch.Tensor, owners: list[str]) -> float:
    """Jackknife over prompts of mean squared error / variance, whose states are not independent.

    Args:
        measured: ``[N]`` mean rewards.
        predicted: ``[N]`` values.
        owners: The prompt of each state.
    """
    ratios = []
    for left_out in dict.fromkeys(owners):
        kept = torch.tensor([owner != left_out for owner in owners])
        error = (predicted[kept] - measured[kept]).square().mean()
        ratios.append(error / measured[kept].var(correction=0))
    return float((torch.stack(ratios).var(correction=0) * (len(ratios) - 1)).sqrt())


def _states(
    trainer: RLTrainer, prompts: list[Prompt], purpose: str
) -> list[tuple[Prompt, tuple[int, ...], int]]:
    """Prompt, tokens so far and how many of them were sampled."""
    encoded = [tuple(trainer.data.encoder.encode(prompt.messages)) for prompt in prompts]
    longest = trainer.data.sampling.max_tokens
    completions = _sample(trainer, list(enumerate(encoded)), longest, f"{purpose}/prefix")
    states = []
    for prompt, tokens, sampled in zip(prompts, encoded, completions, strict=True):
        for length in range(min(MAX_PREFIX, len(sampled) - 1) + 1):
            states.append((prompt, tokens + sampled[:length], length))
    return states


def _sample(
    trainer: RLTrainer, starts: list[tuple[int, tuple[int, ...]]], max_tokens: int, purpose: str
) -> list[tuple[int, ...]]:
    sampling = trainer.data.sampling
    requests = [
        GenerationRequest(
            id=f"{purpose}/{number}/{index}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                stop_token_ids=sampling.stop_token_ids,
            ),
            seed=derive_seed(trainer.run_seed, purpose, number, index),
        )
        for number, (index, tokens) in enumerate(starts)
    ]
    return [c.token_ids for c in generate(trainer.generator, requests, timeout_seconds=600)]


def _monte_carlo(
    trainer: RLTrainer, states: list[tuple[Prompt, tuple[int, ...], int]], purpose: str
) -> list[float]:
    values = []
    for index, (prompt, tokens, length) in enumerate(states):
        room = trainer.data.sampling.max_tokens - length
        starts = [(i, tokens) for i in range(NUM_CONTINUATIONS)]
        for key, rest in enumerate(_sample(trainer, starts, room, f"{purpose}/state{index}")):
            text = trainer.data.encoder.decode([*tokens[len(tokens) - length :], *rest])
            completion = Completion("", rest, (0.0,) * len(rest), FinishReason.STOP, ((0, 0),))
            turn = Turn(prompt_token_ids=tokens, completion=completion, text=text)
            trainer.rewards.submit(key, Rollout(prompt=prompt, sample_index=key, seed=0, turns=[turn]))
        rewards = [result for _, result in trainer.rewards.results(60.0)]
        scored = [reward.total for reward in rewards if isinstance(reward, Reward)]
        values.append(sum(scored) / len(scored))
    return values


def _value(trainer: RLTrainer, tokens: tuple[int, ...]) -> float:
    """The critic's value of the state in which the token after ``tokens`` is sampled."""
    sample = Sample(
        token_ids=[*tokens, 0],
        loss_mask=[False] * len(tokens) + [True],
        generator_logprobs=[0.0] * (len(tokens) + 1),
        reward=0.0,
        group_index=0,
        sample_index=0,
        is_truncated=False,
    )
    batch = pack([sample], [0.0], token_budget=trainer.config.training.seq_len, rows_per_micro_batch=1)[0]
    (values,) = trainer.critic([batch.to(trainer.device)])
    return float(values[0, len(tokens) - 1])


if __name__ == "__main__":
    main()
