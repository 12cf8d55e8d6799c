"""docs/tour.md: the name after a link is defined in the file that the link leads to."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tour.md").read_text()
NAMED = re.findall(r"\]\((\.\./titan_rl/[\w/]+\.py)\)\s+`([\w.]+)`", PAGE)


def is_defined(name: str, source: str) -> bool:
    parts = name.split(".")
    return all(re.search(rf"(def|class) {part}\b|^ *{part}(:| =)", source, re.MULTILINE) for part in parts)


def test_every_name_after_a_link_is_defined_in_that_file():
    assert len(NAMED) > 25
    missing = [(path, name) for path, name in NAMED if not is_defined(name, (DOCS / path).read_text())]
    assert missing == []


def test_every_method_of_the_trainer_that_the_tour_names_exists():
    source = (DOCS.parent / "titan_rl" / "trainers" / "rl.py").read_text()
    named = set(re.findall(r"`RLTrainer\.(\w+)`", PAGE))
    assert len(named) > 5
    assert {name for name in named if not re.search(rf"def {name}\b", source)} == set()


def test_a_name_that_is_not_there_would_be_found():
    source = (DOCS.parent / "titan_rl" / "trainers" / "rl.py").read_text()
    assert is_defined("RLTrainer.generate", source)
    assert not is_defined("RLTrainer.no_such_method", source)
