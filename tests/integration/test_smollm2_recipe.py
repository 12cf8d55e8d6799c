"""Two steps of the quickstart's recipe with the real model and the real vLLM, made small enough for CI."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make setup")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(smollm2_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("-m", "titan_rl.train", "train_configs/smollm2_135m_arithmetic_grpo.toml"),
        *("--model.hf_assets_path", str(smollm2_dir), "--dump_folder", str(folder)),
        *("--training.steps", "2", "--data.prompts_per_iteration", "3", "--sampling.group_size", "4"),
        *("--evaluation.num_prompts", "8", "--evaluation.minimum_gain", "none", "--model.export", "false"),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # two would spin, waiting for a core that others use
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_two_steps_are_made_and_it_ends_well(run):
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["policy_version"]) == (2, 2)
    assert set(summary["scores"]) == {"0", "2"}
    assert json.loads((run / "status.json").read_text())["outcome"] == "done"


def test_each_iteration_holds_whole_groups_of_distinct_seeds_from_the_newest_weights(run):
    seeds = set()
    for number, version in ((1, 0), (2, 1)):
        lines = (run / "rollouts" / f"train-{number:06d}.rank-0.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len(rollouts) == 12
        assert {r["policy_version"] for r in rollouts} == {version}
        assert len({(r["prompt_id"], r["sample_index"]) for r in rollouts}) == 12
        seeds |= {r["seed"] for r in rollouts}
    assert len(seeds) == 24
