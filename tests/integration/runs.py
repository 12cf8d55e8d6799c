"""Runs of the real command lines, for the tests that look at what a run leaves behind.

Importing torch and TorchTitan takes ten seconds, a tiny run one or two. Most runs are therefore forked from a
process that has imported both (:func:`start`): each is a new process with the environment that torchrun would
give to its rank. :func:`torchrun` starts the command that a user types.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
PRELOAD = [
    "titan_rl.train",
    "titan_rl.evaluate",
    "titan_rl.trainers.configuration",
    "titan_rl.trainers.session",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TITAN_RL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(slots=True)
class Run:
    """A started run and what it leaves in its directory."""

    folder: Path
    log: Path
    processes: list[Any] = field(default_factory=list)

    def wait(self, timeout: float = 600.0) -> list[int]:
        """Exit code of each process; a process that is still there at the deadline is killed."""
        end = time.monotonic() + timeout
        codes = []
        for process in self.processes:
            if isinstance(process, subprocess.Popen):
                try:
                    codes.append(process.wait(max(end - time.monotonic(), 0.1)))
                except subprocess.TimeoutExpired:
                    _kill_group(process)
                    raise
            else:
                process.join(max(end - time.monotonic(), 0.1))
                if process.exitcode is None:
                    process.kill()
                    raise TimeoutError(f"{self.folder}: still running; {self.tail()}")
                codes.append(process.exitcode)
        return codes

    def succeed(self, timeout: float = 600.0) -> Run:
        """Wait, and expect exit code 0 of every rank."""
        codes = self.wait(timeout)
        assert not any(codes), f"exit codes {codes}\n{self.tail()}"
        return self

    def tail(self) -> str:
        return self.output()[-5000:]

    def output(self) -> str:
        """All that the run printed."""
        return self.log.read_text(errors="replace")

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    @property
    def status(self) -> dict[str, Any]:
        return self.json("status.json")

    @property
    def summary(self) -> dict[str, Any]:
        return self.json("summary.json")

    def rollouts(self, kind: str = "train") -> dict[int, list[dict[str, Any]]]:
        """Recorded rollouts by iteration (``train``) or step (``evaluation``), of all ranks."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self.folder / "rollouts").glob(f"{kind}-*.jsonl")):
            number = int(path.name.split("-")[1].split(".")[0])
            found.setdefault(number, []).extend(read_lines(path))
        return found

    def metrics(self) -> dict[str, dict[int, float]]:
        """TensorBoard's scalars: by tag, by step."""
        scalars: dict[str, dict[int, float]] = {}
        for file in sorted((self.folder / "tb").rglob("events*")):
            events = EventAccumulator(str(file)).Reload()
            for tag in events.Tags()["scalars"]:
                scalars.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
        return scalars


def existing(folder: Path) -> Run:
    """A run that has ended, from what it left."""
    return Run(folder, _log(folder))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def warm_up() -> None:
    """Let the process that others are forked from do its imports now."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a function of a module, called in a forked process: the caller imports no torch."""
    warm_up()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, arguments)


def all_of(starts: Mapping[str, Callable[[], Run]]) -> dict[str, Run]:
    """Start runs and wait for all of them.

    The suite has two cores: no more than two runs are under way, or one while another worker of pytest-xdist
    has its own.
    """
    with ThreadPoolExecutor(1 if _num_workers() > 1 else 2) as pool:
        return dict(zip(starts, pool.map(_start_and_wait, starts.values()), strict=True))


def _start_and_wait(start_one: Callable[[], Run]) -> Run:
    run = start_one()
    run.wait()
    return run


def start(
    config: Path,
    *overrides: object,
    folder: Path,
    ranks: int = 1,
    module: str = "titan_rl.train",
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Start a run in forked processes, one per rank.

    Args:
        config: The TOML file.
        overrides: ``"section.key", value`` pairs, as on the command line.
        folder: The run's ``dump_folder``.
        ranks: Number of processes.
        module: ``titan_rl.train`` or ``titan_rl.evaluate``.
        environment: What the ranks find in theirs besides.
    """
    given = arguments(config, overrides, folder)
    return fork(_main, module, given, folder=folder, ranks=ranks, environment=environment)


def fork(
    function: Callable[..., int | None],
    *arguments: Any,
    folder: Path,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Call a function in forked processes with the environment that torchrun would give to a rank.

    Args:
        function: Of a module; returns an exit code, or None for 0. Gets the rank as its last argument.
        arguments: What it gets before that; pickled.
        folder: What :class:`Run` holds; the log stands beside it.
        ranks: Number of processes.
        environment: What they find in theirs besides.
    """
    context = multiprocessing.get_context("forkserver")
    warm_up()
    run = Run(folder, _log(folder))
    port = free_port()
    for rank in range(ranks):
        of_rank = _ENVIRONMENT | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        process = context.Process(
            target=_rank,
            args=(function, (*arguments, rank), of_rank | dict(environment or {}), str(run.log)),
            daemon=True,
        )
        process.start()
        run.processes.append(process)
    return run


def torchrun(
    config: Path,
    *overrides: object,
    folder: Path,
    ranks: int = 1,
    nodes: int = 1,
    module: str = "titan_rl.train",
    restarts: int = 0,
) -> Run:
    """Start a run with the command that a user types; arguments as for :func:`start`.

    Args:
        config: The TOML file.
        overrides: As for :func:`start`.
        folder: The run's ``dump_folder``.
        ranks: Of each node.
        nodes: How often the command is started, as on so many machines that share a file system.
        module: As for :func:`start`.
        restarts: How often the ranks are started again when one fails.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launcher += [f"--max-restarts={restarts}"]
    if nodes == 1:
        launcher += ["--standalone"]
    else:
        endpoint = f"localhost:{free_port()}"
        launcher += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        launcher += ["--rdzv-id=nodes", "--local-addr=localhost"]
    command = [*launcher, "-m", module, *arguments(config, overrides, folder)]
    started = [spawn(command, folder=folder) for _ in range(nodes)]
    return Run(folder, started[0].log, [process for run in started for process in run.processes])


def spawn(command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None) -> Run:
    """Start any command in the repository's root, in a process group of its own."""
    log = _log(folder)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT | dict(environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    atexit.register(_kill_group, process)
    return Run(folder, log, [process])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what an interrupted test session leaves behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def arguments(config: Path, overrides: Sequence[object], folder: Path) -> list[str]:
    keys, values = overrides[::2], overrides[1::2]
    pairs = [*zip(keys, values, strict=True), ("dump_folder", folder)]
    return [str(config), *(part for key, value in pairs for part in (f"--{key}", str(value)))]


def _log(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(folder.name + ".log")


def _main(module: str, arguments: list[str], rank: int) -> int:
    return sys.modules[module].main(arguments)


def _rank(
    function: Callable[..., int | None], arguments: tuple[Any, ...], environment: dict[str, str], log: str
) -> None:
    """One rank, in its forked process."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(function(*arguments))


def _num_workers() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


_ports = itertools.count(os.getpid())  # not those of another session's start


def free_port() -> int:
    """Below the ports that the system hands out, each once, and others for each worker of pytest-xdist."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + 1_000 * (worker % 10) + next(_ports) % 1_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
