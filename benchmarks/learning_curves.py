"""Train the tiny model with every algorithm, on several seeds and once with permuted rewards.

    python -m benchmarks.learning_curves outputs/curves --checkpoint outputs/tiny_pretrain/checkpoint/step-N

Runs that are done are not repeated. Writes ``results.json`` and ``learning_curves.png`` into the folder and
prints the table of docs/algorithms/index.md: held-out scores before and after, and the gain under permuted
rewards, which should be nought. Two runs at a time, one thread each.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tests.integration import runs
from titan_rl.algorithms.registries import ALGORITHMS

RECIPE = runs.ROOT / "train_configs" / "tiny_grpo.toml"
STEPS, EVERY = 20, 4
COMMON: dict[str, object] = {
    "training.steps": STEPS,
    "evaluation.interval_steps": EVERY,
    "evaluation.minimum_gain": "none",
    "checkpoint.enable": "false",
    "model.export": "false",
    "generator.type": "local",
    "loss.kl.coefficient": 0.0,
}
OWN: dict[str, dict[str, object]] = {
    "ppo": {"critic.optimizer.lr": 1e-3},
    "dual_clip_ppo": {"critic.optimizer.lr": 1e-3},
    # One step per iteration leaves every ratio at 1, so bounds on ratios are tried with several.
    "gspo": {"algorithm.steps_per_iteration": 2},
    "cispo": {"algorithm.steps_per_iteration": 2},
    "sapo": {"algorithm.steps_per_iteration": 2},
    "gmpo": {"algorithm.steps_per_iteration": 2},
}
NEEDS_MORE = {"on_policy_distillation": "needs a teacher: train_configs/tiny_distillation.toml"}


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True, help="where every run starts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="names of algorithms")
    parsed = parser.parse_args()
    names = parsed.only or [name for name in ALGORITHMS if name not in NEEDS_MORE]
    jobs = [(name, seed, False) for name in names for seed in range(parsed.seeds)]
    jobs += [(name, 0, True) for name in names]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: _train(parsed.folder, parsed.checkpoint.resolve(), *job), jobs))
    results = {name: _results(parsed.folder, name, parsed.seeds) for name in names}
    (parsed.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    _plot(results, parsed.folder / "learning_curves.png")
    print(_table(results))


def _folder(folder: Path, name: str, seed: int, permuted: bool) -> Path:
    return folder / f"{name}-{'permuted' if permuted else f'seed{seed}'}"


def _train(folder: Path, checkpoint: Path, name: str, seed: int, permuted: bool) -> None:
    where = _folder(folder, name, seed, permuted)
    if (where / "summary.json").exists() and json.loads((where / "status.json").read_text())[
        "state"
    ] == "done":
        return
    options = COMMON | OWN.get(name, {})
    options |= {"algorithm.type": name, "debug.seed": seed, "checkpoint.initial_load_path": checkpoint}
    if permuted:
        options["algorithm.permute_rewards"] = "true"
    pairs = [part for pair in options.items() for part in pair]
    run = runs.start(RECIPE, *pairs, folder=where)
    codes = run.wait(3600)
    print(where.name, "done" if not any(codes) else f"FAILED {run.tail()[-600:]}", flush=True)


def _results(folder: Path, name: str, seeds: int) -> dict[str, Any]:
    def scores(seed: int, permuted: bool) -> dict[int, float]:
        path = _folder(folder, name, seed, permuted) / "summary.json"
        if not path.exists():
            return {}
        return {int(step): value for step, value in json.loads(path.read_text())["scores"].items()}

    return {"seeds": [scores(seed, False) for seed in range(seeds)], "permuted": scores(0, True)}


def _gain(scores: dict[int, float]) -> float:
    return scores[max(scores)] - scores[min(scores)] if len(scores) > 1 else math.nan


def _table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| algorithm | before | after, each seed | gain with permuted rewards |", "|---|---|---|---|"]
    for name, found in results.items():
        after = ", ".join(f"{s[max(s)]:.3f}" for s in found["seeds"] if s)
        before = next((f"{s[min(s)]:.3f}" for s in found["seeds"] if s), "-")
        lines.append(f"| `{name}` | {before} | {after} | {_gain(found['permuted']):+.3f} |")
    return "\n".join(lines)


def _plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    columns = 4
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(12, 2.4 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (name, found) in zip(axes.flat, results.items(), strict=False):
        for scores in found["seeds"]:
            axis.plot(list(scores), list(scores.values()), color="tab:blue", linewidth=1)
        permuted = found["permuted"]
        axis.plot(list(permuted), list(permuted.values()), color="tab:gray", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
    figure.supxlabel("optimiser step")
    figure.supylabel("held-out score (dotted: permuted rewards)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
