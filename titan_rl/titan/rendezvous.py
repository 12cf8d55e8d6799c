"""Ranks that torchrun restarts meet under a name of their own.

torchrun's agent keeps one store for the whole life of a job (https://github.com/pytorch/pytorch/issues/135712).
Ranks of a restart find in it what those before them left, connect to addresses where nobody listens any more,
and fail until the restarts are used up. Here the ranks of each start first agree on a name, and keep
everything under it.
"""

from __future__ import annotations

import importlib
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store

_KEY = "titan_rl/start"
_POLL_SECONDS = 0.01
# The attribute of that name in torch.distributed is a function.
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
_original: Any = _rendezvous._create_c10d_store


def install() -> None:
    """Make ``env://``, which TorchTitan uses, give every start of the ranks a store of its own."""
    _rendezvous._create_c10d_store = _create_store


def _create_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> Store:
    store: Store = _original(hostname, port, rank, world_size, timeout, use_libuv)
    if not _rendezvous._agent_store_serves(hostname, port):
        return store  # rank 0 has just made it
    return PrefixStore(agree_on_name(store, rank=rank, world_size=world_size, timeout=timeout), store)


def agree_on_name(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """The same new name on all ranks, whatever earlier ones left in the store. Collective.

    A rank cannot tell an old value from a new one, unless it answers what only this rank can have asked: each
    writes down a word made up for the occasion, and rank 0 answers every word that it sees.

    Args:
        store: That all ranks see.
        rank: Of this process.
        world_size: Number of ranks.
        timeout: How long to wait for the others.

    Raises:
        TimeoutError: a rank did not come.
    """
    if rank == 0:
        return _answer_all(store, world_size, time.monotonic() + timeout.total_seconds())
    word = uuid.uuid4().hex
    store.set(f"{_KEY}/word/{rank}", word)
    try:
        store.wait([f"{_KEY}/answer/{word}"], timeout)
    except DistStoreError as error:
        raise _missing(0, world_size) from error
    name = store.get(f"{_KEY}/answer/{word}").decode()
    store.set(f"{name}/{rank}", "heard")
    return name


def _answer_all(store: Store, world_size: int, deadline: float) -> str:
    name, answered = f"{_KEY}/{uuid.uuid4().hex}", set()
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            key = f"{_KEY}/word/{rank}"
            word = store.get(key).decode() if store.check([key]) else ""
            if word and word not in answered:
                store.set(f"{_KEY}/answer/{word}", name)
                answered.add(word)
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        if time.monotonic() > deadline:
            raise _missing(missing[0], world_size)
        time.sleep(_POLL_SECONDS if missing else 0)
    return name


def _missing(rank: int, world_size: int) -> TimeoutError:
    return TimeoutError(
        f"Rank {rank} of {world_size} did not come to the start of the run. Look at the end of its log; if "
        "it was only slow, raise comm.init_timeout_seconds."
    )
