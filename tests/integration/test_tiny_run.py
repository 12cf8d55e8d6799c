"""From nothing to an exported model with the commands that a user types, and the real vLLM."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.integration import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

LARGEST, MEAN = 5e-4, 5e-5  # nats; DESIGN: generator against trainer, fp32
STEPS = 8
VLLM = ("generator.type", "vllm", "generator.kv_cache_gib", 0.125)


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """The run as a user starts it; and one at another temperature, whose export is loaded again."""
    directory = tmp_path_factory.mktemp("tiny")
    common = ("checkpoint.initial_load_path", initial_load_path, *VLLM)
    cool = (
        "training.steps", 4,
        "optimizer.lr", 2e-4,
        "sampling.temperature", 0.5,
        "sampling.max_tokens", 32,
    )  # fmt: skip
    return runs.all_of(
        {
            "command": lambda: runs.torchrun(
                runs.CONFIGS / "grpo.toml", *common, "training.steps", STEPS, folder=directory / "command"
            ),
            "cool": lambda: runs.torchrun(
                runs.CONFIGS / "grpo.toml",
                *common,
                *cool,
                folder=directory / "cool",
                module="tests.integration.exported",
            ),
        }
    )


@pytest.fixture(scope="module")
def command(started: dict[str, runs.Run]) -> runs.Run:
    return started["command"].succeed()


@pytest.fixture(scope="module")
def facts(started: dict[str, runs.Run]) -> dict[str, Any]:
    return started["cool"].succeed().json("facts.json")


@pytest.fixture(scope="module")
def exported(started: dict[str, runs.Run]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(started["cool"].succeed().folder / "export").eval()


def test_pretraining_ends_well_and_leaves_a_checkpoint(pretrained: runs.Run) -> None:
    expected = {"outcome": "done", "step": 30, "cause": None, "requeue": False}
    assert expected.items() <= pretrained.status.items()
    losses = pretrained.metrics()["loss_metrics/global_avg_loss"]
    assert losses[1] > 4  # of 104 tokens
    assert losses[20] < 1.5
    assert (pretrained.folder / "checkpoint" / "step-30" / ".metadata").is_file()


def test_the_run_ends_well_and_the_held_out_score_rises(command: runs.Run) -> None:
    expected = {"outcome": "done", "step": STEPS, "cause": None, "requeue": False}
    assert expected.items() <= command.status.items()
    summary = command.summary
    assert (summary["steps"], summary["policy_version"], summary["num_evaluated"]) == (STEPS, STEPS, 8)
    assert summary["scores"] == {"0": summary["score_before"], str(STEPS): summary["score_after"]}
    assert summary["score_after"] - summary["score_before"] >= 0.5
    assert set(summary["paths"]) == {"rollouts", "metrics", "config", "summary", "checkpoints", "export"}
    assert all(Path(path).exists() for path in summary["paths"].values())
    rewards = command.metrics()["reward/mean"]
    assert rewards[STEPS] > rewards[1] + 0.3
    assert "Traceback" not in command.output()


def test_the_written_configuration_makes_an_equal_one(command: runs.Run, tmp_path: Path) -> None:
    written = command.folder / "config.toml"
    again = tmp_path / "again.toml"
    again.write_text(runs.forked(configuration_of, str(written)))
    assert again.read_text() == written.read_text()
    assert re.search(r'(?m)^type = "vllm"$', written.read_text())
    assert re.search(rf"(?m)^steps = {STEPS}$", written.read_text())


def configuration_of(path: str) -> str:
    """Build the configuration that a file describes, and write it out again."""
    from titan_rl.config.dump import to_toml
    from titan_rl.config.entry import read_checked
    from titan_rl.trainers.configuration import RULES, configure

    return to_toml(configure(*read_checked(path, [])), RULES)


def test_tensorboard_holds_the_documented_metrics_and_no_others(command: runs.Run) -> None:
    documented = documented_metrics()
    assert len(documented) > 40
    metrics = command.metrics()
    assert set(metrics) == documented
    evaluated = {name for name in metrics if name.startswith("evaluation/")}
    for name, values in metrics.items():
        assert sorted(values) == ([0, STEPS] if name in evaluated else list(range(1, STEPS + 1))), name


def documented_metrics() -> set[str]:
    """Names in the first column of the tables of docs/metrics.md, with this run's values filled in."""
    text = (runs.ROOT / "docs" / "metrics.md").read_text().split("## Numbers of some algorithms")[0]
    cells = re.findall(r"(?m)^\| (`.*?) \|", text)
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - {"lr/Adam"}
    parts = {"reward_part/format", "reward_part/exact_match"}
    return names - {"reward_part/<name>", "evaluation/pass_at_<k>"} | parts | {"evaluation/pass_at_1"}


def test_recorded_rollouts_have_the_documented_fields(command: runs.Run) -> None:
    text = (runs.ROOT / "docs" / "running.md").read_text()
    fields = re.findall(r"`([^`]+)`", re.search(r"(?s)One rollout: (.*?)\n\n", text)[1])
    assert len(fields) >= 16
    rollouts = command.rollouts()
    assert sorted(rollouts) == list(range(1, STEPS + 1))
    for number, rows in rollouts.items():
        assert len(rows) == 64
        for row in rows:
            assert list(row) == fields
            assert row["policy_version"] == number - 1
            assert len(row["generator_logprobs"]) == len(row["completion_token_ids"])
            assert row["reward"] == row["reward_parts"]["format"]
    assert [len(rows) for rows in command.rollouts("evaluation").values()] == [8, 8]


@pytest.mark.parametrize(("name", "steps"), [("command", STEPS), ("cool", 4)])
def test_generator_and_trainer_agree_after_each_push(
    started: dict[str, runs.Run], name: str, steps: int
) -> None:
    metrics = started[name].succeed().metrics()
    assert sorted(metrics["loss/mismatch_abs"]) == list(range(1, steps + 1))  # before step 4: three pushes
    assert 0 < max(metrics["loss/mismatch_abs_max"].values()) <= LARGEST
    assert 0 < max(metrics["loss/mismatch_abs"].values()) <= MEAN
    assert 0 < max(metrics["weight_sync/probe_difference"].values()) <= LARGEST


def test_the_reference_kl_is_nought_at_the_first_step_and_grows(command: runs.Run) -> None:
    kl = command.metrics()["loss/reference_kl"]
    assert kl[1] == pytest.approx(0, abs=1e-6)
    assert all(kl[step] > 1e-3 for step in range(2, STEPS + 1))


def test_vllm_gives_the_same_greedy_tokens_from_the_exported_model(facts: dict[str, Any]) -> None:
    before = [c["token_ids"] for c in facts["greedy"]]
    assert {len(token_ids) for token_ids in before} == {32}
    assert len(before) == 64
    assert facts["exported"] == before
    assert len(set(map(tuple, before))) > 16


def test_transformers_gives_the_same_greedy_tokens_from_the_exported_model(
    facts: dict[str, Any], exported: PreTrainedModel
) -> None:
    for prompt, completion in zip(facts["prompts"], facts["greedy"], strict=True):
        logits = logits_of(exported, prompt, completion["token_ids"])
        assert logits.argmax(-1).tolist() == completion["token_ids"]


@pytest.mark.parametrize(("name", "temperature"), [("warm", 1.0), ("cool", 0.5)])
def test_generator_logprobs_are_those_of_transformers_for_the_exported_model(
    facts: dict[str, Any], exported: PreTrainedModel, name: str, temperature: float
) -> None:
    differences = []
    for prompt, completion in zip(facts["prompts"], facts[name], strict=True):
        logits = logits_of(exported, prompt, completion["token_ids"]) / temperature
        chosen = torch.tensor(completion["token_ids"])[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        differences.append((torch.tensor(completion["logprobs"]) - expected).abs())
    assert torch.cat(differences).max() <= LARGEST
    assert torch.cat(differences).mean() <= MEAN


def logits_of(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits that predict each completion token."""
    with torch.no_grad():
        return model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]


def test_the_exported_directory_has_the_tokenizer(command: runs.Run) -> None:
    ours = AutoTokenizer.from_pretrained(command.folder / "export")
    theirs = AutoTokenizer.from_pretrained(runs.ROOT / "titan_rl" / "assets" / "tiny_llama")
    assert ours.encode("12+30=") == theirs.encode("12+30=")
    assert ours.eos_token_id == theirs.eos_token_id
