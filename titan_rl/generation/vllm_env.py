"""The process around vLLM: its environment variables, and what it changes that is not its own.

Here: settings that vLLM reads when it is imported or built, and guards that give the random state and the
thread count back to the trainer that lives in the same process. Standard library, numpy and torch only: this
is imported before vLLM.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def set_vllm_environment(run_threads: int | None) -> None:
    """Set what vLLM reads from the environment. Call it before vLLM is imported.

    ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps the engine in this process; ``nobind`` and ``OMP_NUM_THREADS``
    keep vLLM from binding the threads that the trainer shares with it. A log level that the user set stays.

    Args:
        run_threads: Threads of this process for CPU kernels; None leaves them alone.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # Ours is [generator] kv_cache_gib: a value left in the environment would silently win over it.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if run_threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(run_threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def preserved_random_state() -> Generator[None, None, None]:
    """Give the global random state of Python, numpy and torch (CPU and CUDA) back on leaving.

    vLLM seeds all of them when it is built, and draws from torch's when greedy and seeded requests share a
    batch. The trainer's own draws, and so a resumed run, must not depend on that.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=_cuda_devices()):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def preserved_threads(run_threads: int) -> Generator[None, None, None]:
    """Give torch's thread count, and the function that sets it, back on leaving.

    vLLM's CPU worker replaces ``torch.set_num_threads`` by a function that does nothing. Its no-ops for
    ``torch.accelerator.synchronize`` and ``empty_cache`` stay: it calls them later, and on a machine without
    accelerator they have nothing to do.

    Args:
        run_threads: Threads of this process for CPU kernels, before and after.
    """
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(run_threads)


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
