"""Where the time of an iteration went, by hand."""

import pytest

from titan_rl.observability.stages import StageTimer
from titan_rl.trainers.reporting import time_metrics


def test_the_shares_of_an_iteration_by_hand():
    seconds = {"generate": 4.0, "score": 1.0, "train": 3.0, "sync": 0.5, "evaluate": 1.0}
    metrics = time_metrics(seconds, elapsed=10.0, tokens=5000.0, generated=2000.0, trained=1500.0)
    assert metrics == pytest.approx(
        {
            "time/generate": 4.0,
            "time/score": 1.0,
            "time/train": 3.0,
            "time/sync": 0.5,
            "time/evaluate": 1.0,
            "time/checkpoint": 0.0,
            "time/overhead": 0.5,
            "throughput/tokens_per_second": 500.0,
            "throughput/generated_tokens_per_second": 500.0,
            "throughput/trained_tokens_per_second": 500.0,
            "throughput/generator_idle_fraction": 0.5,
            "throughput/trainer_idle_fraction": 0.6,
        }
    )


def test_an_iteration_without_a_stage_divides_by_no_zero():
    metrics = time_metrics({}, elapsed=1.0, tokens=0.0, generated=0.0, trained=0.0)
    assert metrics["throughput/trained_tokens_per_second"] == 0.0
    assert metrics["throughput/trainer_idle_fraction"] == 1.0


def test_a_timer_counts_what_passes_between_its_stages(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr("titan_rl.observability.stages.time.perf_counter", lambda: next(now))
    timer = StageTimer()
    with timer.stage("train"):
        pass
    assert timer.elapsed() == 10.0
    assert timer.take()[0] == {"train": 2.0}
    assert timer.elapsed() == 1.0
