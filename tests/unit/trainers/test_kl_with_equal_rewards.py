"""With equal rewards the KL penalty alone trains: the exact KL to the reference falls, for every algorithm.

The policy is a table of logits, one row per position, so that the KL over whole completions is a sum over
positions and the vocabulary and nothing is estimated in measuring it. Everything else is the real thing:
packing, credit, the composed loss, fresh samples at every step.
"""

from dataclasses import replace

import pytest
import torch

from tests.unit.rollout.rollout_fakes import make_prompts, make_rollout
from tests.unit.trainers.credit_fakes import Alone
from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.registries import ALGORITHMS
from titan_rl.batching.pack import pack
from titan_rl.config.choice import build
from titan_rl.config.registry import resolve
from titan_rl.functional.kl import k1
from titan_rl.rollout.samples import to_samples
from titan_rl.trainers.credit import Credit
from titan_rl.trainers.optimization import StepBatch
from titan_rl.types import Group

PROMPT, POSITIONS, VOCAB = 2, 3, 5
GROUPS, SIBLINGS, STEPS = 16, 4, 30
TOKENS = GROUPS * SIBLINGS * POSITIONS
OWN = {name: {} for name in ALGORITHMS} | {
    "grpo, k2": {"estimator": "k2"},
    "grpo, k1 in the reward": {"estimator": "k1", "placement": "reward"},
}


class Tables:
    """The policy's and the reference's log-probabilities ``[positions, vocabulary]``."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.logits = torch.randn(POSITIONS, VOCAB, generator=draw).requires_grad_()
        self.reference = torch.randn(POSITIONS, VOCAB, generator=draw).log_softmax(-1)

    @property
    def policy(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def exact_kl(self) -> float:
        """KL(policy || reference) of a whole completion, nats."""
        with torch.no_grad():
            return float((self.policy.exp() * (self.policy - self.reference)).sum())


def roll_out(tables: Tables, seed: int) -> list[Group]:
    """Completions of the policy as it is, all with the same reward, the greedy ones too."""
    draw = torch.Generator().manual_seed(seed)
    sampled = torch.multinomial(
        tables.policy.detach().exp(), GROUPS * SIBLINGS, replacement=True, generator=draw
    ).T.tolist()
    groups, before = [], {"prompt_tokens": (0,) * PROMPT, "reward": 1.0}
    for index, prompt in make_prompts(GROUPS):
        of_group = sampled[index * SIBLINGS : (index + 1) * SIBLINGS]
        rollouts = [
            make_rollout(
                prompt=prompt, sample_index=i, prompt_tokens=(0,) * PROMPT, tokens=tokens, reward=1.0
            )
            for i, tokens in enumerate(of_group)
        ]
        baseline = make_rollout(prompt=prompt, tokens=(0,) * POSITIONS, **before)
        groups.append(Group(prompt=prompt, index=index, rollouts=rollouts, baseline=baseline))
    return groups


def scored(tables: Tables, groups: list[Group]) -> StepBatch:
    samples = to_samples(groups)
    micro_batches = pack(samples, [0.0] * len(samples), token_budget=64, rows_per_micro_batch=64)
    batch = StepBatch(micro_batches, TOKENS, len(samples), TOKENS, samples=samples)
    with torch.no_grad():
        batch.old_logprobs = [at_tokens(tables.policy, m) for m in micro_batches]
        batch.ref_logprobs = [at_tokens(tables.reference, m) for m in micro_batches]
    batch.values = [torch.zeros_like(m.advantages) for m in micro_batches]
    return batch


def at_tokens(table, micro_batch):
    """``[B, T]`` log-probability of each trained token; 0 elsewhere."""
    position = (micro_batch.positions - PROMPT + 1).clamp(0, POSITIONS - 1)
    return torch.where(micro_batch.loss_mask, table[position, micro_batch.targets.clamp(max=VOCAB - 1)], 0.0)


def train(tables: Tables, preset, loss_fn) -> None:
    advantage, kl = build(preset.advantage), loss_fn.kl
    credit = Credit(
        advantage,
        preset.shaping,
        kl_in_reward=kl if kl.is_in_reward else None,
        max_tokens=POSITIONS,
        collectives=Alone(),
    )
    optimizer = torch.optim.Adam([tables.logits], lr=0.05)
    for step in range(STEPS):
        groups = roll_out(tables, seed=step)
        batch = scored(tables, groups)
        credit.assign(groups, [batch])
        optimizer.zero_grad()
        for micro_batch, old, ref in zip(
            batch.micro_batches, batch.old_logprobs, batch.ref_logprobs, strict=True
        ):
            inputs = LossInputs(
                policy_logprobs=at_tokens(tables.policy, micro_batch),
                advantages=micro_batch.advantages,
                loss_mask=micro_batch.loss_mask,
                sample_index=micro_batch.sample_index,
                generator_logprobs=old,
                num_loss_tokens=TOKENS,
                num_samples=GROUPS * SIBLINGS,
                max_tokens=POSITIONS,
                old_logprobs=old,
                ref_logprobs=ref,
            )
            loss_fn(inputs).loss.backward()
        optimizer.step()


def composition(name: str, **kl):
    """A named algorithm with its own estimator and place of the penalty, unless ``kl`` says otherwise."""
    preset = resolve(name, ALGORITHMS, "algorithm.type")()
    return preset, replace(preset.loss, kl=replace(preset.loss.kl, **({"coefficient": 0.5} | kl))).build()


@pytest.mark.parametrize("name", [name for name in OWN if name != "on_policy_distillation"])
def test_the_exact_kl_to_the_reference_falls(name):
    tables = Tables()
    before = tables.exact_kl()
    train(tables, *composition(name.partition(",")[0], **OWN[name]))
    assert before > 1.0
    assert tables.exact_kl() < 0.4 * before


def test_without_a_penalty_equal_rewards_leave_the_policy_where_it_is():
    tables = Tables()
    before = tables.exact_kl()
    train(tables, *composition("grpo", coefficient=0.0))
    assert tables.exact_kl() == before


class K1InTheLoss(KLPenalty):
    """The estimator that is refused there, because its gradient has expectation 0."""

    def __call__(self, policy_logprobs, ref_logprobs):
        return k1(policy_logprobs, ref_logprobs)


def test_planted_fault_k1_in_the_loss_is_noticed():
    tables = Tables()
    before = tables.exact_kl()
    preset, loss_fn = composition("grpo")
    loss_fn.kl = K1InTheLoss(loss_fn.kl.config)
    train(tables, preset, loss_fn)
    assert tables.exact_kl() > 0.75 * before


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_planted_fault_an_estimator_in_the_reward_that_belongs_in_the_loss_is_noticed(estimator):
    tables = Tables()
    before = tables.exact_kl()
    train(tables, *composition("reinforce_pp", estimator=estimator, placement="reward"))
    assert tables.exact_kl() > before
