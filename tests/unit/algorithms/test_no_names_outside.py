"""Nothing outside ``algorithms/`` asks which algorithm runs: its syntax trees contain no algorithm's name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.algorithms.registries import ALGORITHMS

PACKAGE = Path(__file__).parents[3] / "titan_rl"


def sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "algorithms" not in p.relative_to(PACKAGE).parts]


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the strings that stand as statements: they cite papers, and decide nothing."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and word of every identifier and of every string that is no docstring."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        texts: list[str] = []
        for _, value in ast.iter_fields(node):
            parts = value if isinstance(value, list) else [value]
            if id(node) not in prose:
                texts += [part for part in parts if isinstance(part, str)]
        for text in texts:
            for word in re.findall(r"\w+", text):
                yield getattr(node, "lineno", 0), word


def named(source: str) -> set[str]:
    return {word for _, word in words(ast.parse(source))} & ALGORITHMS.keys()


def test_no_algorithm_is_named_outside_its_package():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {word}"
        for path in sources()
        for line, word in words(ast.parse(path.read_text()))
        if word in ALGORITHMS
    ]
    assert found == []


def test_the_whole_package_is_read():
    names = {str(path.relative_to(PACKAGE)) for path in sources()}
    assert {"trainers/rl.py", "trainers/credit.py", "rollout/source.py", "cli.py"} <= names
    assert not any(name.startswith("algorithms/") for name in names)
    assert len(names) > 80


@pytest.mark.parametrize(
    "source",
    [
        'if config.algorithm.type == "ppo": pass',
        "from titan_rl.algorithms import grpo",
        "from titan_rl.algorithms.grpo import preset",
        "import titan_rl.algorithms.remax as other",
        "def dapo(): pass",
        "class X:\n    gspo = 1",
        "x = trainer.rloo",
        "f(sapo=1)",
        'message = f"set algorithm.type = ppo, not {name}"',
        "match name:\n    case 'cispo': pass",
        "global gmpo",
    ],
)
def test_planted_faults_are_found(source):
    assert named(source), source


@pytest.mark.parametrize(
    "source",
    ['"""PPO, or ppo, as docs."""', "tiny_grpo = 1", 'path = "train_configs/tiny_grpo.toml"', "x = 'none'"],
)
def test_prose_and_other_names_are_no_fault(source):
    assert named(source) == set()
