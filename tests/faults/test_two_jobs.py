"""M3: a port that is taken, a stale lock, two jobs in one output directory."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow


def test_a_second_job_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = jobs.start(tmp_path / "run", seconds_per_token=0.1)
    jobs.wait_until(first, lambda: (first.folder / "summary.json").exists())
    second = jobs.start(tmp_path / "run", seconds_per_token=0.1)
    assert second.wait() == [2], second.tail()
    pid = first.processes[0].pid
    assert f"dump_folder must belong to one job at a time; got {first.folder}, which process {pid} on" in (
        second.output()
    )
    first.succeed()
    assert first.status["outcome"] == "done"
    assert first.output().count("step 6/6") == 1


def test_a_stale_lock_is_taken_over_and_said(tmp_path: Path) -> None:
    killed = jobs.start(tmp_path / "run", seconds_per_token=0.1)
    jobs.wait_until(killed, lambda: jobs.complete_steps(killed))
    pid = killed.processes[0].pid
    os.kill(pid, signal.SIGKILL)
    killed.wait()
    again = jobs.start(tmp_path / "run").succeed()
    assert (
        f"Taking over {again.folder}: process {pid} on {socket.gethostname()} wrote to it" in again.output()
    )
    assert not (again.folder / ".lock").exists()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(runs, "free_port", lambda: port)
        run = jobs.start(tmp_path / "run")
        assert run.wait() == [2], run.tail()
    assert f"MASTER_PORT must be free on this machine; got {port}" in run.output()
    assert "Traceback" not in run.output()
