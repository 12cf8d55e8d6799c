"""Train the tiny model with every algorithm, on three seeds, and on the same with permuted rewards.

    python -m benchmarks.learning_curves outputs/curves --checkpoint outputs/tiny_pretrain/checkpoint/step-400

A run that is done is not repeated, so the command may be interrupted and given again. It prints the table of
docs/algorithms/index.md and fails when an algorithm's held-out score rises by less than 0.20 on a seed, or
with permuted rewards by 0.05 or more on average: there the score walks at random, and its mean over seeds
says whether anything teaches. With ``--docs`` it also writes ``docs/figures/learning_curves.json`` and
``.png`` and the rows of the tables in docs/algorithms/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tests.integration import runs
from titan_rl.algorithms.registries import ALGORITHMS

RECIPE = runs.ROOT / "train_configs" / "tiny_grpo.toml"
PAGES, FIGURES = runs.ROOT / "docs" / "algorithms", runs.ROOT / "docs" / "figures"
SEEDS = (0, 1, 2)
MINIMUM_GAIN, PERMUTED_GAIN = 0.20, 0.05
COMMON: dict[str, object] = {
    "evaluation.interval_steps": 4,
    "evaluation.minimum_gain": "none",
    "checkpoint.enable": "false",
    "model.export": "false",
    "generator.type": "local",
    "loss.kl.coefficient": 0.0,
}
OWN: dict[str, dict[str, object]] = {
    "ppo": {"critic.optimizer.lr": 1e-3},
    # One step per iteration leaves every ratio at 1, so bounds on ratios are tried with several.
    "dual_clip_ppo": {"critic.optimizer.lr": 1e-3, "algorithm.steps_per_iteration": 2},
    "gspo": {"algorithm.steps_per_iteration": 2},
    "cispo": {"algorithm.steps_per_iteration": 2},
    "sapo": {"algorithm.steps_per_iteration": 2},
    "gmpo": {"algorithm.steps_per_iteration": 2},
}
NEEDS_MORE = ("on_policy_distillation",)
"""Learns from a teacher and not from rewards: train_configs/tiny_distillation.toml."""
NAMES = [name for name in ALGORITHMS if name not in NEEDS_MORE]

Scores = dict[int, float]
"""Held-out score by optimiser step."""


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured of one algorithm.

    Attributes:
        seeds: One per seed.
        permuted: The same with permuted rewards.
    """

    seeds: list[Scores]
    permuted: list[Scores]

    @property
    def failures(self) -> list[str]:
        """Which bounds do not hold."""
        short = [f"seed {s}: {_gain(c):+.3f}" for s, c in enumerate(self.seeds) if _gain(c) < MINIMUM_GAIN]
        gain = statistics.mean(_gain(scores) for scores in self.permuted)
        return short + ([f"permuted: {gain:+.3f}"] if gain >= PERMUTED_GAIN else [])

    def row(self, name: str) -> str:
        """The algorithm's line in tables of the documentation."""
        after, permuted = (
            ", ".join(f"{_last(scores):.3f}" for scores in curves) for curves in (self.seeds, self.permuted)
        )
        return f"| `{name}` | {self.seeds[0][0]:.3f} | {after} | {permuted} |"


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--checkpoint", type=Path, required=True, help="where every run starts")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, help="names of algorithms")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--docs", action="store_true", help="write figure, numbers and tables")
    parsed = parser.parse_args()
    jobs = list(itertools.product(SEEDS, parsed.only, (False, True)))
    with ThreadPoolExecutor(parsed.parallel) as pool:
        done = list(pool.map(lambda job: _train(parsed.folder, parsed.checkpoint.resolve(), *job), jobs))
    if not all(done):
        sys.exit(f"{done.count(False)} of {len(done)} runs failed.")
    found = {name: _read(parsed.folder, name) for name in parsed.only}
    if parsed.docs:
        _write_docs(found)
    print("\n".join(curves.row(name) for name, curves in found.items()))
    failures = [f"{name}, {what}" for name, curves in found.items() for what in curves.failures]
    sys.exit("Out of bounds: " + "; ".join(failures) if failures else 0)


def _folder(folder: Path, seed: int, name: str, permuted: bool) -> Path:
    return folder / f"{name}-seed{seed}{'-permuted' if permuted else ''}"


def _train(folder: Path, checkpoint: Path, seed: int, name: str, permuted: bool) -> bool:
    """One run, and whether it succeeded; one that is done says so itself and ends."""
    options = COMMON | OWN.get(name, {})
    options |= {"algorithm.type": name, "debug.seed": seed, "checkpoint.initial_load_path": checkpoint}
    if permuted:
        options["algorithm.permute_rewards"] = "true"
    pairs = [part for pair in options.items() for part in pair]
    run = runs.start(RECIPE, *pairs, folder=_folder(folder, seed, name, permuted))
    is_done = not any(run.wait(3600))
    print(run.folder.name, "done" if is_done else f"FAILED {run.tail()[-600:]}", flush=True)
    return is_done


def _read(folder: Path, name: str) -> Curves:
    def scores(permuted: bool) -> list[Scores]:
        files = [_folder(folder, seed, name, permuted) / "summary.json" for seed in SEEDS]
        return [_by_step(json.loads(file.read_text())["scores"]) for file in files]

    return Curves(scores(False), scores(True))


def _by_step(stored: Mapping[str, float]) -> Scores:
    return {int(step): value for step, value in stored.items()}


def _last(scores: Scores) -> float:
    return scores[max(scores)]


def _gain(scores: Scores) -> float:
    return _last(scores) - scores[0]


def read_published() -> dict[str, Curves]:
    """The numbers behind the figure of the documentation."""
    content: dict[str, Any] = json.loads((FIGURES / "learning_curves.json").read_text())
    return {
        name: Curves(*([_by_step(scores) for scores in stored[kind]] for kind in ("seeds", "permuted")))
        for name, stored in content.items()
    }


def _write_docs(found: dict[str, Curves]) -> None:
    """Update what is published: numbers, figure, and the row of each algorithm wherever it stands."""
    if (FIGURES / "learning_curves.json").exists():
        found = read_published() | found
    stored = {name: {"seeds": c.seeds, "permuted": c.permuted} for name, c in found.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(curves)}" for name, curves in stored.items())
    (FIGURES / "learning_curves.json").write_text(f"{{\n{lines}\n}}\n")
    _plot(found, FIGURES / "learning_curves.png")
    for path in sorted(PAGES.glob("*.md")):
        page = path.read_text()
        for name, curves in found.items():
            page = re.sub(rf"(?m)^\| `{name}` \| \d\.\d+ \|.*$", curves.row(name), page)
        path.write_text(page)


def _plot(found: Mapping[str, Curves], path: Path) -> None:
    columns = 5
    rows = -(-len(found) // columns)
    size = (11, 1.9 * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, curves) in zip(axes.flat, found.items(), strict=False):
        for scores in curves.seeds:
            axis.plot(list(scores), list(scores.values()), color="tab:blue", linewidth=1)
        for scores in curves.permuted:
            axis.plot(list(scores), list(scores.values()), color="tab:gray", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
    figure.supxlabel("optimiser step", fontsize=10)
    figure.supylabel("held-out score (dotted: permuted rewards)", fontsize=10)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
