"""What the train command says to bad input: exit code 2 and one line that names place, value and remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan_rl import evaluate, train
from titan_rl.trainers.rl import RLTrainer

TINY = Path(__file__).parents[2] / "titan_rl" / "assets" / "tiny_llama"

RL = """\
dump_folder = "{dump}"

[model]
hf_assets_path = "{model}"
allow_random_init = true

[data]
prompts_per_iteration = 4
max_prompt_tokens = 16

[data.source]
type = "arithmetic"
minimum = 1
maximum = 20
num_held_out = 10
template = "{{a}}+{{b}}="

[[reward]]
type = "exact_match"

[sampling]
group_size = 2
max_tokens = 4

[generator]
type = "local"

[training]
steps = 2
seq_len = 64
"""

SUPERVISED = """\
trainer = "supervised"
dump_folder = "{dump}"

[model]
hf_assets_path = "{model}"

[training]
steps = 2
local_batch_size = 4
global_batch_size = 6
seq_len = 64
"""

WITHOUT_TORCH = """
import contextlib, io, json, sys
from titan_rl.train import main

answers = []
for arguments in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main(arguments)
    answers.append([code, errors.getvalue()])
print(json.dumps({"answers": answers, "torch": "torch" in sys.modules}))
"""


@pytest.fixture
def write(tmp_path):
    """Write a TOML file that dumps to tmp_path/dump; returns its path."""

    def write_file(text, *, model=TINY):
        path = tmp_path / "run.toml"
        path.write_text(text.format(dump=tmp_path / "dump", model=model), encoding="utf-8")
        return str(path)

    return write_file


@pytest.fixture
def launched(monkeypatch):
    """The environment of the only rank of a launch by torchrun."""
    # Log handlers would outlive the test, with the standard error of the test.
    monkeypatch.setattr("titan_rl.trainers.session.init_logger", lambda: None)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)


def refusal(capsys, arguments):
    """The one line of standard error of a command that must be refused."""
    capsys.readouterr()
    assert train.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "ConfigError" in line]
    assert len(lines) == 1, lines
    return lines[0]


# ----------------------------------------------------------------------------------- before torch


def test_mistakes_in_file_and_launch_are_refused_without_torch(tmp_path, write):
    good = write(RL)
    malformed = tmp_path / "malformed.toml"
    malformed.write_text("[training]\nsteps = 2\nseq_len == 64\n", encoding="utf-8")
    misspelt = tmp_path / "misspelt.toml"
    misspelt.write_text("[sampling]\ngroup_size = 4\ntemprature = 0.5\n", encoding="utf-8")
    wrong_type = tmp_path / "wrong_type.toml"
    wrong_type.write_text('[training]\nsteps = "many"\n', encoding="utf-8")
    expected = [
        ([str(tmp_path / "no.toml")], ["no.toml", "must be a file that can be read", "No such file"]),
        ([str(malformed)], ["malformed.toml:3", "must be valid TOML", "seq_len == 64"]),
        (
            [str(misspelt)],
            ["misspelt.toml:3: sampling.temprature", "got 0.5", "Did you mean 'temperature'?"],
        ),
        ([str(wrong_type)], ["wrong_type.toml:2: training.steps", "an integer >= 1", "'many'", "100"]),
        ([good, "--training.stps", "5"], ["command line: training.stps", "Did you mean 'steps'?"]),
        ([good, "--trainer", "ppo"], ["trainer", "must be one of rl, supervised", "'ppo'"]),
        (
            [good, "--algorithm.type", "pqo"],
            ["command line: algorithm.type", "be one of", "'pqo'", "Did you mean 'ppo'?"],
        ),
        (
            [good, "--algorithm.type", "ppo", "--advantage.lambda_policy", "1.5"],
            ["command line: advantage.lambda_policy", "a number >= 0 and <= 1", "got 1.5"],
        ),
        (
            [good, "--algorithm.type", "ppo", "--advantage.normalise_std", "true"],
            ["command line: advantage.normalise_std", 'a key of [advantage] of type "gae"'],
        ),
        ([good], ["be started by torchrun", "no RANK", "torchrun --standalone", "-m titan_rl.train"]),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([arguments for arguments, _ in expected])]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(run.stdout)
    for (code, error), (arguments, parts) in zip(result["answers"], expected, strict=True):
        assert code == 2, arguments
        assert error.count("\n") == 1, error
        assert error.startswith("ConfigError: ")
        assert [part for part in parts if part not in error] == [], error
    assert result["torch"] is False
    assert not (tmp_path / "dump").exists()


def test_without_arguments_the_usage_is_shown_and_it_is_a_mistake(capsys):
    assert train.main([]) == 2
    assert "torchrun [...] -m titan_rl.train CONFIG.toml" in capsys.readouterr().out
    assert train.main(["--help"]) == 0


def test_an_evaluation_wants_the_file_of_an_rl_run_and_names_its_own_command(capsys, write, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert evaluate.main([write(SUPERVISED)]) == 2
    assert "trainer must be rl for an evaluation; got 'supervised'" in capsys.readouterr().err
    assert evaluate.main([write(RL)]) == 2
    assert "-m titan_rl.evaluate CONFIG.toml" in capsys.readouterr().err


# ------------------------------------------------------------------------------- before a process group


def test_an_unsupported_architecture_is_refused_by_name(capsys, launched, write, tmp_path):
    model = tmp_path / "gpt2"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}), encoding="utf-8")
    error = refusal(capsys, [write(RL, model=model)])
    assert f"{model / 'config.json'}: architectures" in error
    assert "GPT2LMHeadModel" in error
    assert "LlamaForCausalLM" in error
    assert not (tmp_path / "dump").exists()


def test_a_missing_model_directory_is_refused_with_its_line(capsys, launched, write, tmp_path):
    error = refusal(capsys, [write(RL, model=tmp_path / "nowhere")])
    assert "run.toml:4: model.hf_assets_path" in error
    assert str(tmp_path / "nowhere") in error
    assert not (tmp_path / "dump").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(capsys, launched, write, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 64}), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((TINY / name).read_text(encoding="utf-8"), encoding="utf-8")
    error = refusal(capsys, [write(RL, model=model)])
    assert "run.toml:4: model.hf_assets_path" in error
    assert "at most 64 tokens" in error
    assert "got 104" in error


CONTRADICTIONS = {
    "a sample longer than the context": (
        ["--training.seq_len", "19"],
        ["command line: training.seq_len", "= 20;", "got 19", "Set training.seq_len = 20"],
    ),
    "a prompt longer than its limit": (
        ["--data.max_prompt_tokens", "3"],
        ["Every prompt of arithmetic", "max_prompt_tokens = 3", "up to 9 tokens", "Raise max_prompt_tokens"],
    ),
    "steps that do not divide": (
        ["--training.steps", "3", "--algorithm.steps_per_iteration", "2"],
        ["training.steps", "multiple of algorithm.steps_per_iteration = 2", "got 3"],
    ),
    "a batch that has no meaning in RL": (
        ["--training.global_batch_size", "8"],
        ["training.global_batch_size", "got 8", "Set data.prompts_per_iteration"],
    ),
    "tensor parallelism": (
        ["--parallelism.tensor_parallel_degree", "2"],
        ["command line: parallelism.tensor_parallel_degree", "divide the 1 rank(s)", "got 2", "Start 2 or 4"],
    ),
    "more shards than ranks": (
        ["--parallelism.data_parallel_shard_degree", "4"],
        ["parallelism.data_parallel_shard_degree", "make 1 rank(s) when multiplied", "got 4", "leave it out"],
    ),
    "a truncated distribution": (
        ["--sampling.top_p", "0.9"],
        ["sampling.top_p", "be 1.0 in training", "got 0.9"],
    ),
    "no reward": (
        ["--reward", "[]"],
        ["[[reward]]", "at least once", "Add one reward"],
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_before_any_process_group(name, capsys, launched, write, tmp_path):
    overrides, parts = CONTRADICTIONS[name]
    error = refusal(capsys, [write(RL), *overrides])
    assert [part for part in parts if part not in error] == [], error
    assert_only_whole_files(tmp_path / "dump", error)


def test_a_supervised_batch_that_does_not_divide_is_refused(capsys, launched, write, tmp_path):
    error = refusal(capsys, [write(SUPERVISED)])
    assert "run.toml:10: training.global_batch_size must be a multiple of 4" in error
    assert "got 6. Set 8" in error
    assert_only_whole_files(tmp_path / "dump", error)


def test_a_checkpoint_that_cannot_be_read_leaves_a_status_with_a_cause_of_one_line(
    capsys, launched, write, tmp_path, monkeypatch
):
    def restore(self, config):
        failure = RuntimeError("Missing key in checkpoint state_dict: lm_head.weight.\nmore of it")
        raise CheckpointException("load", {0: (failure, None)})  # no Exception: see its class

    monkeypatch.setattr(RLTrainer, "__init__", restore)
    assert train.main([write(RL)]) == 1
    status = json.loads((tmp_path / "dump" / "status.json").read_text(encoding="utf-8"))
    cause = "CheckpointException: rank 0: RuntimeError: Missing key in checkpoint state_dict: lm_head.weight."
    assert (status["outcome"], status["cause"]) == ("failed", cause)
    assert f"[rank 0] {cause}\n" in capsys.readouterr().err


def assert_only_whole_files(folder, error):
    """The folder holds the resolved configuration and a status with the cause, and nothing else."""
    assert not dist.is_initialized()
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "status.json"]
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert status["outcome"] == "failed"
    assert status["cause"] in error
