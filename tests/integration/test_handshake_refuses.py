"""Planted faults in the generator: the run ends, says which, and trains on nothing that came of it.

The first version is pushed soundly and one iteration is trained; the fault comes with the second push.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integration import runs
from tests.integration.faulty import LEFT_OUT, TIED_HEAD

pytestmark = pytest.mark.slow

CAUSES = {
    "nothing_loaded": "does not serve what was delivered",
    "push_not_made": "acknowledged version 0 instead of 1",
    "tensor_left_out": f"1 tensors did not arrive, {LEFT_OUT} among them",
    "tensor_left_out_unnoticed": "were not written, layers.1.feed_forward.w3.weight among them",
    "perturbed": "does not serve what was delivered",
    "perturbed_slightly": "were changed after loading, layers.2.feed_forward.w2.weight among them",
    "older_completions": "come from the weights of version 1 alone; got ((0, 0),)",
}
VLLM_CAUSES = {
    "tied_head_left_out": f"1 parameters of the generator were not written, {TIED_HEAD} among them",
    "tied_head_left_out_unnoticed": "does not serve what was delivered",
    "unseen_row_perturbed": "were changed after loading, model.embed_tokens.weight among them",
}


@pytest.fixture(scope="module")
def refused(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("faults")
    faults = [("FaultyLocal", fault) for fault in CAUSES]
    if importlib.util.find_spec("vllm") is not None:
        faults += [("FaultyVllm", fault) for fault in VLLM_CAUSES]
    started = {
        fault: lambda generator=generator, fault=fault: runs.start(
            runs.CONFIGS / "grpo.toml",
            "checkpoint.initial_load_path", initial_load_path,
            "training.steps", 3,
            "evaluation.num_prompts", 1,
            "generator.type", f"tests.integration.faulty:{generator}",
            "generator.fault", fault,
            folder=directory / fault,
        )
        for generator, fault in faults
    }  # fmt: skip
    return runs.all_of(started)


@pytest.mark.parametrize("fault", [*CAUSES, *VLLM_CAUSES])
def test_a_fault_ends_the_run_before_anything_is_trained_on_it(
    refused: dict[str, runs.Run], fault: str
) -> None:
    if fault not in refused:
        pytest.skip("vLLM is not installed")
    run = refused[fault]
    assert run.wait() == [1], run.tail()
    cause = (CAUSES | VLLM_CAUSES)[fault]
    assert run.status["outcome"] == "failed"
    assert cause in run.status["cause"]
    assert cause in run.output()
    assert "Traceback" not in run.output()
    # One sound iteration, then nothing: no rollouts of the second version, no further step, no checkpoint.
    assert run.status["step"] == 1
    assert {number: {r["policy_version"] for r in rows} for number, rows in run.rollouts().items()} == {
        1: {0}
    }
    assert not list(run.folder.glob("checkpoint/step-*"))
    assert not (run.folder / "export").exists()


def test_without_a_fault_the_same_generator_trains(initial_load_path: Path, tmp_path: Path) -> None:
    run = runs.start(
        runs.CONFIGS / "grpo.toml",
        "checkpoint.initial_load_path", initial_load_path,
        "training.steps", 2,
        "evaluation.num_prompts", 1,
        "generator.type", "tests.integration.faulty:FaultyLocal",
        "generator.from_version", 9,
        folder=tmp_path / "sound",
    )  # fmt: skip
    assert run.succeed().status["step"] == 2
