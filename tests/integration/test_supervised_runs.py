"""SFT as a user starts it: conversations from a file, held-out scores, resume, ranks, and the export.

Losses are compared within 1e-4: ranks and rows add up in another order, and eight steps amplify it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration import runs
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.jsonl import Jsonl

pytestmark = pytest.mark.slow

TOLERANCE, STEPS = 1e-4, 8
TINY = runs.ROOT / "titan_rl" / "assets" / "tiny_llama"


def write_config(directory: Path) -> Path:
    """Two-turn conversations about the sums of 5 to 9; a quarter of the prompts is held out."""
    rows = []
    for a in range(5, 10):
        for b in range(5, 10):
            total = str(a + b)
            turns = [("user", f"{a}+{b}="), ("assistant", total), ("user", f"{b}+{a}="), ("assistant", total)]
            rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    path = directory / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = directory / "sft.toml"
    config.write_text(
        f"""base = "{runs.ROOT / "train_configs" / "tiny_pretrain.toml"}"
[[data.mixture]]
source = {{ type = "jsonl", path = "{path}", conversation_column = "messages", held_out_fraction = 0.25 }}
[training]
steps = {STEPS}
seq_len = 64
local_batch_size = 2
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
decay_ratio = 0.0
[checkpoint]
interval = 4
[validation]
interval_steps = 4
"""
    )
    return config


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("sft")
    config = write_config(directory)
    common = ("checkpoint.initial_load_path", initial_load_path)
    first = runs.all_of(
        {
            "whole": lambda: runs.start(config, *common, folder=directory / "whole"),
            "half": lambda: runs.start(config, *common, "training.steps", 4, folder=directory / "run"),
        }
    )
    first["half"].succeed()
    second = runs.all_of(
        {
            "resumed": lambda: runs.start(config, *common, folder=directory / "run"),
            "two_ranks": lambda: runs.start(
                config, *common, "training.local_batch_size", 1, folder=directory / "two", ranks=2
            ),
        }
    )
    return {name: run.succeed() for name, run in (first | second).items()}


def validation(run: runs.Run) -> dict[int, dict[str, float]]:
    return {int(step): metrics for step, metrics in run.json("validation.json")["steps"].items()}


def test_the_held_out_loss_falls_and_is_logged(started):
    whole = validation(started["whole"])
    assert list(whole) == [0, 4, 8]
    assert whole[8]["loss"] < 0.8 * whole[0]["loss"]
    logged = started["whole"].metrics()
    for name in ("loss", "token_accuracy", "document_accuracy"):
        assert logged[f"validation/{name}"] == pytest.approx({s: m[name] for s, m in whole.items()}, rel=1e-6)


def test_held_out_scores_equal_those_of_transformers_on_the_export(started):
    run = started["whole"]
    config = Jsonl.Config(
        path=str(run.folder.parent / "chats.jsonl"), conversation_column="messages", held_out_fraction=0.25
    )
    prompts = Jsonl(config, "held_out")
    encoder = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=64)
    model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32)
    loss, right, count, documents = 0.0, 0, 0, []
    for index in range(len(prompts)):
        ((ids, trained),) = encoder.encode_conversation(prompts[index])
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [place for place, is_trained in enumerate(trained) if is_trained]
        hits = [int(logs[place - 1].argmax()) == ids[place] for place in places]
        loss -= sum(float(logs[place - 1, ids[place]]) for place in places)
        right, count, documents = right + sum(hits), count + len(hits), [*documents, all(hits)]
    assert 3 <= len(documents) == run.json("validation.json")["num_documents"]
    last = validation(run)[STEPS]
    assert last["loss"] == pytest.approx(loss / count, rel=TOLERANCE)
    assert last["token_accuracy"] == pytest.approx(right / count, abs=1e-9)
    assert last["document_accuracy"] == pytest.approx(sum(documents) / len(documents), abs=1e-9)


@pytest.mark.parametrize("other", ["resumed", "two_ranks"])
def test_a_resumed_run_and_two_ranks_reach_the_same_held_out_scores(started, other):
    expected, got = validation(started["whole"]), validation(started[other])
    assert got.keys() == expected.keys()
    for step, metrics in expected.items():
        assert got[step]["loss"] == pytest.approx(metrics["loss"], rel=TOLERANCE), step
        assert math.isclose(got[step]["token_accuracy"], metrics["token_accuracy"], abs_tol=0.05)
    assert started["resumed"].output().count("step 0  held out") == 1  # of the first start alone
