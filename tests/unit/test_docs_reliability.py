"""docs/reliability.md and its examples: the table of rules is the code's, the scripts do what they say."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf, stopping
from titan_rl.trainers import resume_rules
from titan_rl.trainers.sections import ResilienceSection

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "docs" / "examples"


def test_the_table_of_rules_is_the_code_s():
    assert resume_rules.markdown() in PAGE, "put resume_rules.markdown() into docs/reliability.md"


def test_names_and_defaults_are_the_code_s():
    section = ResilienceSection()
    assert f"`resilience.grace_seconds` ({section.grace_seconds:g}) over" in PAGE
    assert f"`resilience.max_failed_saves` ({section.max_failed_saves}) in a row" in PAGE
    assert f"`{manifests.NAME}`" in PAGE
    assert shelf.FAILURES in PAGE
    assert f"with {stopping.EXIT_CODE};" in PAGE
    assert stopping.REPEAT_SECONDS == stopping.ALIVE_SECONDS == 2.0
    assert all((ROOT / "tests" / "faults" / name).is_file() for name in re.findall(r"`(test_\w+\.py)`", PAGE))


def seconds(text: str, pattern: str) -> int:
    return int(re.search(pattern, text)[1])


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("slurm.sbatch", r"--signal=B:TERM@(\d+)"),
        ("kubernetes.yaml", r"terminationGracePeriodSeconds: (\d+)"),
    ],
)
def test_the_grace_fits_into_torchrun_s_and_that_into_the_batch_system_s(name, longest):
    text = (EXAMPLES / name).read_text()
    ours, torchrun = seconds(text, r"grace_seconds (\d+)"), seconds(text, r"--shutdown-timeout (\d+)")
    assert ours < torchrun < seconds(text, longest)


LAUNCHER = """#!/bin/bash
echo "$@" >> "$LOG"
trap 'echo TERM >> "$LOG"; echo "$STATUS" > "$DUMP_FOLDER/status.json"; exit 1' TERM
touch "$DUMP_FOLDER/started"
for _ in $(seq 200); do sleep 0.05; done
echo '{"outcome": "done", "requeue": false}' > "$DUMP_FOLDER/status.json"
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && { echo node-1; echo node-2; exit; }
echo "scontrol $*" >> "$LOG"
"""


@pytest.fixture
def stand_ins(tmp_path):
    for name, text in (("srun", LAUNCHER), ("torchrun", LAUNCHER), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "DUMP_FOLDER": str(folder),
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[1-2]",
    }

    def start(command, *, status):
        process = subprocess.Popen(
            command, env=os.environ | environment | {"STATUS": json.dumps(status)}, start_new_session=True
        )
        deadline = time.monotonic() + 20
        while not (folder / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process, tmp_path / "log"

    return start


@pytest.mark.parametrize("requeue", [True, False])
def test_the_slurm_script_hands_sigterm_on_and_queues_the_job_again_if_the_status_says_so(stand_ins, requeue):
    command = ["bash", "-c", f'exec bash {EXAMPLES / "slurm.sbatch"} run.toml "$DUMP_FOLDER"']
    process, log = stand_ins(command, status={"outcome": "preempted", "requeue": requeue})
    process.terminate()
    assert process.wait(20) == (0 if requeue else 1)
    text = log.read_text()
    assert "torchrun --nnodes 2 --nproc-per-node 8" in text
    assert "--rdzv-endpoint node-1:29500" in text
    assert "TERM" in text
    assert ("scontrol requeue 17" in text) == requeue


def test_the_kubernetes_command_ends_with_75_when_there_is_more_to_do(stand_ins):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}} in rules
    (script,) = container["args"]
    script = script.replace("/runs/my_run", '"$DUMP_FOLDER"')
    process, log = stand_ins([*container["command"], script], status={"requeue": True})
    process.terminate()
    assert process.wait(20) == 75
    assert "TERM" in log.read_text()
