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


def test_a_lock_that_is_deleted_while_the_run_holds_it_keeps_a_second_job_out(tmp_path: Path) -> None:
    first = jobs.start(tmp_path / "run", seconds_per_token=0.1)
    jobs.wait_until(first, lambda: jobs.complete_steps(first))
    (first.folder / ".lock").unlink()
    jobs.wait_until(first, lambda: (first.folder / ".lock").exists())
    second = jobs.start(tmp_path / "run")
    assert second.wait() == [2], second.tail()
    first.succeed()
    assert "was deleted while the run held it, and is made anew" in first.output()
    assert not (first.folder / ".lock").exists()


@pytest.mark.parametrize("name", ["status.json", "summary.json"])
def test_a_file_of_an_earlier_start_that_is_cut_off_does_not_stop_the_next(name: str, tmp_path: Path) -> None:
    jobs.start(tmp_path / "run", "training.steps", 4).succeed()
    (tmp_path / "run" / name).write_text((tmp_path / "run" / name).read_text()[:20])
    run = jobs.start(tmp_path / "run").succeed()
    assert f"{name} cannot be read and is taken as absent" in run.output()
    assert jobs.complete_steps(run) == [2, 4, 6]


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
