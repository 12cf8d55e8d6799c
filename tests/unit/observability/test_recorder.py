"""Recorded rollouts: what a line holds, and which files a resumed run takes away."""

import json

import pytest

from tests.unit.rollout.rollout_fakes import make_group, make_rollout
from titan_rl.observability.recorder import RolloutRecorder


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_one_rollout_with_its_reward_and_advantage(tmp_path):
    recorder = RolloutRecorder(tmp_path / "rollouts", rank=2)
    group = make_group(7, [0.5])
    group.rollouts = [make_rollout(prompt=group.prompt, tokens=(9, 8, 7), reward=0.5, is_truncated=True)]
    recorder.record("train", 12, [group], {(group.index, 0): 1.25})
    (record,) = read(tmp_path / "rollouts" / "train-000012.rank-2.jsonl")
    assert record == {
        "prompt_id": "p7",
        "prompt_index": 7,
        "sample_index": 0,
        "seed": 11,
        "messages": [{"role": "user", "content": "xx"}],
        "answer": "7",
        "completion": "text",
        "finish_reason": "length",
        "policy_version": 3,
        "num_prompt_tokens": 2,
        "completion_token_ids": [9, 8, 7],
        "generator_logprobs": [-0.1, -0.2, -0.3],
        "reward": 0.5,
        "reward_parts": {"exact": 0.5},
        "reward_error": None,
        "advantage": 1.25,
    }


def test_advantages_go_to_their_rollouts_and_the_others_have_none(tmp_path):
    recorder = RolloutRecorder(tmp_path, rank=0)
    groups = [make_group(0, [1.0, None, 0.0]), make_group(1, [None, 2.0])]
    recorder.record("train", 1, groups, {(1, 1): 0.3, (0, 2): 0.2, (0, 0): 0.1})
    records = read(tmp_path / "train-000001.rank-0.jsonl")
    assert [record["advantage"] for record in records] == [0.1, None, 0.2, None, 0.3]
    assert [record["reward"] for record in records] == [1.0, None, 0.0, None, 2.0]
    assert records[1]["reward_error"] == "timeout: took too long"
    assert records[1]["reward_parts"] is None


def test_an_evaluation_has_no_advantages(tmp_path):
    recorder = RolloutRecorder(tmp_path, rank=0)
    recorder.record("evaluation", 0, [make_group(0, [1.0])])
    assert read(tmp_path / "evaluation-000000.rank-0.jsonl")[0]["advantage"] is None


def test_text_that_is_not_ascii_stays_readable(tmp_path):
    recorder = RolloutRecorder(tmp_path, rank=0)
    group = make_group(0, [1.0])
    group.rollouts[0].turns[0] = (
        group.rollouts[0].turns[0].__class__((1,), group.rollouts[0].turns[0].completion, "ä\n\u2028ß")
    )
    recorder.record("train", 1, [group], {(0, 0): 0.0})
    raw = (tmp_path / "train-000001.rank-0.jsonl").read_text(encoding="utf-8")
    assert "ä" in raw
    assert raw.count("\n") == 1
    assert json.loads(raw)["completion"] == "ä\n\u2028ß"


def test_an_iteration_done_again_replaces_its_file_and_leaves_nothing_beside_it(tmp_path):
    recorder = RolloutRecorder(tmp_path, rank=0)
    recorder.record("train", 3, [make_group(0, [1.0, 0.0])], {(0, 0): 1.0, (0, 1): -1.0})
    recorder.record("train", 3, [make_group(5, [0.0])], {(5, 0): 0.0})
    (path,) = tmp_path.iterdir()
    assert [record["prompt_index"] for record in read(path)] == [5]


def test_a_resumed_run_takes_away_what_it_does_again(tmp_path):
    for rank in (0, 1):
        recorder = RolloutRecorder(tmp_path, rank)
        for number in (1, 2, 3, 1_000_000):
            recorder.record("train", number, [])
        recorder.record("evaluation", 2, [])
    (tmp_path / "train-000009.notes.txt").write_text("the user's own")
    assert RolloutRecorder(tmp_path, 0).drop_after("train", 2) == 4  # of both ranks
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(
        [f"train-{n:06d}.rank-{r}.jsonl" for n in (1, 2) for r in (0, 1)]
        + [f"evaluation-000002.rank-{r}.jsonl" for r in (0, 1)]
        + ["train-000009.notes.txt"]
    )
    assert RolloutRecorder(tmp_path, 0).drop_after("evaluation", 2) == 0
    assert RolloutRecorder(tmp_path, 0).drop_after("evaluation", 1) == 2


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path):
    recorder = RolloutRecorder(tmp_path, rank=0)
    recorder.record("train", 1, [make_group(0, [1.0])], {(0, 0): 1.0})
    bad = make_group(0, [1.0])
    bad.rollouts[0].seed = object()
    with pytest.raises(TypeError):
        recorder.record("train", 1, [bad], {(0, 0): 1.0})
    assert read(tmp_path / "train-000001.rank-0.jsonl")[0]["advantage"] == 1.0
