"""``titan-rl``: help without torch, validation of files, and exit codes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import titan_rl
from tests.unit.resilience.saved import write_checkpoint
from titan_rl import cli
from titan_rl.resilience import shelf

ROOT = Path(__file__).parents[2]
DEBUG = """\
dump_folder = "unused"

[model]
hf_assets_path = "titan_rl/assets/tiny_llama"
allow_random_init = true

[data]
prompts_per_iteration = 6
max_prompt_tokens = 16

[data.source]
type = "arithmetic"

[[reward]]
type = "exact_match"

[sampling]
group_size = 4
max_tokens = 16

[algorithm]
steps_per_iteration = 2

[generator]
type = "vllm"
tensor_parallel_degree = 2

[training]
steps = 8
seq_len = 96
local_batch_size = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(DEBUG, encoding="utf-8")
    return str(path)


def test_help_version_and_mistakes_load_no_torch(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[training]\nstps = 3\n", encoding="utf-8")
    script = (
        "import sys\nfrom titan_rl.cli import main\n"
        "for arguments in (['--help'], ['version'], ['validate', sys.argv[1]]):\n"
        "    try:\n        print('code', main(arguments))\n"
        "    except SystemExit as end:\n        print('code', end.code)\n"
        "print('torch' in sys.modules, 'vllm' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(broken)], capture_output=True, text=True, check=True
    )
    lines = run.stdout.splitlines()
    assert [line for line in lines if line.startswith("code")] == ["code 0", "code 0", "code 2"]
    assert titan_rl.__version__ in lines
    assert lines[-1] == "False False"
    assert "broken.toml:2: training.stps" in run.stderr
    assert "Did you mean 'steps'?" in run.stderr


def test_validate_prints_ok_and_what_the_numbers_amount_to(file, capsys):
    assert cli.main(["validate", file, "--world-size", "4", "--training.local_batch_size", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok"
    numbers = {name: value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
    assert numbers["iterations"] == "4"
    assert numbers["prompts"] == "6 per iteration"
    assert numbers["samples"] == "24 per iteration, 4 per prompt"
    assert numbers["optimiser steps"] == "8, 2 per iteration"
    assert numbers["generators"] == "2 of 2 rank(s), at most 3 prompts each"
    # 3 groups in a step: 12 samples over 4 ranks; 3 fit into a row of 96.
    assert numbers["data-parallel ranks"] == "4, at most 3 samples each per step"
    assert numbers["rows"] == "at most 1 of 96 tokens per data-parallel rank and step"
    assert numbers["micro-batches"] == "at most 1 per data-parallel rank and step, of 1 row(s)"


def test_validate_gives_the_ranks_of_one_tensor_parallel_group_the_same_rows(file, capsys):
    options = ["--training.local_batch_size", "1", "--parallelism.tensor_parallel_degree", "2"]
    assert cli.main(["validate", file, "--world-size", "4", *options]) == 0
    numbers = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines()[1:])
    # 12 samples of a step over 2 data-parallel ranks; 3 fit into a row of 96.
    assert numbers["data-parallel ranks"].strip() == "2, at most 6 samples each per step"
    assert numbers["rows"].strip() == "at most 2 of 96 tokens per data-parallel rank and step"


def test_validate_says_nothing_but_its_answer(file):
    command = [sys.executable, "-m", "titan_rl.cli", "validate", file, "--world-size", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (run.stdout.splitlines()[0], run.stderr) == ("ok", "")


def test_validate_refuses_a_number_of_ranks_that_does_not_fit(file, capsys):
    assert cli.main(["validate", file, "--world-size", "3"]) == 2
    error = capsys.readouterr().err
    assert f"{file}:26: generator.tensor_parallel_degree must divide the number of ranks (3); got 2." in error


def test_validate_opens_the_prompts_only_when_asked(file, capsys):
    source = ["--data.source.type", "jsonl", "--data.source.path", "/nowhere/prompts.jsonl"]
    source += ["--data.source.prompt_column", "question", "--generator.tensor_parallel_degree", "1"]
    assert cli.main(["validate", file, *source]) == 0
    assert cli.main(["validate", file, "--data", *source]) == 2
    assert "/nowhere/prompts.jsonl" in capsys.readouterr().err


def test_validate_counts_the_rows_of_a_supervised_run(tmp_path, capsys):
    path = tmp_path / "sft.toml"
    text = (
        'trainer = "supervised"\n[model]\nhf_assets_path = "titan_rl/assets/tiny_llama"\n'
        "[training]\nsteps = 5\nseq_len = 128\nlocal_batch_size = 2\nglobal_batch_size = 16\n"
    )
    path.write_text(text, encoding="utf-8")
    assert cli.main(["validate", str(path), "--world-size", "4"]) == 0
    assert "rows:                  16 of 128 tokens per step" in capsys.readouterr().out
    assert cli.main(["validate", str(path), "--world-size", "3"]) == 2
    assert f"{path}:8: training.global_batch_size must be a multiple of 6" in capsys.readouterr().err


def test_arguments_that_no_subcommand_knows_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["version", "--training.steps", "5"])
    assert end.value.code == 2
    assert "unrecognized arguments: --training.steps 5" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", "x.toml", "--world-size", "0"])
    assert end.value.code == 2


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_version", interrupted)
    assert cli.main(["version"]) == 130


def test_prepare_refuses_a_directory_that_it_did_not_write(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep me", encoding="utf-8")
    assert cli.main(["prepare", "smollm2", str(tmp_path)]) in (1, 2)
    assert str(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "keep me"


def test_the_doctor_prints_json_and_fails_on_a_failed_check(monkeypatch, capsys):
    doctor = importlib.import_module("titan_rl.tools.doctor")
    checks = [doctor.Check("a", "ok", "1"), doctor.Check("b", "FAIL", "2", "Repair it.")]
    monkeypatch.setattr(doctor, "run_checks", lambda dump_folder, *, timeout_seconds: checks)
    assert cli.main(["doctor", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == [
        {"name": "a", "status": "ok", "value": "1", "remedy": ""},
        {"name": "b", "status": "FAIL", "value": "2", "remedy": "Repair it."},
    ]
    checks.pop()
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 checks: 0 failed, 0 warned."


def test_checkpoints_are_listed_without_torch_and_a_damaged_one_is_named(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoint"
    for step, score in ((2, 0.5), (4, 0.9), (6, 0.5)):
        write_checkpoint(folder, step, score=score)
    assert cli.main(["checkpoints", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "reward", "held-out", "size", "ranks", "saved"]
    assert [line.split()[0] for line in lines[1:]] == ["2", "4", "6"]
    assert lines[2].split()[1:5] == ["0.2500", "0.9000", "44", "B"]
    assert lines[2].endswith("complete, best")
    assert lines[3].endswith("complete, newest")
    shard = folder / "step-6" / "__0_0.distcp"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    shelf.note_failure(folder, 8, "No space left on device")
    assert cli.main(["checkpoints", str(folder)]) == 0  # names and sizes are as they were
    assert "step 8 could not be saved: No space left on device" in capsys.readouterr().out
    assert cli.main(["checkpoints", str(folder), "--verify"]) == 1
    shown = capsys.readouterr().out
    assert "step-6/__0_0.distcp: expected SHA-256" in shown
    assert shown.count("verified") == 2
    assert cli.main(["checkpoints", str(folder / "step-4"), "--verify"]) == 0
    assert cli.main(["checkpoints", str(tmp_path)]) == 2
    assert "hold checkpoints" in capsys.readouterr().err


def test_the_listing_imports_no_torch(tmp_path):
    write_checkpoint(tmp_path, 2)
    code = (
        "import sys; from titan_rl import cli; "
        f"code = cli.main(['checkpoints', {str(tmp_path)!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
