"""Procedural tasks: no question in both splits, and scores that can be computed from the metadata."""

import json
import sys

import pytest
import reasoning_gym

from titan_rl.data.reasoning_gym_tasks import ReasoningGym
from titan_rl.errors import ConfigError

FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Sums and differences of two digits: fewer different questions than the tests ask for."""


def load(split="train", **config):
    return ReasoningGym(
        ReasoningGym.Config(**{"task": "chain_sum", "size": 40, "num_held_out": 10, **config}), split
    )


def questions(data):
    return [data[i].messages[0].content for i in range(len(data))]


def test_the_metadata_is_enough_to_score_with_the_tasks_own_scorer():
    data = load(task="basic_arithmetic", params={"max_terms": 3})
    for index in (0, 17):
        prompt = data[index]
        recipe = json.loads(json.dumps(prompt.metadata))["reasoning_gym"]
        task = reasoning_gym.create_dataset(
            recipe["task"], seed=recipe["seed"], size=recipe["size"], **recipe["params"]
        )
        entry = task[recipe["index"]]
        assert entry["question"] == prompt.messages[0].content
        assert task.score_answer(prompt.answer, entry) == 1.0
        assert task.score_answer("not a number", entry) < 0.5


def test_questions_are_distinct_and_never_in_both_splits_even_when_few_exist():
    train, held_out = (
        questions(load(split, size=300, num_held_out=30, params=FEW)) for split in ("train", "held_out")
    )
    assert len(set(train)) == len(train) < 300
    assert len(set(held_out)) == len(held_out) <= 30
    assert not set(train) & set(held_out)


def test_the_held_out_split_is_empty_when_nothing_is_held_out():
    assert len(load("held_out", num_held_out=0)) == 0


def test_a_larger_size_leaves_the_held_out_split_as_it_is():
    assert questions(load("held_out", size=40)) == questions(load("held_out", size=80))
    assert questions(load(size=80))[: len(load())] == questions(load())


def test_another_seed_asks_other_questions():
    assert load(seed=1).fingerprint != load(seed=2).fingerprint
    assert load(seed=1).fingerprint == load(seed=1).fingerprint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"task": "chain_sums"},
            r"data\.source\.task must be a task of reasoning-gym; got 'chain_sums'. Did you mean",
        ),
        ({"task": "codeio"}, r"data\.source\.task must be repeatable; got codeio"),
        ({"params": {"terms": 3}}, r"data\.source\.params must suit the task chain_sum \(TypeError"),
        (
            {"params": {"min_terms": -3}},
            r"data\.source\.params must suit the task chain_sum \(AssertionError",
        ),
        ({"params": {"min_terms": {1}}}, r"data\.source\.params must suit the task chain_sum \(TypeError"),
        ({"size": 3, "num_held_out": 300, "params": FEW}, r"data\.source\.size must give the train split at"),
    ],
)
def test_a_configuration_without_sense_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        load(**config)


def test_a_task_whose_questions_differ_between_processes_needs_a_fixed_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        load(task="ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load(task="ransom_note")) > 0


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"data\.source\.type 'reasoning_gym' must have .*titan_rl\[tasks\]"
    ):
        load()
