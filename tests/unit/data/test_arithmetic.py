"""The built-in arithmetic task: the answers, and a split that leaks nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.data.arithmetic import Arithmetic
from titan_rl.errors import ConfigError


def problems(dataset):
    return {
        (p.metadata["operation"], p.metadata["a"], p.metadata["b"])
        for p in (dataset[i] for i in range(len(dataset)))
    }


def test_the_quickstart_has_200_held_out_sums_of_numbers_from_2_to_49():
    train, held_out = (Arithmetic(Arithmetic.Config(), split) for split in ("train", "held_out"))
    assert len(held_out) == 200
    assert len(train) == 48 * 48 - 200
    every = problems(train) | problems(held_out)
    assert every == {("add", a, b) for a in range(2, 50) for b in range(2, 50)}


def test_a_prompt_states_the_problem_and_carries_the_answer():
    config = Arithmetic.Config(
        operation=["add", "subtract", "multiply"], minimum=7, maximum=12, num_held_out=0
    )
    data = Arithmetic(config, "train")
    prompts = {data[i].id: data[i] for i in range(len(data))}
    assert len(prompts) == 3 * 36
    cases = {
        "arithmetic/add/7/12": ("7 + 12 =", "19"),
        "arithmetic/subtract/7/12": ("7 - 12 =", "-5"),
        "arithmetic/multiply/7/12": ("7 * 12 =", "84"),
    }
    for name, (text, answer) in cases.items():
        (message,) = prompts[name].messages
        assert (message.role, message.content, prompts[name].answer) == ("user", text, answer)


def test_the_template_is_the_text_of_the_message():
    config = Arithmetic.Config(minimum=3, maximum=3, num_held_out=0, template="What is {a}+{b}?")
    assert Arithmetic(config, "train")[0].messages[0].content == "What is 3+3?"


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(st.sampled_from(["add", "subtract", "multiply"]), unique=True, min_size=1),
    minimum=st.integers(-5, 5),
    width=st.integers(1, 6),
    share=st.floats(0, 1),
    split_seed=st.integers(0, 5),
)
def test_the_splits_are_a_partition_and_mirrored_problems_stay_together(
    operations, minimum, width, share, split_seed
):
    total = len(operations) * (width + 1) ** 2
    num_held_out = max(1, min(total - 1, round(share * total)))
    config = Arithmetic.Config(
        operation=operations,
        minimum=minimum,
        maximum=minimum + width,
        num_held_out=num_held_out,
        split_seed=split_seed,
    )
    train, held_out = (problems(Arithmetic(config, split)) for split in ("train", "held_out"))
    assert len(held_out) == num_held_out
    assert len(train) + len(held_out) == total
    assert not train & held_out
    assert held_out == {(operation, b, a) for operation, a, b in held_out}


def test_the_last_double_makes_room_when_only_pairs_of_two_are_left():
    # 1+1, 2+2 and the pair 1+2, 2+1: three held-out problems must be the pair and one double.
    for split_seed in range(10):
        config = Arithmetic.Config(minimum=1, maximum=2, num_held_out=3, split_seed=split_seed)
        held_out = problems(Arithmetic(config, "held_out"))
        assert {("add", 1, 2), ("add", 2, 1)} <= held_out
        assert len(held_out) == 3


def test_the_split_is_this_one_forever():
    # A changed hash would move held-out problems into the training of runs that resume.
    pinned = {("add", 2, 3), ("add", 2, 4), ("add", 3, 2), ("add", 4, 2)}
    config = Arithmetic.Config(minimum=1, maximum=4, num_held_out=4)
    assert problems(Arithmetic(config, "held_out")) == pinned
    other = Arithmetic.Config(minimum=1, maximum=4, num_held_out=4, split_seed=1)
    assert problems(Arithmetic(other, "held_out")) != pinned


def test_equal_configurations_have_equal_fingerprints_and_splits_have_different_ones():
    prints = [Arithmetic(Arithmetic.Config(), split).fingerprint for split in ("train", "train", "held_out")]
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operation": []}, "data.source.operation must be"),
        ({"operation": ["add", "add"]}, "data.source.operation must be"),
        ({"operation": "divide"}, "data.source.operation must be"),
        ({"minimum": 50}, "data.source.minimum must be at most data.source.maximum, 49; got 50"),
        ({"maximum": 10_000}, "data.source.maximum must give at most 4000000 problems"),
        (
            {"num_held_out": 2304},
            "data.source.num_held_out must be at least 0 and less than .* 2304; got 2304",
        ),
        ({"template": "{a} plus"}, "data.source.template must contain"),
        ({"template": "{a} + {c} = {b}"}, "data.source.template must contain"),
        ({"template": "{a + {b} ="}, "data.source.template must contain"),
        ({"template": "{a.x} + {b} ="}, "data.source.template must contain"),
        ({"template": "{} {a} {b}"}, "data.source.template must contain"),
        ({"operation": ["add", "multiply"], "template": "{a} + {b} ="}, "{op} when there are several"),
    ],
)
def test_a_configuration_without_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Arithmetic(Arithmetic.Config(**changes), "train")


def test_the_held_out_split_is_empty_when_nothing_is_held_out():
    assert len(Arithmetic(Arithmetic.Config(num_held_out=0), "held_out")) == 0
    assert len(Arithmetic(Arithmetic.Config(num_held_out=0), "train")) == 48 * 48
