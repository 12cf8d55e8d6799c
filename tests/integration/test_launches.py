"""The two ways to start training, and an evaluation of what one of them left, as a user types them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

RUN = """\
[model]
hf_assets_path = "titan_rl/assets/tiny_llama"
allow_random_init = true
export = false

[data]
prompts_per_iteration = 4
max_prompt_tokens = 16

[data.source]
type = "arithmetic"
num_held_out = 6
template = "{a}+{b}="

[[reward]]
type = "format"
pattern = "(?s).*[0-9].*"

[sampling]
group_size = 4
max_tokens = 6

[generator]
type = "local"

[training]
steps = 2
seq_len = 64

[optimizer]
lr = 1e-2

[activation_checkpoint]
type = "none"

[checkpoint]
enable = true
interval = 1

[evaluation]
temperature = 1.0
samples_per_prompt = 4
"""


def torchrun(folder, *arguments):
    """Start one rank in ``folder``; returns the finished process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TITAN_RL_DEVICE": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its rank then
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_torchtitan_s_own_command_trains_a_named_configuration(tmp_path):
    arguments = ["--module", "titan_rl", "--config", "grpo_debugmodel", "--training.steps", "1"]
    run = torchrun(tmp_path, "torchtitan.train", *arguments, "--dump-folder", "here")
    assert run.returncode == 0, run.stderr[-3000:]
    summary = json.loads((tmp_path / "here" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["steps"], summary["policy_version"], set(summary["scores"])) == (1, 1, {"0", "1"})
    written = (tmp_path / "here" / "config.toml").read_text(encoding="utf-8")
    assert 'flavor = "debugmodel"' in written
    rollouts = tmp_path / "here" / "rollouts" / "train-000001.rank-0.jsonl"
    assert len(rollouts.read_text(encoding="utf-8").splitlines()) == 16


def test_evaluate_scores_a_checkpoint_and_changes_nothing_of_the_run(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN, encoding="utf-8")
    runs.start(file, folder=tmp_path / "run").succeed()
    before = digests(tmp_path / "run")

    newest = torchrun(tmp_path, "titan_rl.evaluate", "run.toml", "--dump_folder", "run")
    assert newest.returncode == 0, newest.stderr[-3000:]
    assert "Evaluated the checkpoint of step 2" in newest.stderr + newest.stdout
    result = json.loads((tmp_path / "run" / "evaluation" / "step-000002.json").read_text(encoding="utf-8"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    # The run evaluated the same weights with the same seeds after its last step.
    assert result["score"] == summary["scores"]["2"]
    assert result["step"] == result["policy_version"] == 2
    assert (result["num_prompts"], result["samples_per_prompt"]) == (6, 4)
    assert result["score"] <= result["pass_at_4"] <= 1

    rollouts = tmp_path / "run" / "evaluation" / "rollouts" / "evaluation-000002.rank-0.jsonl"
    rewards = [json.loads(line)["reward"] for line in rollouts.read_text(encoding="utf-8").splitlines()]
    assert len(rewards) == 24
    assert sum(rewards) / 24 == pytest.approx(result["reward_mean"])
    after = digests(tmp_path / "run")
    assert {name: after.get(name) for name in before} == before

    missing = runs.start(file, "checkpoint.load_step", 7, folder=tmp_path / "run", module="titan_rl.evaluate")
    assert missing.wait() == [2]
    error = "command line: checkpoint.load_step must name a complete checkpoint of this run; got 7: "
    assert error in missing.output()
