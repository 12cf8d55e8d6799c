"""status.json says how a run ended."""

import json
import os
import socket

import pytest

from titan_rl.resilience.status import write_status


def read(folder):
    content = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert (content.pop("host"), content.pop("pid")) == (socket.gethostname(), os.getpid())
    return content


def test_the_last_status_stands_alone(tmp_path):
    folder = tmp_path / "new" / "run"
    write_status(folder, "running", step=0)
    assert read(folder) == {"outcome": "running", "step": 0, "cause": None, "requeue": False}
    write_status(folder, "failed", step=12, cause="ConfigError: no", requeue=True)
    assert read(folder) == {"outcome": "failed", "step": 12, "cause": "ConfigError: no", "requeue": True}
    assert [path.name for path in folder.iterdir()] == ["status.json"]


def test_a_write_that_fails_leaves_the_status_of_before(tmp_path):
    write_status(tmp_path, "running", step=3)
    with pytest.raises(TypeError):
        write_status(tmp_path, "failed", step=4, cause=object())
    assert read(tmp_path)["step"] == 3
