"""Slow questions about an installation, each answered in a process of its own.

``python -m titan_rl.tools.doctor_probes NAME`` prints one JSON object on its last line. A crash, a hang or a
wrong library stays in that process; :mod:`titan_rl.tools.doctor` reads the answer.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from typing import Any

EXTRAS = {"datasets": "data", "pyarrow": "data", "reasoning_gym": "tasks", "gguf": "smollm2"}
"""Module -> the extra of titan_rl that installs it."""

_COLLECTIVE_TIMEOUT = timedelta(seconds=30)


def probe_torch() -> dict[str, Any]:
    """What torch sees, and whether a process group of one rank works with each backend in use."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    has_cuda = torch.cuda.is_available()
    answer: dict[str, Any] = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "threads": torch.get_num_threads(),
        "cuda_build": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda else [],
    }
    if has_cuda:
        answer["gpu_free_bytes"], answer["gpu_total_bytes"] = torch.cuda.mem_get_info(0)
    answer["working"] = {
        backend: _try_process_group(torch, dist, backend, device)
        for backend, device, is_used in (
            ("gloo", "cpu", answer["gloo"]),
            ("nccl", "cuda", answer["nccl"] and has_cuda),
        )
        if is_used
    }
    return answer


def _try_process_group(torch: Any, dist: Any, backend: str, device: str) -> str:
    """Sum one number over one rank; returns the error, or the empty string when it worked."""
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=_COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_COLLECTIVE_TIMEOUT)
        value = torch.ones((), device=device)
        dist.all_reduce(value)
        total = float(value)
        dist.destroy_process_group()
    except Exception as error:  # whatever the backend raises is the answer
        return _one_line(error)
    return "" if total == 1.0 else f"the sum over one rank of 1 was {total}"


def probe_titan() -> dict[str, Any]:
    """Which device a run would use: TorchTitan imports, and is prepared for it."""
    return {"device": importlib.import_module("titan_rl.titan.device").install()}


def probe_vllm() -> dict[str, Any]:
    """Whether the generator that uses vLLM imports."""
    importlib.import_module("titan_rl.generation.vllm_env").set_vllm_environment(None)
    importlib.import_module("titan_rl.generation.vllm_engine")
    return {}


def probe_extras() -> dict[str, Any]:
    """Version of each optional package that imports, or why it does not."""
    answer = {}
    for name in EXTRAS:
        try:
            importlib.import_module(name)
            answer[name] = {"version": metadata.version(name.replace("_", "-"))}
        except Exception as error:  # a package that is half installed can raise anything
            answer[name] = {"error": _one_line(error)}
    return answer


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": probe_torch,
    "titan": probe_titan,
    "vllm": probe_vllm,
    "extras": probe_extras,
}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> int:
    """Answer one question."""
    try:
        answer = PROBES[sys.argv[1]]()
    except Exception as error:  # an import can raise anything; what it says is the answer
        answer = {"error": _one_line(error)}
    print("\n" + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
