"""Every named algorithm: what it is composed of, as its paper states it, and what it asks for."""

import dataclasses

import pytest

from titan_rl.algorithms import registries
from titan_rl.algorithms.advantages import (
    GAE,
    GreedyBaseline,
    GroupNormalized,
    LeaveOneOut,
    NoAdvantage,
    Returns,
)
from titan_rl.algorithms.aggregations import (
    SampleMeanOfTokenMeans,
    SampleMeanOfTokenSums,
    SampleMeanOverConstant,
    TokenMean,
)
from titan_rl.algorithms.corrections import NoCorrection
from titan_rl.algorithms.interfaces import Needs, TokenAdvantage
from titan_rl.algorithms.penalties import Distillation, EntropyBonus, KLPenalty
from titan_rl.algorithms.preset import derive_needs
from titan_rl.algorithms.ratios import SequenceRatio, TokenRatio
from titan_rl.algorithms.refill import RefillSection
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.algorithms.surrogates import Clipped, ClippedWeight, GeometricMean, Reinforce, SoftGated
from titan_rl.config.choice import build
from titan_rl.config.overlay import overlay
from titan_rl.config.registry import resolve

GRPO_KL, PPO_KL = KLPenalty.Config(), KLPenalty.Config(placement="reward", estimator="k1")
CENTRED = GroupNormalized.Config(normalise_std=False)
WHITENED = ShapingSection(whiten=True)
SIBLINGS = Needs(smallest_group=2)

# advantage, surrogate, aggregation, KL, needs; and what else differs from a preset without options.
TABLE = {
    "grpo": (GroupNormalized.Config(), Clipped.Config(), TokenMean, GRPO_KL, SIBLINGS, {}),
    "dr_grpo": (CENTRED, Clipped.Config(), SampleMeanOverConstant, GRPO_KL, SIBLINGS, {}),
    "dapo": (
        GroupNormalized.Config(),
        Clipped.Config(clip_low=0.2, clip_high=0.28),
        TokenMean,
        GRPO_KL,
        SIBLINGS,
        {"refill": RefillSection(max_rounds=30)},
    ),
    "rloo": (LeaveOneOut.Config(), Reinforce.Config(), SampleMeanOfTokenSums, PPO_KL, SIBLINGS, {}),
    "reinforce_pp": (
        Returns.Config(gamma=1.0), Clipped.Config(), TokenMean, PPO_KL, Needs(), {"shaping": WHITENED},
    ),
    "reinforce_pp_baseline": (
        CENTRED,
        Clipped.Config(),
        TokenMean,
        KLPenalty.Config(estimator="k2"),
        SIBLINGS,
        {"shaping": WHITENED},
    ),
    "remax": (
        GreedyBaseline.Config(),
        Reinforce.Config(),
        SampleMeanOfTokenSums,
        PPO_KL,
        Needs(greedy_baseline=True),
        {},
    ),
    "gspo": (
        GroupNormalized.Config(),
        Clipped.Config(clip_low=3e-4, clip_high=4e-4),
        SampleMeanOfTokenMeans,
        GRPO_KL,
        SIBLINGS,
        {"ratio": SequenceRatio.Config(length_normalise=True)},
    ),
    "cispo": (
        GroupNormalized.Config(),
        ClippedWeight.Config(clip_low=1.0, clip_high=0.28),
        TokenMean,
        GRPO_KL,
        SIBLINGS,
        {},
    ),
    "sapo": (
        GroupNormalized.Config(),
        SoftGated.Config(tau_positive=1.0, tau_negative=1.05),
        SampleMeanOfTokenMeans,
        GRPO_KL,
        SIBLINGS,
        {},
    ),
    "gmpo": (
        GroupNormalized.Config(),
        GeometricMean.Config(clip_low=0.4, clip_high=0.4),
        SampleMeanOfTokenMeans,
        GRPO_KL,
        SIBLINGS,
        {},
    ),
    "ppo": (GAE.Config(), Clipped.Config(), TokenMean, PPO_KL, Needs(critic=True), {"shaping": WHITENED}),
    "dual_clip_ppo": (
        GAE.Config(),
        Clipped.Config(clip_low=0.2, clip_high=0.2, clip_dual=3.0),
        TokenMean,
        PPO_KL,
        Needs(critic=True),
        {"shaping": WHITENED},
    ),
    "on_policy_distillation": (
        NoAdvantage.Config(),
        Clipped.Config(),
        TokenMean,
        GRPO_KL,
        Needs(teacher=True),
        {"distillation": Distillation.Config(coefficient=1.0)},
    ),
}  # fmt: skip


def make(name):
    return resolve(name, registries.ALGORITHMS, "algorithm.type")()


def needs_of(preset, steps=1):
    return derive_needs(build(preset.advantage), preset.loss.build(), steps_per_iteration=steps)


def test_the_table_of_this_file_has_every_algorithm():
    assert TABLE.keys() == registries.ALGORITHMS.keys()
    assert registries.DEFAULT_ALGORITHM in TABLE


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_the_composition_that_its_paper_states(name):
    advantage, surrogate, aggregation, kl, _, others = TABLE[name]
    preset = make(name)
    assert preset.advantage == advantage
    assert preset.loss.surrogate == surrogate
    assert preset.loss.aggregation == aggregation.Config()
    assert preset.loss.kl == kl
    assert preset.loss.ratio == others.get("ratio", TokenRatio.Config())
    assert preset.loss.distillation == others.get("distillation", Distillation.Config(coefficient=0.0))
    assert preset.shaping == others.get("shaping", ShapingSection())
    assert preset.refill == others.get("refill", RefillSection(max_rounds=0))
    # Nowhere on by default.
    assert preset.loss.correction == preset.loss.rejection == NoCorrection.Config()
    assert preset.loss.entropy == EntropyBonus.Config(coefficient=0.0)
    assert preset.loss.kl.coefficient == preset.loss.kl.target == 0.0


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_asks_for_what_its_parts_use_and_nothing_else(name):
    expected = TABLE[name][4]
    assert needs_of(make(name)) == expected
    assert needs_of(make(name), steps=4) == dataclasses.replace(expected, old=True)


@pytest.mark.parametrize("name", TABLE)
def test_a_penalty_asks_for_a_reference_and_in_the_reward_also_for_the_old_policy(name):
    preset = make(name)
    preset.loss.kl.coefficient = 0.01
    is_in_reward = TABLE[name][3] is PPO_KL
    expected = dataclasses.replace(TABLE[name][4], reference=True, old=is_in_reward)
    assert needs_of(preset) == expected


@pytest.mark.parametrize("name", TABLE)
def test_only_advantages_with_a_critic_or_returns_differ_from_token_to_token(name):
    is_per_token = isinstance(build(make(name).advantage), TokenAdvantage)
    assert is_per_token == (name in ("ppo", "dual_clip_ppo", "reinforce_pp"))


@pytest.mark.parametrize("name", TABLE)
def test_changing_one_run_s_preset_changes_no_other(name):
    first = make(name)
    first.loss.kl.coefficient = 0.5
    first.shaping.prompt_set_weights["hard"] = 2.0
    first.refill.max_rounds = 99
    second = make(name)
    assert second.loss.kl.coefficient == 0.0
    assert second.shaping.prompt_set_weights == {}
    assert second.refill.max_rounds != 99


@pytest.mark.parametrize("name", TABLE)
def test_a_file_overlays_every_preset(name):
    sections = make(name).sections()
    assert sections.keys() == {"advantage", "loss", "shaping", "refill"}
    table = {"kl": {"coefficient": 0.25}, "rejection": {"type": "reject_tokens", "high": 3.0}}
    loss = overlay(sections["loss"], table, where="loss")
    assert (loss.kl.coefficient, loss.rejection.low, loss.rejection.high) == (0.25, 0.5, 3.0)
    assert loss.surrogate == TABLE[name][1]
