"""docs/algorithms/: no algorithm, part or paper is missing, and what the pages state is what the code has."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import learning_curves
from titan_rl.algorithms import preference_registry, registries
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.config.choice import Choice
from titan_rl.config.entry import read_checked
from titan_rl.config.registry import resolve
from titan_rl.trainers.configuration import configure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "algorithms"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
TABLES = {
    "advantage": registries.ADVANTAGES,
    "loss.ratio": registries.RATIOS,
    "loss.surrogate": registries.SURROGATES,
    "loss.correction": registries.CORRECTIONS,
    "loss.rejection": registries.CORRECTIONS,
    "loss.aggregation": registries.AGGREGATIONS,
    "loss.kl": registries.KLS,
}
ALWAYS_SHOWN = ("advantage.", "loss.ratio.", "loss.surrogate.", "loss.aggregation.", "loss.correction.type")
KL_SHOWN = ("loss.kl.coefficient", "loss.kl.placement", "loss.kl.estimator")
ARXIV = re.compile(r"arXiv[:\s]+(\d{4}\.\d{5})")


def values_of(preset: AlgorithmPreset) -> dict[str, object]:
    """Every key that a preset sets, dotted, with the ``type`` of each part."""
    found: dict[str, object] = {}

    def add(prefix: str, config: object) -> None:
        if prefix in TABLES:
            found[f"{prefix}.type"] = Choice(TABLES[prefix]).name_of(config)
        for item in dataclasses.fields(config):
            value = getattr(config, item.name)
            if dataclasses.is_dataclass(value):
                add(f"{prefix}.{item.name}", value)
            else:
                found[f"{prefix}.{item.name}"] = value

    for name, section in preset.sections().items():
        add(name, section)
    return found


PRESETS = {
    name: values_of(resolve(name, registries.ALGORITHMS, "algorithm.type")())
    for name in registries.ALGORITHMS
}
DEFAULTS = PRESETS[registries.DEFAULT_ALGORITHM]


def preset_tables(stem: str, page: str) -> dict[str, dict[str, object]]:
    """``{algorithm: {key: value}}`` of a page; columns are algorithms, ``value`` is the page's own."""
    found: dict[str, dict[str, object]] = {}
    columns: list[str | None] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            columns = []
        elif cells[0] == "key" and cells[-1] == "meaning":
            names = [stem if cell == "value" else cell.strip("`") for cell in cells[1:-1]]
            columns = [name if name in PRESETS else None for name in names]
        elif columns and cells[0].startswith("`"):
            for name, cell in zip(columns, cells[1:-1], strict=True):
                if name is not None and cell != "-":
                    value = tomllib.loads(f"value = {cell.strip('`')}")["value"]
                    found.setdefault(name, {})[cells[0].strip("`")] = value
    return found


SHOWN = {name: table for stem, page in PAGES.items() for name, table in preset_tables(stem, page).items()}


@pytest.mark.parametrize("name", registries.ALGORITHMS)
def test_an_algorithm_has_a_page_with_the_values_of_its_preset(name):
    preset = PRESETS[name]
    expected = {
        key: value
        for key, value in preset.items()
        if key.startswith(ALWAYS_SHOWN) or key in KL_SHOWN or DEFAULTS.get(key, value) != value
    }
    shown = SHOWN[name]
    assert {key: preset.get(key, "no such key") for key in shown} == shown
    assert expected.keys() - shown.keys() == set()


@pytest.mark.parametrize(
    "registry", [n for n in vars(registries) if n.isupper() and n != "DEFAULT_ALGORITHM"]
)
def test_every_name_of_a_registry_is_on_the_page_of_parts_or_in_the_index(registry):
    names = set(getattr(registries, registry))
    text = PAGES["index"] if registry == "ALGORITHMS" else PAGES["parts"]
    assert names
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_losses_on_preferences_are_in_the_index():
    names = {*preference_registry.PREFERENCE_LOSSES, *preference_registry.REWARD_MODEL_LOSSES}
    assert {name for name in names if f"`{name}`" not in PAGES["index"]} == set()


def test_the_table_of_the_index_says_of_each_algorithm_what_its_preset_is():
    rows = {}
    for line in PAGES["index"].splitlines():
        if match := re.match(r"\| \[`(\w+)`\]\((\w+)\.md\) \|(.*)\|$", line):
            rows[match[1]] = [cell.strip() for cell in match[3].split("|")]
    assert rows.keys() == PRESETS.keys()
    for name, (advantage, ratio, surrogate, aggregation, kl, _) in rows.items():
        preset = PRESETS[name]
        assert advantage.startswith(f"`{preset['advantage.type']}`"), name
        assert ("no deviation" in advantage) == (preset.get("advantage.normalise_std") is False), name
        assert ratio == f"`{preset['loss.ratio.type']}`", name
        numbers = [float(n) for n in re.findall(r"[\d.]+", surrogate.split("`")[2])]
        options = [v for k, v in preset.items() if k.startswith("loss.surrogate.") and not k.endswith("type")]
        assert surrogate.startswith(f"`{preset['loss.surrogate.type']}`"), name
        assert numbers == [option for option in options if option != 0], name
        assert aggregation == f"`{preset['loss.aggregation.type']}`", name
        assert kl == f"{preset['loss.kl.estimator']} in the {preset['loss.kl.placement']}", name


def test_every_page_is_linked_from_the_index():
    assert {stem for stem in PAGES if stem != "index" and f"({stem}.md)" not in PAGES["index"]} == set()


@pytest.mark.parametrize("name", learning_curves.NAMES)
def test_the_learning_curves_are_in_bounds_and_their_numbers_on_the_page_and_in_the_index(name):
    curves = learning_curves.read_published()[name]
    assert curves.failures == []
    rows = [row for page in PAGES.values() for row in page.splitlines() if row.startswith(f"| `{name}` | 0.")]
    assert rows == [curves.row(name)] * 2


def test_every_algorithm_but_those_that_rewards_do_not_train_has_learning_curves():
    trained = {name for name, preset in PRESETS.items() if preset["advantage.type"] != "none"}
    assert learning_curves.read_published().keys() == set(learning_curves.NAMES) == trained


def cited(pattern: str) -> set[str]:
    found = set()
    for path in sorted((ROOT / "titan_rl").glob(pattern)):
        found |= set(ARXIV.findall(path.read_text()))
    return found


def test_every_paper_that_a_formula_cites_is_in_the_paper_index_and_none_that_nothing_cites():
    index = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", PAGES["index"].partition("## Paper index")[2]))
    formulas = cited("algorithms/*.py") | cited("functional/*.py")
    assert len(formulas) > 30
    assert formulas - index == set()
    assert index - cited("**/*.py") == set()


def test_the_paper_index_names_files_that_exist():
    named = set(re.findall(r"`(\w+/\w+\.py)`", PAGES["index"].partition("## Paper index")[2]))
    assert {name for name in named if not (ROOT / "titan_rl" / name).exists()} == set()
    assert len(named) > 15


def snippets() -> list[tuple[str, str]]:
    found = []
    for stem, page in PAGES.items():
        for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
            if stem != "your_own" and "trainer" not in tomllib.loads(block):
                found.append((stem, block))
    return found


@pytest.mark.parametrize(("stem", "block"), snippets(), ids=[stem for stem, _ in snippets()])
def test_what_a_page_shows_in_toml_is_accepted(stem, block, tmp_path, monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    base = ROOT / "train_configs" / "tiny_grpo.toml"
    (tmp_path / "run.toml").write_text(f'base = "{base}"\n{block}')
    config = configure(*read_checked(str(tmp_path / "run.toml"), []))
    assert config.algorithm.type == tomllib.loads(block).get("algorithm", {}).get("type", "grpo")


def links() -> list[tuple[Path, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]


def anchor(heading: str) -> str:
    """The fragment that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def test_every_relative_link_of_the_documentation_leads_somewhere():
    broken = []
    for page, link in links():
        if re.match(r"\w+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            broken.append(f"{page.relative_to(ROOT)}: {link}")
        elif fragment and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            if fragment not in map(anchor, headings):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []
