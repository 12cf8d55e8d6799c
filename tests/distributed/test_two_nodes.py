"""Two torchrun agents with two ranks each, as on two machines that share a file system.

Tensor parallelism within each node, FSDP across; a vLLM of two ranks on each where there is one. The same
layout under one agent gives the same bits, and one rank the same first step.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = [pytest.mark.slow, pytest.mark.scale]

STEPS, PROMPTS, GROUP_SIZE = 3, 8, 8
LAYOUT = ("parallelism.tensor_parallel_degree", 2, "parallelism.data_parallel_shard_degree", 2)
VLLM = ("generator.type", "vllm", "generator.kv_cache_gib", 0.125)
HAS_VLLM = importlib.util.find_spec("vllm") is not None
GENERATOR = VLLM if HAS_VLLM else ()
OVER_TWO = ("generator.tensor_parallel_degree", 2) if HAS_VLLM else ()


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("nodes")
    common = ("checkpoint.initial_load_path", initial_load_path, "training.steps", STEPS, *GENERATOR)
    config = runs.CONFIGS / "grpo.toml"

    def folder(name: str) -> Path:
        return directory / name

    two = runs.torchrun(config, *common, *LAYOUT, *OVER_TWO, folder=folder("two"), ranks=2, nodes=2)
    two.succeed()
    one = runs.start(config, *common, *LAYOUT, *OVER_TWO, folder=folder("one"), ranks=4).succeed()
    alone = runs.start(config, *common, folder=folder("alone")).succeed()
    return {"two nodes": two, "one node": one, "one rank": alone}


def test_both_nodes_end_well_and_one_rank_of_them_wrote_the_files(started: dict[str, runs.Run]) -> None:
    run = started["two nodes"]
    assert run.wait() == [0, 0]  # both agents
    assert (run.status["outcome"], run.status["step"]) == ("done", STEPS)
    assert not (run.folder / ".lock").exists()
    (events,) = (run.folder / "tb").iterdir()
    assert len(list(events.iterdir())) == 1
    assert run.output().count(f"Done: {STEPS} steps") == 1


def test_each_data_parallel_rank_has_its_share_of_the_prompts_on_a_node_of_its_own(
    started: dict[str, runs.Run],
) -> None:
    for iteration in range(1, STEPS + 1):
        files = sorted((started["two nodes"].folder / "rollouts").glob(f"train-{iteration:06d}.rank-*.jsonl"))
        rows = [runs.read_lines(file) for file in files]
        # Ranks 1 and 3 train on the rows of 0 and 2: their files are empty.
        assert [len(part) for part in rows] == [PROMPTS * GROUP_SIZE // 2, 0, PROMPTS * GROUP_SIZE // 2, 0]
        assert not {r["prompt_index"] for r in rows[0]} & {r["prompt_index"] for r in rows[2]}


def test_two_nodes_end_with_the_bits_of_one_node(started: dict[str, runs.Run]) -> None:
    two, one = started["two nodes"], started["one node"]
    assert two.rollouts() == one.rollouts()
    assert two.rollouts("evaluation") == one.rollouts("evaluation")
    mine, expected = two.metrics(), one.metrics()
    for name in ("loss/loss", "grad_norm", "loss/reference_kl", "loss/mismatch_abs", "policy_version"):
        assert mine[name] == expected[name]
    assert min(mine["grad_norm"].values()) > 0.1
    assert weights(two) == weights(one)


def test_two_nodes_take_the_first_step_of_one_rank(started: dict[str, runs.Run]) -> None:
    two, alone = started["two nodes"], started["one rank"]
    assert drawn(two) == drawn(alone)
    mine, expected = two.metrics(), alone.metrics()
    for name in ("grad_norm", "reward/mean", "reward/std", "rollout/completion_tokens"):
        assert mine[name][1] == pytest.approx(expected[name][1], rel=1e-5, abs=1e-7)
    # Advantages cancel: the loss is a small sum of terms of their size.
    size = expected["loss/advantage_abs"][1]
    assert size > 0.1
    assert mine["loss/loss"][1] == pytest.approx(expected["loss/loss"][1], rel=0, abs=1e-6 * size)
    assert mine["evaluation/score"][0] == expected["evaluation/score"][0]


def drawn(run: runs.Run) -> dict[tuple[int, str, int, int], list[int]]:
    """Completions of the first iteration, by prompt, sample and seed."""
    keys = ("prompt_index", "prompt_id", "sample_index", "seed")
    return {tuple(r[k] for k in keys): r["completion_token_ids"] for r in run.rollouts()[1]}


def weights(run: runs.Run) -> bytes:
    return (run.folder / "export" / "model.safetensors").read_bytes()
