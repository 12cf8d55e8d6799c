"""The critic's error against Monte-Carlo values, with a frozen policy.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.critic_error train_configs/tiny_grpo.toml \\
        --algorithm.type ppo --critic.warmup_iterations all --critic.optimizer.lr 1e-3 --training.steps 20

``critic.warmup_iterations = "all"`` keeps the policy frozen. Afterwards held-out prompts, drawn at random,
are continued once each; at the prompt and after each of the first sampled tokens, 64 further continuations
are sampled and scored, and their mean reward is compared with the critic's value there. The same is done on
prompts that the critic has trained on: where only those are right, more steps help less than more prompts.

Held out from the critic is not held out from the policy: a policy that knows most prompts by heart has other
values on those that it has never seen. With another ``data.source.split_seed`` than that of the policy's own
training (0 in the recipes) both kinds are among the held-out prompts and among the critic's, in the same
proportion, and are also shown apart.

The mean of 64 rewards is itself off by ``p (1 - p) / 64`` in the square, which no critic can predict; it is
printed beside the error and not subtracted from it. The standard error of the ratio of error to variance is
a jackknife over prompts.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any, NamedTuple

import torch

from titan_rl.batching.pack import pack
from titan_rl.config.choice import build
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
STATES_AT_ONCE = 8
POLICY_SPLIT_SEED = 0
"""``data.source.split_seed`` of what the policy was trained on."""


class State(NamedTuple):
    """A prompt and the first tokens of a completion."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    """Of the prompt and of the completion so far."""
    num_sampled: int


def main() -> None:
    """Train the critic, measure, print."""
    document, trainer_name = read_checked(sys.argv[1], sys.argv[2:])
    trainer: RLTrainer = configure(document, trainer_name).build()
    trainer.train()
    if trainer.critic is None or trainer.state.policy_version:
        raise SystemExit('The policy must stay frozen: set critic.warmup_iterations = "all".')
    held_out = trainer.data.held_out_prompts()
    random.Random(trainer.run_seed).shuffle(held_out)  # they are listed by their operands
    seen = trainer.data.train.take(0, min(NUM_PROMPTS, trainer.state.cursor))
    unknown = _unknown_to_the_policy(trainer)
    for name, prompts in (("held out", held_out[:NUM_PROMPTS]), ("trained on", seen)):
        states = _states(trainer, prompts, name)
        measured = torch.tensor(_monte_carlo(trainer, states, name))
        predicted = torch.tensor([_value(trainer, state.token_ids) for state in states])
        print(f"{name}, {len(prompts)} prompts, {NUM_CONTINUATIONS} continuations each:")
        is_unknown = [state.prompt.id in unknown for state in states]
        parts = {f"after {n} tokens": [s.num_sampled == n for s in states] for n in range(MAX_PREFIX + 1)}
        if any(is_unknown):
            parts |= {"known to the policy": [not flag for flag in is_unknown], "unknown to it": is_unknown}
        for part, flags in {**parts, "all": [True] * len(states)}.items():
            owners = [state.prompt.id for state, flag in zip(states, flags, strict=True) if flag]
            chosen = torch.tensor(flags)
            print(f"  {part}: {_comparison(measured[chosen], predicted[chosen], owners)}", flush=True)
    trainer.close()


def _unknown_to_the_policy(trainer: RLTrainer) -> set[str]:
    """Prompts that the policy's own training held out, where the run splits them another way."""
    source: Any = trainer.config.data.source
    if getattr(source, "split_seed", POLICY_SPLIT_SEED) == POLICY_SPLIT_SEED:
        return set()
    dataset = build(dataclasses.replace(source, split_seed=POLICY_SPLIT_SEED), split="held_out")
    return {dataset[i].id for i in range(len(dataset))}


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


def _states(trainer: RLTrainer, prompts: list[Prompt], purpose: str) -> list[State]:
    encoded = [tuple(trainer.data.encoder.encode(prompt.messages)) for prompt in prompts]
    empty = [State(prompt, tokens, 0) for prompt, tokens in zip(prompts, encoded, strict=True)]
    states = []
    for start, (sampled,) in zip(empty, _continuations(trainer, empty, 1, f"{purpose}/prefix"), strict=True):
        for length in range(min(MAX_PREFIX, len(sampled) - 1) + 1):
            states.append(State(start.prompt, start.token_ids + sampled[:length], length))
    return states


def _continuations(
    trainer: RLTrainer, states: list[State], number: int, purpose: str
) -> list[list[tuple[int, ...]]]:
    """The tokens of so many continuations of each state, by state."""
    sampling = trainer.data.sampling
    requests = [
        GenerationRequest(
            id=f"{purpose}/{index}/{i}",
            prompt_token_ids=state.token_ids,
            sampling=SamplingParams(
                max_tokens=sampling.max_tokens - state.num_sampled,
                temperature=sampling.temperature,
                stop_token_ids=sampling.stop_token_ids,
            ),
            seed=derive_seed(trainer.run_seed, purpose, index, i),
        )
        for index, state in enumerate(states)
        for i in range(number)
    ]
    tokens = [c.token_ids for c in generate(trainer.generator, requests, timeout_seconds=600)]
    return [tokens[start : start + number] for start in range(0, len(tokens), number)]


def _monte_carlo(trainer: RLTrainer, states: list[State], purpose: str) -> list[float]:
    """Mean reward of the continuations of each state."""
    values: list[float] = []
    for first in range(0, len(states), STATES_AT_ONCE):
        some = states[first : first + STATES_AT_ONCE]
        found = _continuations(trainer, some, NUM_CONTINUATIONS, f"{purpose}/states{first}")
        for index, (state, rests) in enumerate(zip(some, found, strict=True)):
            sampled = state.token_ids[len(state.token_ids) - state.num_sampled :]
            for i, rest in enumerate(rests):
                completion = Completion("", rest, (0.0,) * len(rest), FinishReason.STOP, ((0, 0),))
                text = trainer.data.encoder.decode([*sampled, *rest])
                turn = Turn(prompt_token_ids=state.token_ids, completion=completion, text=text)
                rollout = Rollout(prompt=state.prompt, sample_index=i, seed=0, turns=[turn])
                trainer.rewards.submit(index * NUM_CONTINUATIONS + i, rollout)
        totals: list[list[float]] = [[] for _ in some]
        for key, reward in trainer.rewards.results(60.0):
            if isinstance(reward, Reward):
                totals[key // NUM_CONTINUATIONS].append(reward.total)
        values += [sum(total) / len(total) for total in totals]
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
