"""The plans that docs/planning.md and docs/scaling.md show are what `titan-rl plan` prints now."""

import re
import shlex
from pathlib import Path

import pytest

from titan_rl import cli

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (page, block)
    for page in ("planning.md", "scaling.md")
    for block in re.findall(r"```\n(\$ titan-rl plan .*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
]


def test_every_stage_shows_a_plan():
    assert len([page for page, _ in BLOCKS if page == "scaling.md"]) >= 7
    assert len([page for page, _ in BLOCKS if page == "planning.md"]) == 2


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_plan_in_the_documentation_is_the_planners(page, block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    command, *shown = block.rstrip("\n").split("\n")
    code = cli.main(shlex.split(command)[2:])
    printed = capsys.readouterr().out.replace(f"{ROOT}/", "").rstrip("\n").split("\n")
    assert code == (2 if any("contradiction(s)" in line for line in printed) else 0)
    if "..." not in shown and page == "planning.md":
        assert shown == printed
    position = 0
    for line in shown:
        if line not in ("", "..."):
            assert line in printed[position:], line
            position += printed[position:].index(line) + 1
