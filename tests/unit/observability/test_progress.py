"""The line that a person follows, and the stage times beside it."""

import pytest

from titan_rl.observability.progress import duration, progress_line
from titan_rl.observability.stages import StageTimer


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (60, "1m00s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (90061, "25h01m"),
    ],
)
def test_durations_carry_over(seconds, shown):
    assert duration(seconds) == shown


def test_the_line_shows_known_metrics_in_its_own_order():
    metrics = {
        "throughput/tokens_per_second": 12345.6,
        "reward/mean": 0.123456,
        "evaluation/score": 1,
        "grad_norm": 0.5,
        "loss/mismatch_abs_max": 1.24e-5,
        "something/else": 9,
    }
    assert progress_line(7, 100, metrics=metrics) == (
        "step   7/100  reward 0.123  held-out 1.000  grad 0.50  mismatch 1.2e-05  tok/s 12,346"
    )


def test_a_line_without_metrics_still_says_where_the_run_is():
    assert progress_line(100, 100, metrics={}, seconds_left=0) == "step 100/100  left 0s"


def test_stage_times_add_up_and_start_again_when_taken(monkeypatch):
    now = iter([0.0, 10.0, 13.0, 20.0, 20.5, 30.0, 31.0, 40.0, 42.0, 43.0])
    monkeypatch.setattr("titan_rl.observability.stages.time.perf_counter", lambda: next(now))
    timer = StageTimer()
    with timer.stage("train"):
        pass
    with timer.stage("train"):
        pass
    with pytest.raises(ArithmeticError), timer.stage("sync"):
        raise ArithmeticError
    assert timer.take() == ({"train": 3.5, "sync": 1.0}, {"train": 3.5, "sync": 1.0})
    assert timer.elapsed() == 2.0
    assert timer.take() == ({}, {})
