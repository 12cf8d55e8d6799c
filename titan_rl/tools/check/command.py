"""``titan-rl check``: from a user's file to a table, through one launch of torchrun on this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError, TitanRLError
from titan_rl.titan.architecture import architecture_of
from titan_rl.tools.check.compare import Comparison, compare, render
from titan_rl.tools.check.layouts import REFERENCE, Case, Layout, layouts_of, not_covered
from titan_rl.tools.check.shrink import shrink_config, shrink_model
from titan_rl.tools.check.step import Step
from titan_rl.trainers.checks import check_layout, find_contradictions
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.lora_checks import refuse_lora

_TIMEOUT_SECONDS = 900
_SHOWN_LINES = 30


def run(document: Document, trainer: str, *, config_path: str, overrides: Sequence[str]) -> int:
    """Check a run and print the table.

    Args:
        document: Checked, without its root key ``trainer``.
        trainer: The root key.
        config_path: The file, which the ranks read again.
        overrides: The command line's.

    Returns:
        0 when everything is equal, 1 otherwise.

    Raises:
        ConfigError: the file contradicts itself, or is not one that can be checked.
        TitanRLError: a rank failed.
    """
    if trainer != "rl":
        raise ConfigError(
            "trainer", 'be "rl", the default, to be checked', trainer, "Other trainers are not covered yet."
        )
    config: Any = configure(document, trainer)
    refuse_lora(config, "checked: the small model has no adapters, and all its weights are trained")
    for error in find_contradictions(config, device_type="cuda"):
        raise error
    layouts = sorted(layouts_of(config.parallelism), key=lambda layout: layout.world_size)
    with tempfile.TemporaryDirectory(prefix="titan_rl_check_") as name:
        directory = Path(name)
        shrink_model(config, directory / "model")
        for layout in layouts:
            small = shrink_config(config, layout, directory / "model")
            check_layout(small, world_size=layout.world_size)
        job = {"config": str(Path(config_path).resolve()), "overrides": list(overrides)}
        (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
        _launch(directory, max(layout.world_size for layout in layouts))
        comparisons = compare_all(directory, layouts)
    print(render(comparisons, notes_of(config)))
    return 0 if all(c.is_equal for c in comparisons) else 1


def _launch(directory: Path, world_size: int) -> None:
    """Run the ranks to their end.

    Raises:
        TitanRLError: one failed, or they took too long; with the end of what they printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(world_size), "-m", "titan_rl.tools.check.worker", str(directory / "job.json")]
    environment = os.environ | {
        "TITAN_RL_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    output = directory / "output"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TitanRLError(f"The ranks of the check did not end within {_TIMEOUT_SECONDS} s.") from error
        finally:
            process.terminate()  # torchrun ends its ranks; nothing happens to one that has ended
            process.wait()
    if code:
        shown = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:])
        raise TitanRLError(f"A rank of the check failed. The end of its output:\n{shown}")


def compare_all(directory: Path, layouts: Sequence[Layout]) -> list[Comparison]:
    """Compare every case with the reference.

    Args:
        directory: Where the ranks wrote.
        layouts: In the order of their world sizes.

    Raises:
        TitanRLError: the reference has no gradient, so that nothing could differ.
    """
    cases = [case for layout in layouts for case in layout.cases]
    steps = [_read(directory, number) for number in range(len(cases))]
    expected = steps[cases.index(Case(REFERENCE, ""))]
    if not any(gradient.any() for gradient in expected.gradients.values()):
        raise TitanRLError(
            "All gradients of the reference are zero, so that nothing can be compared. Look at the "
            "coefficients of [loss] and at [advantage]."
        )
    pairs = zip(cases, steps, strict=True)
    return [compare(case, step, expected) for case, step in pairs if case.name != REFERENCE]


def _read(directory: Path, number: int) -> Step:
    losses = json.loads((directory / f"{number}.json").read_text(encoding="utf-8"))
    return Step(losses, load_file(directory / f"{number}.safetensors"))


def notes_of(config: Any) -> list[str]:
    """What was not covered, and why.

    Args:
        config: The user's.
    """
    notes = [
        "weights, lengths and sizes of the run itself: the model is small and random, the rollouts synthetic",
        "CUDA kernels, bf16 and float8: the check computes in fp32 on a CPU",
        "generation, rewards, optimiser and weight sync: the check ends at the gradients",
    ]
    architecture = architecture_of(config.model_spec.model)
    if architecture.has_fused_qkv:
        notes.append("the fused product of queries, keys and values: the small model has three")
    if config.compile.enable:
        notes.append("torch.compile: the check runs without it")
    if config.batching.skip_zero_advantages:
        notes.append("batching.skip_zero_advantages: the check computes every sample")
    if config.sampling.group_size > 4:
        notes.append(f"sampling.group_size = {config.sampling.group_size}: at most 4 here")
    return [*not_covered(config.parallelism), *notes]
