"""The GRPO preset, its advantage and the settings that contradict it."""

import ast
import inspect

import pytest

from titan_rl.algorithms import (
    advantages,
    aggregations,
    corrections,
    penalties,
    ratios,
    registries,
    surrogates,
)
from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import TokenMean
from titan_rl.algorithms.grpo import preset
from titan_rl.algorithms.interfaces import GroupRewards, Needs
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.preset import check_composition, derive_needs
from titan_rl.algorithms.ratios import TokenRatio
from titan_rl.algorithms.surrogates import Clipped
from titan_rl.config.choice import build
from titan_rl.config.overlay import overlay
from titan_rl.config.registry import resolve
from titan_rl.errors import ConfigError

REGISTRIES = ("ADVANTAGES", "RATIOS", "SURROGATES", "CORRECTIONS", "AGGREGATIONS", "KLS")


def test_the_registered_preset_is_the_composition_that_the_page_states():
    grpo = resolve("grpo", registries.ALGORITHMS, "algorithm.type")()
    assert grpo.advantage == GroupNormalized.Config(normalise_std=True, eps=1e-6)
    assert grpo.loss.ratio == TokenRatio.Config()
    assert grpo.loss.surrogate == Clipped.Config(clip_low=0.2, clip_high=0.2)
    assert grpo.loss.aggregation == TokenMean.Config()
    assert grpo.loss.kl == KLPenalty.Config(estimator="k3", coefficient=0.0)


def test_changing_one_run_s_preset_changes_no_other():
    preset().loss.surrogate.clip_low = 0.9
    assert preset().loss.surrogate.clip_low == 0.2


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_registered_part_builds_from_its_default_config(name):
    for key, target in getattr(registries, name).items():
        part = resolve(key, getattr(registries, name), "type")
        assert isinstance(build(part.Config()), part), target


def test_every_part_is_registered():
    targets = {target for name in REGISTRIES for target in getattr(registries, name).values()}
    parts = {
        f"{module.__name__}:{node.name}"
        for module in (advantages, aggregations, corrections, penalties, ratios, surrogates)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    # These two are terms of every loss and not alternatives of each other.
    assert parts - {f"{penalties.__name__}:{n}" for n in ("EntropyBonus", "Distillation")} == targets


@pytest.mark.parametrize(
    ("coefficient", "steps", "expected"),
    [
        (0.0, 1, Needs(smallest_group=2)),
        (0.04, 1, Needs(reference=True, smallest_group=2)),
        (0.0, 4, Needs(old=True, smallest_group=2)),
    ],
)
def test_grpo_needs_siblings_and_a_reference_only_with_a_penalty(coefficient, steps, expected):
    grpo = preset()
    grpo.loss.kl.coefficient = coefficient
    needs = derive_needs(build(grpo.advantage), grpo.loss.build(), steps_per_iteration=steps)
    assert needs == expected


def test_a_group_of_one_contradicts_the_advantage_and_both_keys_are_named():
    needs = derive_needs(build(preset().advantage), preset().loss.build(), steps_per_iteration=1)
    check_composition(needs, group_size=2, advantage_type="group_normalized")
    with pytest.raises(ConfigError, match=r"sampling\.group_size must be at least 2 with advantage\.type"):
        check_composition(needs, group_size=1, advantage_type="group_normalized")


def test_uneven_groups_are_normalised_one_by_one():
    advantage = GroupNormalized(GroupNormalized.Config())
    groups = [[1.0, 0.0], [7.0], [0.5, 0.5, 0.5], [], [1.0, 0.0, 0.0, 0.0]]
    values = advantage([GroupRewards(rewards) for rewards in groups])
    root = 0.5**0.5
    assert values == pytest.approx([root, -root, 0, 0, 0, 0, 1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert values[2:6] == [0.0] * 4


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_an_eps_that_divides_by_zero_is_refused(eps):
    with pytest.raises(ConfigError, match=r"advantage\.eps must be above 0"):
        GroupNormalized(GroupNormalized.Config(eps=eps))


def test_a_file_changes_one_value_of_the_preset_and_keeps_the_rest():
    loss = overlay(
        preset().loss, {"kl": {"coefficient": 0.04}, "surrogate": {"clip_high": 0.28}}, where="loss"
    )
    assert loss.kl == KLPenalty.Config(coefficient=0.04)
    assert loss.surrogate == Clipped.Config(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"surrogate": {"clip_low": -0.1}}, r"loss\.surrogate\.clip_low"),
        ({"kl": {"estimator": "k4"}}, r"loss\.kl\.estimator"),
        ({"aggregation": {"type": "token_meen"}}, r"loss\.aggregation\.type"),
    ],
)
def test_an_impossible_value_in_a_file_is_refused_by_its_key(table, key):
    with pytest.raises(ConfigError, match=key):
        overlay(preset().loss, table, where="loss")
