"""One job per output directory, and a lock that goes with its holder."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from titan_rl.errors import ConfigError
from titan_rl.resilience.lock import FolderLock

HOLDER = """
import sys, time
from pathlib import Path
from titan_rl.resilience.lock import FolderLock
lock = FolderLock(Path(sys.argv[1])); lock.claim(); print("held", flush=True); time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_job_is_refused_with_the_name_of_the_first(tmp_path, holder):
    with pytest.raises(ConfigError) as caught:
        FolderLock(tmp_path)
    assert caught.value.where == "dump_folder"
    assert f"which process {holder.pid} on {socket.gethostname()} is writing to" in str(caught.value)


def test_the_lock_of_a_killed_job_is_taken_over_and_that_is_said(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = FolderLock(tmp_path)
    assert lock.stale == f"process {holder.pid} on {socket.gethostname()}"
    lock.claim()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_was_given_back_leaves_nobody_s_name(tmp_path):
    lock = FolderLock(tmp_path / "new")
    assert lock.stale is None
    lock.claim()
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []
    again = FolderLock(tmp_path / "new")
    assert again.stale is None
    again.release()


def test_a_start_that_is_refused_leaves_the_name_that_it_found(tmp_path):
    (tmp_path / ".lock").write_text('{"host": "there", "pid": 7}\n')
    lock = FolderLock(tmp_path)
    assert lock.stale == "process 7 on there"
    lock.release(is_claimed=False)
    FolderLock(tmp_path / "other").release(is_claimed=False)
    assert list((tmp_path / "other").iterdir()) == []
    assert (tmp_path / ".lock").read_text() == '{"host": "there", "pid": 7}\n'


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_anew(tmp_path, monkeypatch):
    taken = []
    original = FolderLock._take

    def take(self, folder):
        original(self, folder)
        if not taken:
            (folder / ".lock").unlink()  # by a holder that gives it back
        taken.append(self._descriptor)

    monkeypatch.setattr(FolderLock, "_take", take)
    lock = FolderLock(tmp_path)
    assert len(taken) == 2
    assert (tmp_path / ".lock").exists()
    lock.release()


def test_a_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path):
    script = "import os\n" + HOLDER.replace("time.sleep(600)", "os.fork() or time.sleep(3600)")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    process.wait()  # the parent is gone, the child sleeps
    FolderLock(tmp_path).release()
    os.killpg(process.pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_made_is_the_user_s_to_choose(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="dump_folder must be a directory that can be written"):
        FolderLock(tmp_path / "file" / "run")


def test_a_lock_whose_file_was_deleted_is_taken_anew(tmp_path):
    lock = FolderLock(tmp_path)
    lock.claim()
    assert lock.keep() is False
    (tmp_path / ".lock").unlink()
    assert lock.keep() is True
    command = [sys.executable, "-c", HOLDER.replace("time.sleep(600)", ""), str(tmp_path)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    # Not read here: closing the file would give the lock back.
    assert (
        f"must belong to one job at a time; got {tmp_path}, which process {os.getpid()} on" in second.stderr
    )
    lock.release()
    assert not (tmp_path / ".lock").exists()


def test_giving_back_a_lock_whose_file_is_gone_is_no_error(tmp_path):
    lock = FolderLock(tmp_path)
    lock.claim()
    (tmp_path / ".lock").unlink()
    lock.release()


def test_a_lock_that_another_job_has_taken_meanwhile_is_theirs(tmp_path):
    lock = FolderLock(tmp_path)
    lock.claim()
    (tmp_path / ".lock").unlink()
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"which process {holder.pid} on"):
            lock.keep()
        lock.release()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == holder.pid
        holder.kill()
