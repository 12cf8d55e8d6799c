"""From ``[[reward]]`` tables to a weighted sum, and across the pipe."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import make_rollout

from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.registry import REWARDS
from titan_rl.rewards.spec import InvalidRewardError, RewardSpec, WeightedSum, build_reward
from titan_rl.rewards.wire import (
    FrameDecoder,
    FrameError,
    FrameTooLargeError,
    encode_frame,
    reward_from_json,
    reward_to_json,
    rollout_from_json,
    rollout_to_json,
)
from titan_rl.types import Reward

REQUIRED = {"format": {"pattern": "a"}, "length": {"max_tokens": 8, "buffer_tokens": 2}}


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_name_builds_from_a_table(name):
    spec = RewardSpec.from_table({"type": name, "weight": 2, **REQUIRED.get(name, {})})
    assert (spec.name, spec.weight) == (name, 2)
    assert callable(build_reward(spec))


def test_a_specification_survives_json():
    spec = RewardSpec.from_table({"type": "format", "weight": -0.5, "name": "tags", "pattern": "a+"})
    assert spec.params == {"pattern": "a+"}
    assert RewardSpec(**json.loads(json.dumps(spec.to_json()))) == spec


def test_the_sum_is_weighted_and_the_parts_are_not():
    specs = [
        RewardSpec(type="exact_match", weight=2.0),
        RewardSpec(type="format", weight=-0.5, name="digit", params={"pattern": r"\d"}),
        RewardSpec(type="misbehaving_rewards:count_characters", weight=0.25, name="characters"),
        RewardSpec(type="length", weight=0.0, params={"max_tokens": 1, "buffer_tokens": 1}),
    ]
    reward = WeightedSum(specs)(make_rollout("4", answer="4", num_tokens=3))
    assert reward.total == pytest.approx(2.0 * 1 - 0.5 * 1 + 0.25 * 1)
    assert reward.parts == {"exact_match": 1.0, "digit": 1.0, "characters": 1.0, "length": -1.0}
    assert reward.per_turn is None


def test_turn_credit_adds_up_and_other_rewards_go_to_the_last_turn():
    specs = [
        RewardSpec(
            type="misbehaving_rewards:PerTurn", name="turns", weight=2.0, params={"values": [1.0, 0.5]}
        ),
        RewardSpec(type="exact_match", weight=10.0),
    ]
    reward = WeightedSum(specs)(make_rollout("4", num_turns=2))
    assert reward.per_turn == pytest.approx((2.0, 1.0 + 10.0))
    assert reward.total == pytest.approx(13.0)
    assert reward.parts == {"turns": 1.5, "turns/first": 1.0, "exact_match": 1.0}
    with pytest.raises(InvalidRewardError, match="each of 3 turns; got 2"):
        WeightedSum(specs)(make_rollout("4", num_turns=3))


@pytest.mark.parametrize(
    ("order", "shown"),
    [("none", "None"), ("str", "'1.0'"), ("nan", "nan"), ("inf", "-inf"), ("true", "True"), ("huge", "1000")],
)
def test_a_value_that_is_no_finite_number_is_an_error_that_names_reward_and_value(order, shown):
    reward = WeightedSum([RewardSpec(type="misbehaving_rewards:Obedient", name="mine")])
    with pytest.raises(RewardError, match=f"reward 'mine' must be a finite number; got {shown}"):
        reward(make_rollout(f"return {order}"))


def test_numpy_scalars_are_numbers_but_numpy_booleans_are_not():
    numpy = pytest.importorskip("numpy")
    import misbehaving_rewards

    reward = WeightedSum([RewardSpec(type="misbehaving_rewards:Obedient", name="mine")])
    misbehaving_rewards.VALUES.update(float32=numpy.float32(0.5), bool=numpy.bool_(True))
    assert reward(make_rollout("return float32")).total == 0.5
    with pytest.raises(RewardError):
        reward(make_rollout("return bool"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "exact_mach"}, "Did you mean 'exact_match'"),
        ({"type": "format", "patern": "a"}, "got 'patern'. Did you mean 'pattern'"),
        ({"type": "format"}, "pattern of .*'format' must be set"),
        ({"type": "format", "pattern": 3}, "must be of type str; got 3"),
        ({"type": "length", "max_tokens": True, "buffer_tokens": 1}, "must be of type int; got True"),
        ({"type": "numeric", "number": "lst"}, "Did you mean 'last'"),
        ({"type": "numeric", "weight": float("nan")}, "weight of .* finite number; got nan"),
        ({"type": "numeric", "weight": "2"}, "weight of .* finite number; got '2'"),
        ({"type": "numeric", "weight": True}, "weight of .* finite number; got True"),
        ({"weight": 2.0}, "reward.type must be a non-empty string"),
        ({"type": "numeric", "name": 3}, "reward.name must be a non-empty string"),
        ({"type": "misbehaving_rewards:RaisesWhenBuilt"}, "KeyError: 'no such model'"),
        ({"type": "misbehaving_rewards:WithoutConfig"}, "nested dataclass Config"),
        ({"type": "misbehaving_rewards:VALUES"}, "nested dataclass Config"),
        ({"type": "misbehaving_rewards:count_characters", "scale": 2}, "scale must not stand"),
        ({"type": "no_such_module:Reward"}, "no_such_module"),
    ],
)
def test_a_wrong_table_is_a_config_error_that_says_what_to_do(table, message):
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardSpec.from_table(table))


def test_names_must_be_unique():
    with pytest.raises(ConfigError, match="name must be unique; got 'numeric'"):
        WeightedSum([RewardSpec(type="numeric"), RewardSpec(type="format", name="numeric")])


def test_without_tables_the_total_is_nought_so_that_a_model_can_be_the_only_reward():
    assert WeightedSum([])(make_rollout("7", answer="7")) == Reward(total=0.0, parts={})


texts = st.text() | st.just("lone surrogate \ud800")


@settings(deadline=None)
@given(
    text=texts, answer=st.none() | texts, metadata=st.dictionaries(texts, st.none() | st.integers() | texts)
)
def test_a_rollout_crosses_unchanged_except_for_log_probabilities(text, answer, metadata):
    rollout = make_rollout(text, answer=answer, num_turns=2, metadata=metadata)
    (message,) = FrameDecoder(1 << 20).feed(encode_frame({"rollout": rollout_to_json(rollout)}))
    for turn in rollout.turns:
        turn_index = rollout.turns.index(turn)
        stripped = dataclasses.replace(turn.completion, logprobs=())
        rollout.turns[turn_index] = dataclasses.replace(turn, completion=stripped)
    assert rollout_from_json(message["rollout"]) == rollout


def test_a_reward_crosses_unchanged():
    reward = Reward(total=0.1, parts={"a": -1e-300}, per_turn=(0.1, 2.0))
    assert reward_from_json(json.loads(json.dumps(reward_to_json(reward)))) == reward


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), max_size=5), st.integers(1, 7)
)
def test_frames_are_recovered_from_any_cut_of_the_stream(messages, size):
    stream = b"".join(map(encode_frame, messages))
    decoder = FrameDecoder(1 << 20)
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [message for chunk in chunks for message in decoder.feed(chunk)] == messages


def test_an_oversized_or_garbled_frame_is_an_error():
    with pytest.raises(FrameTooLargeError):
        list(FrameDecoder(10).feed(b"\x00\x00\x00\x0b"))
    with pytest.raises(FrameError):
        list(FrameDecoder(10).feed(b"\x00\x00\x00\x02{]"))
    with pytest.raises(FrameError):
        list(FrameDecoder(10).feed(b"\x00\x00\x00\x01" + b"3"))
