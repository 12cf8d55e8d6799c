"""What the tests of ``titan-rl conformance`` share: the two fixtures, the command's rows, and "close"."""

import copy
import json
from pathlib import Path

import pytest

from titan_rl import cli

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "numerics" / "data"
A = json.loads((FOLDER / "fixture_a.json").read_text())
B = json.loads((FOLDER / "fixture_b.json").read_text())
TOLERANCE = 1e-5  # against the peers, who computed in fp32
EXACT = 1e-7  # against the loops in float64, rounded to nine decimals
CACHE = {}


def run(folder, fixture, hyperparameters=None, *, flags=()):
    """What the command writes for a fixture; each is computed once."""
    text = json.dumps({"fixture": fixture, "hyperparameters": hyperparameters or {}})
    if (text, flags) not in CACHE:
        source, target = folder / "fixture.json", folder / "rows.json"
        source.write_text(text)
        assert cli.main(["conformance", str(source), "--output", str(target), *flags]) == 0
        CACHE[text, flags] = json.loads(target.read_text())
    return copy.deepcopy(CACHE[text, flags])


def changed(fixture, fields):
    """A copy with other fields; a string names the field that is copied."""
    new = {name: fixture[value] if isinstance(value, str) else value for name, value in fields.items()}
    return {**fixture, **new}


def assert_close(found, expected, tolerance=TOLERANCE):
    """Nested lists of one shape whose numbers are close."""
    if not isinstance(expected, list):
        assert found == pytest.approx(expected, abs=tolerance, rel=tolerance)
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance)
