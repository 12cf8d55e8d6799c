"""A plan's memory against the tensors of a run: PPO with a reference and a critic, on one rank and on two.

What stays between steps is exact on rank 0, which holds the largest shards; activations are within CLOSE.
"""

import json
from pathlib import Path

import pytest

from tests.distributed import plan_worker
from tests.integration import runs
from titan_rl.config.entry import read_checked
from titan_rl.tools.plan.plan import make_plan
from titan_rl.trainers.configuration import configure

pytestmark = pytest.mark.slow

CLOSE = 0.05  # the criterion is 0.1
ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "tests" / "integration" / "configs" / "plan.toml")
EXACT = (
    "parameters",
    "gradients",
    "optimiser state",
    "reference",
    "critic",
    "critic optimiser state",
    "buffers",
)


@pytest.mark.parametrize(("ranks", "recomputation"), [(1, "none"), (2, "selective")])
def test_what_a_run_holds_is_what_its_plan_says(tmp_path, monkeypatch, ranks, recomputation):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    overrides = ["--dump_folder", str(tmp_path / "run"), "--activation_checkpoint.type", recomputation]
    folder = tmp_path / "run"
    runs.fork(plan_worker.run, CONFIG, tmp_path, overrides, folder=folder, ranks=ranks).succeed()
    held = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    config = configure(*read_checked(CONFIG, overrides), device_type="cpu")
    plan = make_plan(config, world_size=ranks, device_type="cpu", device_bytes=0)
    assert plan.contradictions == []
    planned = plan.memory.items
    assert {name: planned[name] for name in EXACT} == {name: held[0][name] for name in EXACT}
    for other in held[1:]:
        assert all(other[name] <= planned[name] for name in EXACT)
    assert planned["activations"] == pytest.approx(max(rank["activations"] for rank in held), rel=CLOSE)
