"""Rows of both fixtures, which several files of ``titan-rl conformance``'s tests look at."""

import json

import pytest

from tests.unit.tools import conformance_runs
from titan_rl import cli


@pytest.fixture(scope="session")
def of_a(tmp_path_factory):
    return conformance_runs.run(tmp_path_factory.mktemp("a"), conformance_runs.A["fixture"])


@pytest.fixture(scope="session")
def of_b(tmp_path_factory):
    """The file itself, as a user gives it, in float64."""
    target = tmp_path_factory.mktemp("b") / "rows.json"
    file = conformance_runs.FOLDER / "fixture_b.json"
    assert cli.main(["conformance", str(file), "--float64", "--output", str(target)]) == 0
    return json.loads(target.read_text())
