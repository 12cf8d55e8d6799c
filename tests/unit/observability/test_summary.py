"""The summary of a run, as JSON and for a person."""

import json

import pytest

from titan_rl.observability.summary import RunSummary, read_json, steps_in, write_json


def make_summary(**changed) -> RunSummary:
    values = {
        "steps": 20,
        "policy_version": 19,
        "score_before": 0.25,
        "score_after": 0.5,
        "scores": {0: 0.25, 10: 0.4, 20: 0.5},
        "num_evaluated": 200,
        "seconds": 75.0,
        "stage_seconds": {"generate": 40.0, "train": 20.0, "checkpoint": 0.0},
        "stage_tokens": {"generate": 8000, "train": 10000},
        "paths": {"summary": "out/summary.json"},
    }
    return RunSummary(**values | changed)


def test_what_is_written_is_what_a_resumed_run_reads(tmp_path):
    path = tmp_path / "summary.json"
    make_summary().write(path)
    assert steps_in(read_json(path), "scores") == {0: 0.25, 10: 0.4, 20: 0.5}
    content = json.loads(path.read_text())
    assert content["policy_version"] == 19
    assert content["stage_seconds"]["train"] == 20.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_start_has_no_scores(tmp_path):
    assert steps_in(read_json(tmp_path / "summary.json"), "scores") == {}
    write_json(tmp_path / "summary.json", {"steps": 3})
    assert steps_in(read_json(tmp_path / "summary.json"), "scores") == {}


@pytest.mark.parametrize("text", ["", '{"scores": {"0": 0.2', "[1]", "\x00\x00", '{"scores": [1, 2]}'])
def test_a_broken_file_is_as_good_as_none_and_named(text, tmp_path, caplog):
    path = tmp_path / "summary.json"
    path.write_text(text)
    assert steps_in(read_json(path), "scores") == {}
    assert "taken as absent" in caplog.text


def test_what_is_not_utf8_is_as_good_as_none(tmp_path, caplog):
    path = tmp_path / "status.json"
    path.write_bytes(b"\xff\xfe")
    assert read_json(path) == {}
    assert str(path) in caplog.text


def test_the_text_says_what_a_person_wants_to_know():
    assert make_summary().text().splitlines() == [
        "Done: 20 steps in 1m15s.",
        "Held-out score on 200 prompts: 0.250 before, 0.500 after.",
        "  generate:    40.0 s, 200 tokens/s",
        "  train:       20.0 s, 500 tokens/s",
        "  checkpoint:  0.0 s",
        "  summary:     out/summary.json",
    ]


def test_scores_that_are_not_there_are_not_made_up():
    text = make_summary(score_before=None).text()
    assert "Held-out score on 200 prompts: 0.500 after." in text
    assert "before" not in text
    assert "Held-out" not in make_summary(score_before=None, score_after=None).text()
    assert "0.000 before, 0.000 after" in make_summary(score_before=0.0, score_after=0.0).text()
