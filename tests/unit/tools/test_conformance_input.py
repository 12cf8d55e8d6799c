"""``titan-rl conformance``: fixtures and hyperparameters that are refused."""

import copy
import json
import math

import pytest

from tests.unit.tools.conformance_runs import FOLDER, A
from titan_rl import cli


def broken(**fields):
    return lambda f: f.update(fields)


def remove(name):
    return lambda f: f.pop(name)


def shorten(f):
    f["old"][2] = f["old"][2][:4]


def not_finite(f):
    f["ref"][1][3] = math.nan


def half(f):
    f["mask"][0][1] = 0.5


def word(f):
    f["labels"][0][0] = 11


@pytest.mark.parametrize(
    ("change", "where", "constraint"),
    [
        (remove("logp"), "fixture.logp", "must be there, [B, T]; got no such key"),
        (remove("uid"), "fixture.uid", "must be there, [B]"),
        (broken(logpp=[1]), "fixture.logpp", "Did you mean 'logp'?"),
        (broken(mask=[]), "fixture.mask", "must be [B, T] with at least one row"),
        (
            broken(scores=[1.0, 2.0]),
            "fixture.scores",
            "must have 4 entries, being of [B] = [4]; got a list of 2",
        ),
        (
            broken(scores=3),
            "fixture.scores",
            "must have 4 entries, being of [B] = [4]; got 3, which is no list",
        ),
        (shorten, "fixture.old[2]", "must have 6 entries, being of [B, T] = [4, 6]; got a list of 4"),
        (broken(scores=[1, 0, "x", 1]), "fixture.scores[2]", "must be a number; got 'x'"),
        (broken(scores=[1, 0, None, 1]), "fixture.scores[2]", "must be a number; got None"),
        (broken(scores=[1, 0, math.inf, 1]), "fixture.scores[2]", "must be finite"),
        (not_finite, "fixture.ref[1][3]", "must be finite where a token is trained"),
        (half, "fixture.mask[0][1]", "must be 0 or 1; got 0.5"),
        (word, "fixture.labels[0][0]", "must be an index, 0 or more below V = 11"),
        (
            broken(logits=[[[0.0]] * 6] * 3),
            "fixture.logits",
            "must have 4 entries, being of [B, T, V] = [4, 6, 1]",
        ),
        (broken(logits=[1, 2, 3, 4]), "fixture.logits", "must be [B, T, V]"),
        (broken(uid=["a", "a", "b"]), "fixture.uid", "must have 4 entries"),
        (broken(uid=["a", "a", "b", 1.5]), "fixture.uid[3]", "must be a string or an integer"),
        (
            broken(greedy=[0.5, 0.5, 0.5, 0.4]),
            "fixture.greedy[2]",
            "must be equal within a group; got [0.5, 0.4]",
        ),
        (
            broken(greedy=[1] * 4, baselines=[1] * 4),
            "fixture.baselines",
            "must be absent beside fixture.greedy",
        ),
    ],
)
def test_a_bad_fixture_is_refused_with_file_key_and_shape(tmp_path, capsys, change, where, constraint):
    fixture = copy.deepcopy(A["fixture"])
    change(fixture)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"fixture": fixture}))
    assert cli.main(["conformance", str(path)]) == 2
    output = capsys.readouterr()
    assert f"{path}: {where}" in output.err
    assert constraint in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("tables", "where", "constraint"),
    [
        ({"clipped_surogate": {}}, "hyperparameters.clipped_surogate", "Did you mean 'clipped_surrogate'?"),
        ({"clipped_surrogate": {"clip": 0.2}}, "hyperparameters.clipped_surrogate.clip", "must be a key of"),
        ({"clipped_surrogate": {"clip_low": 2}}, "hyperparameters.clipped_surrogate.clip_low", "<= 1"),
        ({"surrogate/clipped": {"clip_low": "x"}}, "hyperparameters.surrogate/clipped.clip_low", "a number"),
        ({"surrogate/clipped": 3}, "hyperparameters.surrogate/clipped", "must be an object"),
        ({"whiten": {"eps": 0}}, "hyperparameters.whiten.eps", "> 0"),
        (
            {"algorithm/ppo": {"loss": {"surogate": {}}}},
            "hyperparameters.algorithm/ppo.loss.surogate",
            "Did you mean 'surrogate'?",
        ),
        (
            {"algorithm/grpo": {"shaping": {"mask_truncated": True}}},
            "hyperparameters.algorithm/grpo.shaping.mask_truncated",
            "must be absent",
        ),
        ({"composition/x": {"surrogate": {"type": "clippd"}}}, "hyperparameters.composition/x", "clipped"),
        ([1], "hyperparameters", "must be an object of objects"),
    ],
)
def test_bad_hyperparameters_are_refused(tmp_path, capsys, tables, where, constraint):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"fixture": A["fixture"], "hyperparameters": tables}))
    assert cli.main(["conformance", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {where}" in error
    assert constraint in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1 must be JSON"),
        ("[]", "must hold an object; got 'list'"),
        ('{"fixtures": {}}', "fixture must be an object of arrays; got no such key"),
    ],
)
def test_a_file_that_is_no_fixture_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert cli.main(["conformance", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_or_cannot_be_written_is_refused(tmp_path, capsys):
    assert cli.main(["conformance", str(tmp_path / "none.json")]) == 2
    assert "none.json must be a readable file" in capsys.readouterr().err
    target = tmp_path / "no" / "rows.json"
    assert cli.main(["conformance", str(FOLDER / "fixture_a.json"), "--output", str(target)]) == 2
    assert "--output must be a file that can be written" in capsys.readouterr().err
