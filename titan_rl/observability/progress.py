"""The one line per step that a person follows."""

from __future__ import annotations

from collections.abc import Mapping


def progress_line(
    step: int, total_steps: int, *, metrics: Mapping[str, float], seconds_left: float | None = None
) -> str:
    """Format the progress of one iteration.

    Args:
        step: Optimiser steps so far.
        total_steps: ``training.steps``.
        metrics: By the names of docs/metrics.md; what is missing is left out.
        seconds_left: Estimated wall-clock seconds until the end.

    >>> progress_line(3, 10, metrics={"reward/mean": 0.5, "loss/reference_kl": 0.01}, seconds_left=75)
    'step  3/10  reward 0.500  kl 0.0100  left 1m15s'
    """
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    parts += [
        f"{label} {metrics[name]:{form}}{unit}" for name, label, form, unit in _SHOWN if name in metrics
    ]
    if seconds_left is not None:
        parts.append(f"left {duration(seconds_left)}")
    return "  ".join(parts)


_SHOWN = (
    ("preference/loss", "loss", ".4f", ""),
    ("preference/accuracy", "accuracy", ".3f", ""),
    ("preference/margin", "margin", ".3f", ""),
    ("evaluation/accuracy", "held-out", ".3f", ""),
    ("reward/mean", "reward", ".3f", ""),
    ("evaluation/score", "held-out", ".3f", ""),
    ("loss/reference_kl", "kl", ".4f", ""),
    ("loss/entropy", "entropy", ".3f", ""),
    ("grad_norm", "grad", ".2f", ""),
    ("rollout/completion_tokens_mean", "length", ".1f", ""),
    ("rollout/truncated_fraction", "truncated", ".2f", ""),
    ("loss/mismatch_abs_max", "mismatch", ".1e", ""),
    ("throughput/tokens_per_second", "tok/s", ",.0f", ""),
    ("time/generate", "generate", ".1f", "s"),
    ("time/train", "train", ".1f", "s"),
    ("time/sync", "sync", ".1f", "s"),
)


def duration(seconds: float) -> str:
    """Format seconds for a person.

    >>> [duration(s) for s in (5, 75, 3725)]
    ['5s', '1m15s', '1h02m']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
