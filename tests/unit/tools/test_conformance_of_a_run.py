"""``titan-rl conformance`` computes of an algorithm what a run does: the trainer's credit, the same loss."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.numerics.composition import Batch, Loss, evaluate, part
from tests.unit.rollout.rollout_fakes import make_prompts, make_rollout
from tests.unit.trainers.credit_fakes import Alone
from titan_rl.algorithms.registries import ALGORITHMS
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.config.choice import build
from titan_rl.config.overlay import overlay
from titan_rl.config.registry import resolve
from titan_rl.policy.critic import Critic
from titan_rl.tools.conformance import command, losses
from titan_rl.tools.conformance.fixture import read_fixture
from titan_rl.tools.conformance.parts import ValueClip
from titan_rl.trainers.credit import Credit
from titan_rl.trainers.optimization import StepBatch
from titan_rl.types import Group, Sample

FILE = Path(__file__).parents[2] / "numerics" / "data" / "fixture_b.json"
BETA, MAX_TOKENS = 0.05, 8
KL = {"loss": {"kl": {"coefficient": BETA}}}
"""Every algorithm with its penalty on, wherever it puts it, and its rewards shaped."""
SHAPING = {
    "shaping": {
        "reward_scale": 2.0,
        "reward_clip": 1.1,
        "overlong_buffer_tokens": 4,
        "overlong_penalty": 0.5,
    }
}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIPPED, TOKEN_MEAN = part("clipped_surrogate", **CLIP), part("token_mean")
SAMPLE_MEAN, SAMPLE_SUM = part("sample_mean_of_token_means"), part("sample_mean_of_token_sums")
IN_LOSS = {"kl": part("k3"), "coefficient": BETA}
LOSSES = {
    "grpo": Loss(surrogate=CLIPPED, aggregation=TOKEN_MEAN, **IN_LOSS),
    "dr_grpo": Loss(
        surrogate=CLIPPED, aggregation=part("sample_mean_over_constant", max_tokens=MAX_TOKENS), **IN_LOSS
    ),
    "dapo": Loss(
        surrogate=part("clipped_surrogate", clip_low=0.2, clip_high=0.28), aggregation=TOKEN_MEAN, **IN_LOSS
    ),
    "rloo": Loss(surrogate=part("reinforce_surrogate"), aggregation=SAMPLE_SUM),
    "reinforce_pp": Loss(surrogate=CLIPPED, aggregation=TOKEN_MEAN),
    "reinforce_pp_baseline": Loss(surrogate=CLIPPED, aggregation=TOKEN_MEAN, kl=part("k2"), coefficient=BETA),
    "remax": Loss(surrogate=part("reinforce_surrogate"), aggregation=SAMPLE_SUM),
    "gspo": Loss(
        ratio=part("sequence_token_ratio"),
        surrogate=part("clipped_surrogate", clip_low=3e-4, clip_high=4e-4),
        aggregation=SAMPLE_MEAN,
        **IN_LOSS,
    ),
    "cispo": Loss(
        surrogate=part("clipped_weight_surrogate", clip_low=1.0, clip_high=0.28),
        aggregation=TOKEN_MEAN,
        **IN_LOSS,
    ),
    "sapo": Loss(
        surrogate=part("soft_gated_surrogate", tau_positive=1.0, tau_negative=1.05),
        aggregation=SAMPLE_MEAN,
        **IN_LOSS,
    ),
    "gmpo": Loss(
        surrogate=part("geometric_mean_surrogate", clip_low=0.4, clip_high=0.4),
        aggregation=SAMPLE_MEAN,
        **IN_LOSS,
    ),
    "ppo": Loss(surrogate=CLIPPED, aggregation=TOKEN_MEAN),
    "dual_clip_ppo": Loss(
        surrogate=part("dual_clipped_surrogate", **CLIP, clip_dual=3.0), aggregation=TOKEN_MEAN
    ),
}


@pytest.fixture(scope="module")
def fixture():
    return dataclasses.replace(
        read_fixture(FILE),
        hyperparameters={
            "sample_mean_over_constant": {"max_tokens": MAX_TOKENS},
            **{f"algorithm/{name}": KL | SHAPING for name in LOSSES},
        },
    )


@pytest.fixture(scope="module")
def rows(fixture):
    return command.compute(fixture)


def test_every_algorithm_of_rewards_is_compared():
    assert ALGORITHMS.keys() - LOSSES.keys() == {"on_policy_distillation"}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_pure_functions(fixture, rows, name):
    row, tensors = rows[f"algorithm/{name}"], fixture.tensors
    batch = Batch(
        *(tensors[key] for key in ("logp", "old", "roll", "ref")),
        torch.tensor(row["advantages"]),
        fixture.mask,
        fixture.sample_index,
        num_samples=fixture.mask.shape[0],
    )
    expected = evaluate(LOSSES[name], batch)
    assert row["loss"] == pytest.approx(expected.loss.item(), rel=1e-6, abs=1e-6)
    assert row["grad_l2"] == pytest.approx(expected.gradient.norm().item(), rel=1e-6)
    assert any(map(any, row["advantages"]))


def groups_of(fixture):
    """The fixture's rollouts as a run has them; the greedy one has one token, its length being unknown."""
    groups, samples = [], {}
    scores, greedy = fixture.tensors["scores"].tolist(), fixture.tensors["greedy"].tolist()
    for index, rows in enumerate(fixture.groups):
        prompt = make_prompts(1, start=index)[0][1]
        rollouts = [
            make_rollout(
                prompt=prompt,
                sample_index=k,
                tokens=tuple(range(1, 1 + fixture.lengths[i])),
                reward=scores[i],
            )
            for k, i in enumerate(rows)
        ]
        baseline = make_rollout(prompt=prompt, sample_index=0, tokens=(1,), reward=greedy[rows[0]])
        groups.append(Group(prompt=prompt, index=index, rollouts=rollouts, baseline=baseline))
        for k, i in enumerate(rows):
            samples[i] = Sample([1, 2], [False, True], [0.0, 0.0], scores[i], index, k, False)
    return groups, [samples[i] for i in range(len(scores))]


def batch_of(fixture, samples):
    mask, tensors = fixture.mask, fixture.tensors
    empty = MicroBatch.empty(*mask.shape)
    micro_batch = dataclasses.replace(
        empty,
        loss_mask=mask,
        sample_index=fixture.sample_index.contiguous(),
        generator_logprobs=tensors["roll"],
        document_lengths=[[mask.shape[1]] for _ in samples],
    )
    count = int(mask.sum())
    return StepBatch(
        [micro_batch],
        num_loss_tokens=count,
        num_samples=len(samples),
        num_computed_tokens=count,
        samples=samples,
        old_logprobs=[tensors["old"]],
        ref_logprobs=[tensors["ref"]],
        values=[tensors["values"]],
    )


@pytest.mark.parametrize("name", LOSSES)
def test_advantages_and_returns_are_those_that_the_trainer_assigns(fixture, rows, name):
    preset = resolve(name, ALGORITHMS, "algorithm.type")()
    sections = losses.Sections(advantage=preset.advantage, loss=preset.loss, shaping=preset.shaping)
    sections = overlay(sections, KL | SHAPING)
    loss_fn = sections.loss.build()
    groups, samples = groups_of(fixture)
    batch = batch_of(fixture, samples)
    credit = Credit(
        build(sections.advantage),
        sections.shaping,
        kl_in_reward=loss_fn.kl if loss_fn.kl.is_in_reward else None,
        max_tokens=MAX_TOKENS,
        collectives=Alone(),
    )
    credit.assign(groups, [batch])
    found = torch.tensor(rows[f"algorithm/{name}"]["advantages"])
    assert torch.allclose(found, batch.micro_batches[0].advantages, rtol=1e-6, atol=1e-6)
    assert found.abs().max() > 0.1


def test_the_default_bound_of_the_critic_s_loss_is_the_critic_s():
    assert ValueClip().clip == Critic.Config().clip_range
