"""E1: `--nnodes=1:4`: nodes go and come, and the run re-forms on what is there. Agents stand for nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import jobs, walks
from tests.integration import runs
from titan_rl.resilience import journal

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 400  # more than it comes to: the test ends it
SETTINGS = (
    "training.steps", STEPS,
    "data.prompts_per_iteration", 6,
    "checkpoint.interval", 1,
    "checkpoint.keep_latest_k", 2,
    "evaluation.num_prompts", 2,
)  # fmt: skip
SLOW = ("generator.type", jobs.PLANTED, "generator.seconds_per_token", 0.3)
DEADLINE_SECONDS = 240  # for one change on a busy machine; a lost node is noticed after 15


class Nodes:
    """A job of agents with one rank each.

    Attributes:
        folder: Its ``dump_folder``.
        mark: In the environment of all its processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self._endpoint = f"localhost:{runs.free_port()}"
        self._agents: list[runs.Run] = []

    def add(self) -> None:
        """The first one holds the store of the rendezvous, and is never lost."""
        command = [sys.executable, "-m", "tests.faults.warm_agent", "--nnodes=1:4", "--max-restarts=20"]
        command += [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.mark}"]
        arguments = runs.arguments(jobs.CONFIGS / "grpo.toml", (*SETTINGS, *SLOW), self.folder)
        number = len(self._agents)
        environment = {"TITAN_RL_TEST_JOB": self.mark, "TITAN_RL_TEST_NODE": f"{self.mark}-{number}-"}
        # With the agent's store, a node that comes later waits for an address that the first one has
        # published in an earlier round alone (torch 2.14).
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._agents.append(runs.spawn([*command, *arguments], folder=self.folder, environment=environment))
        while not self._is_store_there():
            assert jobs.is_running(self._agents[0].processes[0]), self._agents[0].tail()
            time.sleep(0.2)

    def _is_store_there(self) -> bool:
        host, _, port = self._endpoint.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def lose(self, number: int) -> None:
        """A machine that is gone: agent and rank at once, without a word."""
        for pid in walks.processes(f"{self.mark}-{number}-"):
            os.kill(pid, signal.SIGKILL)

    def wait_for(self, num_ranks: int) -> None:
        """Until a step is done on so many ranks, after all that was before."""
        known = len(self.starts())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(size == num_ranks and steps for size, _, steps in self.starts()[max(known - 1, 0) :]):
            assert jobs.is_running(self._agents[0].processes[0]), self._agents[0].tail()
            assert time.monotonic() < deadline, self._agents[0].tail()
            time.sleep(0.2)

    def starts(self) -> list[tuple[int, int, list[int]]]:
        """Of each start: ranks, the step it went on from, and the steps it did."""
        path = self.folder / "journal" / "rank-0.jsonl"
        lines = runs.read_lines(path) if path.is_file() else []
        found: list[tuple[int, int, list[int]]] = []
        for line in lines:
            if "resumed_step" in line:
                found.append((line["world_size"], line["resumed_step"], []))
            else:
                found[-1][2].append(line["step"])
        return found

    def stop(self) -> None:
        """Ask the first agent to stop: what it asks of its rank, all ranks hear."""
        for agent in self._agents:
            if jobs.is_running(agent.processes[0]):
                agent.processes[0].terminate()
        for agent in self._agents:
            agent.wait(120)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "run")
    yield made
    for pid in walks.processes(made.mark):
        os.kill(pid, signal.SIGKILL)


def test_nodes_go_and_come_and_the_run_goes_on_with_what_is_there(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    nodes.add()
    nodes.wait_for(2)
    nodes.lose(1)
    nodes.wait_for(1)
    nodes.add()
    nodes.wait_for(2)
    nodes.add()
    nodes.add()
    nodes.wait_for(4)
    nodes.lose(4)
    nodes.wait_for(3)
    nodes.stop()
    sizes = iter([size for size, _, steps in nodes.starts() if steps])
    assert all(wanted in sizes for wanted in (2, 1, 2, 4, 3))  # in this order, whatever else came between
    entries = journal.read(nodes.folder)
    assert [entry.step for entry in entries] == list(range(1, len(entries) + 1))
    # On one rank from the beginning: the same prompts, each once.
    whole = jobs.start(
        tmp_path / "whole", *SETTINGS, "training.steps", len(entries), ranks=1, config="grpo"
    ).succeed()
    assert [entry.prompts for entry in entries] == [entry.prompts for entry in journal.read(whole.folder)]
    assert walks.processes(nodes.mark) == []
