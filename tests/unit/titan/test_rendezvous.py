"""Ranks of a restart meet in the agent's old store, and see nothing of those before them."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from titan_rl.titan import device
from titan_rl.titan.rendezvous import agree_on_name

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def server() -> TCPStore:
    """The agent's."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def client(server: TCPStore) -> TCPStore:
    return TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)


def meet(server: TCPStore, size: int, *, late: int | None = None) -> list[str]:
    """The name that each rank of a start has got; one of them comes late."""
    names = [""] * size

    def rank(number: int) -> None:
        if number == late:
            time.sleep(0.3)
        names[number] = agree_on_name(client(server), rank=number, world_size=size, timeout=TIMEOUT)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_start_gets_one_name_for_all_ranks_and_another_than_before(server: TCPStore, late: int) -> None:
    starts = [
        meet(server, 3),
        meet(server, 3, late=late),
        meet(server, 2, late=1),
        meet(server, 3, late=late),
    ]
    assert all(len(set(names)) == 1 and names[0] for names in starts)
    assert len({names[0] for names in starts}) == len(starts)


def test_a_rank_that_does_not_come_is_named(server: TCPStore) -> None:
    meet(server, 2)  # what its predecessor has left is no answer
    for missing in (0, 1):
        with pytest.raises(TimeoutError, match=f"Rank {missing} of 2 did not come"):
            agree_on_name(client(server), rank=1 - missing, world_size=2, timeout=timedelta(seconds=0.2))


@pytest.mark.parametrize("is_agents", [True, False])
def test_the_store_of_a_process_group_is_below_the_name_where_the_agent_keeps_it(
    server: TCPStore, is_agents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.install()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_agents))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port if is_agents else 0))
    port = server.port if is_agents else 0
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the attribute is a function
    store = rendezvous._create_c10d_store("localhost", port, 0, 1, TIMEOUT)
    assert isinstance(store, PrefixStore) == is_agents
    store.set("address", "here")
    assert server.check(["address"]) is False
