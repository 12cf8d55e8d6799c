"""titan_rl against TRL's ``GRPOTrainer`` and against a plain loop, on the same work.

    make setup && benchmarks/trl/setup.sh
    python -m benchmarks.against_trl outputs/against_trl

For every workload: the model and the prompts are written, TRL's candidate flags are tried on three steps and
the fastest kept, then all sides run in turn, ``--rounds`` times, each in a process of its own on the same
cores. Ratios are of medians over the steps 2 to n of all rounds; start-up is not in them. Before any ratio
the work is compared (:func:`benchmarks.trl.results.faults`). Results: ``results.json`` and ``results.md`` in
the the folder. A run that is done is not repeated, so the command may be interrupted and given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.trl import results
from benchmarks.trl.flags import CANDIDATES
from benchmarks.trl.models import write_model
from benchmarks.trl.results import OURS, PLAIN
from benchmarks.trl.workloads import SMOLLM2, WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
TRL = "TRL, generate"


class Launcher:
    """Starts the sides' commands and gives what they measured."""

    def __init__(self, folder: Path, *, trl_python: Path, threads: int) -> None:
        self._folder, self._trl_python = folder, trl_python
        self._environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "TITAN_RL_DEVICE": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }

    def titan(self, workload: Path, name: str) -> list[results.Step]:
        """A run of titan_rl."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command = [*torchrun, "-m", "benchmarks.trl.run_titan", str(workload), self._steps(name), str(folder)]
        return self._run(command, name)

    def plain(self, workload: Path, name: str) -> list[results.Step]:
        """A run of the plain loop."""
        return self._run(
            [sys.executable, "-m", "benchmarks.plain_loop", str(workload), self._steps(name)], name
        )

    def trl(
        self, workload: Path, name: str, flags: dict[str, Any], *, timeout: float = 3600.0
    ) -> list[results.Step]:
        """A run of TRL, which may be given up after some seconds."""
        command = [str(self._trl_python), "-m", "benchmarks.trl.run_trl", str(workload), self._steps(name)]
        return self._run([*command, str(self._folder / name), json.dumps(flags)], name, timeout=timeout)

    def _steps(self, name: str) -> str:
        return str(self._folder / f"{name}.partial.jsonl")

    def _run(self, command: Sequence[str], name: str, *, timeout: float = 3600.0) -> list[results.Step]:
        done = self._folder / f"{name}.jsonl"
        if done.exists():
            return results.read_steps(done)
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise RuntimeError(f"{name} took more than {timeout:g} s ({log})") from None
        if code:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"{name} ended with exit code {code}: {lines[-1] if lines else ''} ({log})")
        Path(self._steps(name)).rename(done)
        return results.read_steps(done)


def measure(
    workload: Workload, folder: Path, launcher: Launcher, options: argparse.Namespace
) -> dict[str, Any]:
    """Run all sides of a workload in turn.

    Returns:
        Workload, flags that were tried and chosen, and the steps by side.
    """
    model = ROOT / SMOLLM2 if workload.shape is None else write_model(workload.shape, folder / "model")
    path = workload.write(folder, model)
    tried, flags = _choose(workload, folder, model, launcher=launcher, options=options)
    sides = {
        OURS: lambda name: launcher.titan(path, name),
        TRL: lambda name: launcher.trl(path, name, flags),
        PLAIN: lambda name: launcher.plain(path, name),
    }
    runs: dict[str, list[list[results.Step]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, start in sides.items():
            slug = name.split(",")[0].replace(" ", "_")
            runs[name].append(start(f"{slug}-{number}"))
            seconds = results.figures(runs[name][-1:], clock=options.clock)["seconds"]
            print(f"{workload.name}: {name}, round {number + 1}: {seconds:.2f} s a step", flush=True)
    return {"workload": json.loads(path.read_text()), "tried": tried, "flags": flags, "sides": runs}


def _choose(
    workload: Workload, folder: Path, model: Path, *, launcher: Launcher, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Try TRL's candidates on three steps: seconds a step or the error of each, and the fastest's flags.

    A single candidate is taken as it is.
    """
    if len(options.candidates) == 1:
        return {}, CANDIDATES[options.candidates[0]]
    short = dataclasses.replace(workload, steps=3).write(folder / "tries", model)
    tried: dict[str, Any] = {}
    for number, name in enumerate(options.candidates):
        try:
            steps = launcher.trl(short, f"try-{number}", CANDIDATES[name], timeout=options.try_seconds)
            tried[name] = results.figures([steps], clock=options.clock)["seconds"]
        except RuntimeError as error:
            tried[name] = str(error)
        print(f"{workload.name}: tried {name}: {tried[name]}", flush=True)
    worked = {name: seconds for name, seconds in tried.items() if not isinstance(seconds, str)}
    if not worked:
        raise RuntimeError(f"TRL must run with at least one of its candidates; got {tried}.")
    return tried, CANDIDATES[min(worked, key=lambda name: worked[name])]


def report(measured: Sequence[dict[str, Any]], *, about: str, clock: str) -> str:
    """All workloads as Markdown.

    Args:
        measured: From :func:`measure`.
        about: What was run, where, with which versions.
        clock: As for :func:`benchmarks.trl.results.figures`.
    """
    lines = ["# titan_rl against TRL and a plain loop", "", about]
    for content in measured:
        spec, sides = content["workload"], content["sides"]
        shares = results.stages(sides[OURS])
        lines += [
            "",
            f"## {spec['name']}",
            "",
            f"{spec['prompts']} prompts x {spec['group_size']} completions a step of at most "
            f"{spec['max_tokens']} tokens, {spec['steps'] - 1} steps counted in each run.",
            "",
            results.table(sides, clock=clock),
            "",
            "titan_rl's step: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) + ".",
            f"TRL's flags beside those of the work: `{json.dumps(content['flags'])}`"
            + "".join(f"; tried, {name}: {_short(value)}" for name, value in content["tried"].items())
            + ".",
        ]
        wrong = results.faults(spec, sides)
        lines += ["", "**Not the same work:** " + "; ".join(wrong) + "."] if wrong else []
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return f"{value:.2f} s a step" if isinstance(value, float) else f"failed ({value})"


def _about(options: argparse.Namespace) -> str:
    script = "from importlib.metadata import version; print(version('trl'))"
    trl = subprocess.run([options.trl_python, "-c", script], capture_output=True, text=True, check=True)
    libraries = [f"{name} {version(name)}" for name in ("torch", "torchtitan", "transformers", "vllm-cpu")]
    kind = "wall-clock" if options.clock == "seconds" else "CPU"
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {options.cores} core(s) for every side, "
        f"{options.rounds} round(s), {kind} time; TRL {trl.stdout.strip()}, {', '.join(libraries)}."
    )


def main() -> None:
    """Measure what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs and results")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--candidates", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--try-seconds", type=float, default=300.0, help="after which one is given up")
    parser.add_argument("--rounds", type=int, default=2, help="times that every side runs")
    parser.add_argument("--cores", type=int, default=1, help="cores and threads of every side")
    parser.add_argument(
        "--clock", choices=("seconds", "cpu_seconds"), default="seconds", help="of the tables"
    )
    parser.add_argument("--trl-python", type=Path, default=ROOT / "outputs" / "trl-venv" / "bin" / "python")
    options = parser.parse_args()
    if not options.trl_python.exists():
        sys.exit(
            f"--trl-python must be TRL's interpreter; got {options.trl_python}. Run benchmarks/trl/setup.sh."
        )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    measured = []
    for name in options.only:
        folder = (options.folder / name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        launcher = Launcher(folder, trl_python=options.trl_python.absolute(), threads=options.cores)
        measured.append(measure(WORKLOADS[name], folder, launcher, options))
    (options.folder / "results.json").write_text(json.dumps(measured) + "\n")
    text = report(measured, about=_about(options), clock=options.clock)
    (options.folder / "results.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
