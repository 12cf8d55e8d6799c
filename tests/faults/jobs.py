"""Starts for the fault tests, and what has to hold after each of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration import runs
from titan_rl.resilience import shelf, signals
from titan_rl.resilience.faults import VARIABLE

CONFIGS = Path(__file__).parent / "configs"
PLANTED = "tests.faults.planted:PlantedLocal"
DEADLINE_SECONDS = 240


def start(
    folder: Path,
    *overrides: object,
    ranks: int = 1,
    config: str = "grpo",
    faults: str = "",
    **planted: object,
) -> runs.Run:
    """Start a run in forked processes.

    Args:
        folder: Its ``dump_folder``.
        overrides: ``"section.key", value`` pairs.
        ranks: Number of processes.
        config: Name of a file in ``configs/``.
        faults: ``TITAN_RL_FAULT``.
        planted: Keys of :class:`tests.faults.planted.PlantedLocal`.
    """
    return runs.start(
        CONFIGS / f"{config}.toml",
        *_with(planted),
        *overrides,
        folder=folder,
        ranks=ranks,
        environment={VARIABLE: faults},
    )


def torchrun(
    folder: Path, *overrides: object, ranks: int = 1, restarts: int = 0, **planted: object
) -> runs.Run:
    """Start a run with the command that a user types."""
    pairs = (*_with(planted), *overrides)
    return runs.torchrun(CONFIGS / "grpo.toml", *pairs, folder=folder, ranks=ranks, restarts=restarts)


def stopped_in_evaluation(arguments: list[str], step: int, rank: int) -> int:
    """One rank of a run without a generator to plant faults with; rank 1 is signalled when it evaluates."""
    train = sys.modules["titan_rl.train"]
    owners = {
        sys.modules["titan_rl.trainers.held_out"].HeldOutValidator: "validate",
        sys.modules["titan_rl.trainers.pair_trainer"].PairTrainer: "evaluate",
    }
    for owner, name in owners.items():
        if rank == 1:
            setattr(owner, name, _signalled(getattr(owner, name), step))
    return train.main(arguments)


def _signalled(original: Callable[..., Any], step: int) -> Callable[..., Any]:
    def replaced(self: Any, *arguments: Any) -> Any:
        at, folder = (arguments[1], self.config.folder) if arguments else (self.step, self.config.dump_folder)
        witness = Path(folder) / "planted"
        if at == step and not witness.exists():
            witness.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the evaluation may take less than the thread that hears the signal
        return original(self, *arguments)

    return replaced


def rank(arguments: list[str]) -> None:
    """One rank of :mod:`tests.faults.warm_agent`, in its forked process."""
    code = sys.modules["titan_rl.train"].main(arguments)
    signals.stop_listening()  # a function that is done waits for the other ranks, and may be ended then
    if code:
        sys.exit(code)


def _with(planted: dict[str, object]) -> list[object]:
    pairs = [part for key, value in planted.items() for part in (f"generator.{key}", value)]
    return ["generator.type", PLANTED, *pairs] if planted else []


def wait_until(run: runs.Run, condition: Callable[[], object]) -> None:
    """Wait for something that a run does, and fail with its log if it ends before."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert any(is_running(process) for process in run.processes), run.tail()
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.02)


def is_running(process: object) -> bool:
    return process.poll() is None if hasattr(process, "poll") else process.is_alive()


def complete_steps(run: runs.Run) -> list[int]:
    """Steps of the complete checkpoints, in the order in which they were written."""
    return [manifest.step for _, manifest in shelf.complete(shelf.entries(run.folder / "checkpoint"))]


def leftovers(run: runs.Run) -> list[str]:
    """What an unfinished save or removal left among the checkpoints, or a partial file in the folder."""
    names = [path.name for path in (run.folder / "checkpoint").glob("*") if not path.name.startswith("step-")]
    partial = [str(path) for path in run.folder.rglob("*.partial*")]
    hashes = [str(path) for path in run.folder.rglob(".hashes-*")]
    return [name for name in names if name != shelf.FAILURES] + partial + hashes


def children_of(pid: int) -> set[int]:
    """Process ids of all descendants."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            child = int(path.parent.name)
            found |= {child} | children_of(child)
    return found


def remaining(pids: set[int]) -> set[int]:
    """Those that still run after two seconds in which they may end; zombies have ended."""
    deadline = time.monotonic() + 2.0
    while alive := {pid for pid in pids if _is_alive(pid)}:
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.05)
    return set()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def weights(run: runs.Run) -> bytes:
    """The exported model."""
    return (run.folder / "export" / "model.safetensors").read_bytes()


def journal(run: runs.Run) -> dict[str, object]:
    """What a run did, without what depends on when and where: to be equal for equal runs."""
    kinds = ("train", "evaluation")
    return {"scores": run.summary["scores"], "weights": weights(run)} | {k: run.rollouts(k) for k in kinds}
