"""The shared memory through which vLLM's tensor-parallel ranks on a CPU exchange tensors: its name.

vLLM names it after the address of its process group, which is ``env://`` in every launch by torchrun. Two
runs on one host would exchange tensors through one memory, and what a killed run leaves in ``/dev/shm`` would
end every later one ("create shm in SHMManager failed"). Here the name is the launch's own, and is gone as
soon as all ranks have the memory open.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator

SHARED_MEMORY = Path("/dev/shm")
_LAUNCH = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_named: set[Path] = set()


def name_after_launch() -> None:
    """Make vLLM name the memory of each group of ranks after this launch. Before an engine is built."""
    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(_group_name)


def remove_names() -> None:
    """Remove this rank's names; whoever has the memory open keeps it. After an engine is built.

    vLLM ends the building of a group with a barrier behind which all its ranks have it open.
    """
    while _named:
        _named.pop().unlink(missing_ok=True)


def launch_prefix() -> str:
    """Begins every name of this launch, and of no other on this host."""
    launch = "\0".join(os.environ.get(name, "") for name in _LAUNCH)
    return f"titan-rl-{hashlib.blake2s(launch.encode(), digest_size=8).hexdigest()}"


def _group_name(communicator: Any) -> str:
    """The same on all ranks of a group, and different for every other group on this host."""
    ranks = "-".join(str(rank) for rank in communicator.ranks)
    name = f"{launch_prefix()}-{communicator.unique_name}-{ranks}"
    mine = SHARED_MEMORY / f"{name}_{communicator.rank}"
    # Left by a run that was killed while it started, at the same address. Only this rank makes it.
    mine.unlink(missing_ok=True)
    _named.add(mine)
    return name
