"""Draw reward and held-out score of runs over their steps: ``python scripts/plot_run.py OUT.png RUN_DIR...``.

Reads the TensorBoard files that a run leaves in ``<dump_folder>/tb``. The first run is drawn in full colour.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {
    "reward/mean": ("reward of sampled rollouts", "C0", "-"),
    "evaluation/score": ("held-out score", "C1", "o-"),
}


def curve(run: Path, tag: str) -> dict[int, float]:
    """A scalar of a run by step; a later start's value replaces that of an earlier one.

    Args:
        run: Its ``dump_folder``.
        tag: Name of the metric.
    """
    values: dict[int, float] = {}
    for file in sorted((run / "tb").rglob("events*")):
        events = EventAccumulator(str(file)).Reload()
        if tag in events.Tags()["scalars"]:
            values |= {event.step: event.value for event in events.Scalars(tag)}
    return dict(sorted(values.items()))


def main() -> None:
    """Draw the runs of the command line."""
    out, *runs = map(Path, sys.argv[1:])
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        for tag, (label, color, style) in TAGS.items():
            values = curve(run, tag)
            if not values:
                sys.exit(f"{run} has no {tag} in {run / 'tb'}: name the dump_folder of a run.")
            axes.plot(
                list(values), list(values.values()), style, color=color,
                alpha=1.0 if number == 0 else 0.35, label=label if number == 0 else None,
            )  # fmt: skip
    axes.set(xlabel="optimiser step", ylim=(0, 1))
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
