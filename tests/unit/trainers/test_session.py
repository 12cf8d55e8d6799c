"""What a start does to its output directory, without a trainer."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_rl.resilience import signals
from titan_rl.resilience.stopping import StopControl
from titan_rl.resilience.watchdog import Watchdog
from titan_rl.trainers import session


def config_of(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(dump_folder=str(folder), resilience=SimpleNamespace(watchdog=None))


@pytest.mark.parametrize(("is_training", "folder"), [(True, "."), (False, "evaluation")])
def test_the_watchers_of_an_evaluation_meet_apart_from_those_of_the_training_run(
    is_training: bool, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may be first starts on default ports, whose meetings have one name: one would end the other."""
    met: list[Path] = []

    def start(self: Watchdog, dump_folder: Path, **given: Any) -> None:
        met.append(dump_folder)
        assert given["writes_status"] == is_training

    monkeypatch.setattr(Watchdog, "start", start)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    session._Session(config_of(tmp_path), is_training=is_training)._watch()
    assert met == [tmp_path / folder]


def test_a_signal_that_comes_while_a_run_that_is_done_closes_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    group: Any = SimpleNamespace(rank=0, world_size=1)
    control = StopControl(grace_seconds=10, stop_after_minutes=0, group=group)
    handlers = []

    def close() -> None:
        control.close()
        handlers.append(signal.getsignal(signal.SIGTERM))

    finishing = session._Session(config_of(tmp_path), is_training=True)
    finishing.trainer = SimpleNamespace(outcome="done", step=3, control=control, close=close)
    try:
        finishing.finish()
    finally:
        signals.stop_listening()
    assert handlers
    assert signal.SIG_DFL not in handlers


def test_a_run_that_cannot_close_does_not_leave_the_status_of_one_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    group: Any = SimpleNamespace(rank=0, world_size=1)

    def start(self: Any) -> bool:
        control = StopControl(grace_seconds=10, stop_after_minutes=0, group=group)
        self.trainer = SimpleNamespace(
            outcome="done", step=3, control=control, close=close, train=lambda: None
        )
        return True

    def close() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(session._Session, "start", start)
    try:
        assert session.run(config_of(tmp_path), document=cast(Any, None)) == 1
    finally:
        signals.stop_listening()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["step"]) == ("failed", 3)
    assert "no space left" in status["cause"]
