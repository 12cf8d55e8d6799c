"""Planted faults: what is read, that each happens once and leaves its witness, and what each mode does."""

from __future__ import annotations

import errno
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_rl.errors import ConfigError
from titan_rl.resilience import faults


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Arm this process as rank 1 of the third start."""

    def arm(text: str) -> Path:
        for name, value in (("RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "2"), (faults.VARIABLE, text)):
            monkeypatch.setenv(name, value)
        faults.arm(tmp_path)
        faults.begin_step(7)
        return tmp_path

    yield arm
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.arm(tmp_path)


def test_it_happens_once_at_its_point_step_rank_and_attempt_and_leaves_a_witness(plant, capsys):
    folder = plant("optimizer.after:7:1:2:raise; reward.mid:7:0:2:raise; reward.mid:7:1:1:raise")
    faults.at("optimizer.before")
    faults.at("reward.mid")  # planted for another rank, and for an earlier start
    faults.begin_step(8)
    faults.at("optimizer.after")
    assert faults.witnesses(folder) == {}
    faults.begin_step(7)
    with pytest.raises(RuntimeError, match=r"planted raise at optimizer\.after, step 7, attempt 2"):
        faults.at("optimizer.after")
    faults.at("optimizer.after")  # once
    assert list(map(str, faults.witnesses(folder))) == ["optimizer.after:7:1:2:raise"]
    line = "[rank 1] Fault: planted raise at optimizer.after, step 7, attempt 2.\n"
    assert capsys.readouterr().err == line
    faults.arm(folder)  # another process of the same start would find the witness
    faults.begin_step(7)
    faults.at("optimizer.after")


def test_a_numbered_point_is_met_at_its_number_and_a_checkpoint_at_its_own_step(plant):
    folder = plant("forward_backward.2:7:1:2:slow=0;checkpoint.shard:6:1:2:slow=0")
    faults.at("forward_backward", 1)
    assert not faults.witnesses(folder)
    faults.at("forward_backward", 2)
    assert len(faults.witnesses(folder)) == 1
    faults.at("checkpoint.shard")  # of this step
    faults.at("checkpoint.shard", step=6)  # in the background
    assert len(faults.witnesses(folder)) == 2


def test_off_it_looks_at_nothing(plant):
    plant("")

    def values():
        raise AssertionError("looked at")
        yield

    faults.at("advantage", values=values())


def test_nan_overwrites_values_and_gradients_in_place(plant):
    plant("advantage:7:1:2:nan;optimizer.before:7:1:2:nan;forward_backward.0:7:1:2:nan")
    advantages, weight = torch.ones(2, 3), torch.nn.Parameter(torch.ones(2))
    faults.at("advantage", values=[advantages])
    assert advantages.isnan().all()
    scores = (weight * 2).exp()
    faults.at("forward_backward", 0, values=[scores])
    scores.sum().backward()  # the graph is whole, and what it computes is not
    assert weight.grad.isnan().all()
    weight.grad = torch.ones(2)
    faults.at("optimizer.before", values=[weight])
    assert weight.grad.isnan().all()
    assert math.isfinite(weight.detach().sum())


def test_a_full_disk_is_an_oserror(plant):
    plant("checkpoint.shard:7:1:2:enospc")
    with pytest.raises(OSError, match="No space left on device") as raised:
        faults.at("checkpoint.shard")
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("mode", "code"), [("sigkill", -9), ("exit1", 1)])
def test_modes_that_end_the_process(mode, code, tmp_path):
    script = (
        "from pathlib import Path; from titan_rl.resilience import faults; "
        f"faults.arm(Path({str(tmp_path)!r})); faults.at('shutdown'); print('went on')"
    )
    environment = {faults.VARIABLE: f"shutdown:0:0:0:{mode}", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"[rank 0] Fault: planted {mode} at shutdown, step 0, attempt 0.\n"
    assert len(faults.witnesses(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.before:3:1:sigkill", "be entries"),
        ("optimizer.before:3:x:0:sigkill", "be entries"),
        ("optimizer:3:1:0:sigkill", "name a point that there is"),
        ("optimizer.before.1:3:1:0:sigkill", "name a point that there is"),
        ("forward_backward:3:1:0:sigkill", "name a point that there is"),
        ("shutdown:3:1:0:sigterm", "name a mode that there is"),
        ("shutdown:3:1:0:slow=long", "name a mode that there is"),
        ("shutdown:3:1:0:raise=1", "name a mode that there is"),
        ("data.next:3:1:0:nan", "plant nan where there are numbers"),
        ("data.next:3:1:0:enospc", "plant enospc where something is written"),
    ],
)
def test_what_cannot_be_planted_is_refused(plant, text, message):
    with pytest.raises(ConfigError, match=f"TITAN_RL_FAULT must {message}"):
        plant(text)


def test_the_points_are_those_in_the_code():
    source = "".join(path.read_text() for path in Path("titan_rl").rglob("*.py"))
    calls = re.findall(r'faults\.at\("([a-z_.]+)"(, (?!values|step)\w)?', source)
    assert sorted(name + (".<i>" if is_numbered else "") for name, is_numbered in calls) == sorted(
        faults.POINTS
    )
