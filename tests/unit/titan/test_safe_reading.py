"""DCP's checkpoints are read as DCP reads them, and nothing else is."""

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from titan_rl.titan import safe_reading
from titan_rl.titan.safe_reading import UnsafeCheckpointError

STATE = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "count": torch.tensor(3, dtype=torch.int64),
    "nested": {"betas": (0.9, 0.95), "name": "AdamW", "list": [1, None, True], "order": OrderedDict(a=1)},
}


@pytest.fixture
def stored(tmp_path):
    save(STATE, checkpoint_id=str(tmp_path / "step-4"))
    return tmp_path / "step-4"


def empty():
    return {
        "weight": torch.zeros(2, 3),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "count": torch.tensor(0),
        "nested": {"betas": (), "name": "", "list": [0, 0, 0], "order": OrderedDict(a=0)},
    }


def test_what_dcp_wrote_comes_back(stored):
    ours, theirs = empty(), empty()
    safe_reading.load(ours, stored, no_dist=True)
    dcp.load(theirs, checkpoint_id=str(stored), no_dist=True)
    for name in ("weight", "half", "count"):
        assert torch.equal(ours[name], STATE[name])
        assert torch.equal(ours[name], theirs[name])
    assert ours["nested"] == STATE["nested"] == theirs["nested"]


def test_metadata_is_read_as_pickle_would(stored):
    assert safe_reading.read_metadata(stored) == pickle.loads((stored / ".metadata").read_bytes())
    shapes = safe_reading.tensor_shapes(safe_reading.read_metadata(stored))
    assert shapes["weight"] == ((2, 3), "float32")
    assert shapes["half"] == ((2,), "bfloat16")
    assert "nested.name" not in shapes


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [eval, exec, getattr, __import__, torch.load, torch.hub.load, Path])
def test_only_what_dcp_writes_is_looked_up(stored, function, tmp_path):
    canary = tmp_path / "canary"
    argument = f"open({str(canary)!r}, 'w')"
    (stored / ".metadata").write_bytes(pickle.dumps(Call(function, argument)))
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata must"):
        safe_reading.read_metadata(stored)
    with pytest.raises(CheckpointException):
        safe_reading.load(empty(), stored, no_dist=True)
    assert not canary.exists()


def test_a_name_below_torch_is_no_way_around(stored):
    # Protocol 4 may name an attribute of an attribute.
    (stored / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.")
    with pytest.raises(UnsafeCheckpointError, match=r"torch\.os\.system"):
        safe_reading.read_metadata(stored)
