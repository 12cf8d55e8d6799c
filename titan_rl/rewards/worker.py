"""The reward worker: a process that builds the rewards once and then scores one rollout after another.

Started by :mod:`titan_rl.rewards.worker_process` as ``python -m titan_rl.rewards.worker REQUEST_FD REPLY_FD
PARENT_PID``. It speaks frames (:mod:`titan_rl.rewards.wire`) over those two descriptors only; what rewards
print goes elsewhere. Deadlines are the parent's business. Imports no torch, so that it starts fast.

Messages in: first ``{specs, sys_path, memory_limit_bytes, max_reply_bytes}``, then ``{id, rollout}`` each.
Messages out: ``{ready}`` or ``{failed}``, per job ``{started: id, at}`` and ``{id, at, reward or failure}``.
``at`` is ``time.monotonic()``, a clock that all processes of a machine share.
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.rewards.spec import InvalidRewardError, RewardSpec, WeightedSum
from titan_rl.rewards.wire import HEADER, encode_frame, reward_to_json, rollout_from_json
from titan_rl.types import Rollout

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_CHARACTERS = 2000
_MAX_PRINTED_BYTES = 4096


def main(argv: list[str]) -> int:
    """Run until the parent closes the request pipe.

    Args:
        argv: Request descriptor, reply descriptor, the parent's process id.

    Returns:
        The exit code: 0, or 1 when the rewards cannot be built.
    """
    request_fd, reply_fd, parent_pid = (int(word) for word in argv)
    for descriptor in (request_fd, reply_fd):
        os.set_inheritable(descriptor, False)
    _tie_to_parent(parent_pid)
    _redirect_output()
    setup = _read_message(request_fd)
    if setup is None:
        return 0
    sys.path[:] = setup["sys_path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported, not dumped
    if setup["memory_limit_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_limit_bytes"],) * 2)
    try:
        reward_fn = WeightedSum([RewardSpec(**spec) for spec in setup["specs"]])
    except ConfigError as error:
        got = error.got if isinstance(error.got, str | int | float | None) else repr(error.got)
        parts = [error.where, error.constraint, got, error.remedy]
        _write(reply_fd, encode_frame({"failed": parts}))
        return 1
    _write(reply_fd, encode_frame({"ready": True, "at": time.monotonic()}))
    while (job := _read_message(request_fd)) is not None:
        _write(reply_fd, encode_frame({"started": job["id"], "at": time.monotonic()}))
        answer = _score(reward_fn, rollout_from_json(job["rollout"]))
        _write(reply_fd, _encode_answer(job["id"], answer, setup["max_reply_bytes"]))
        _reap_orphans()
    return 0


def _score(reward_fn: WeightedSum, rollout: Rollout) -> dict[str, Any]:
    own_pid = os.getpid()
    try:
        return {"reward": reward_to_json(reward_fn(rollout))}
    except InvalidRewardError as error:
        return {"failure": {"reason": "invalid", "message": str(error)}}
    except BaseException as error:  # the boundary to a user's code: even SystemExit is an answer
        return {"failure": {"reason": "raised", "message": _describe(error)}}
    finally:
        if os.getpid() != own_pid:
            os._exit(1)  # a child that the reward forked must not go on as a second worker


def _describe(error: BaseException) -> str:
    """Return exception, notes and the innermost line, as one line for a log."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    message = "; ".join(lines)[:_MAX_MESSAGE_CHARACTERS]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno})" if frames else message


def _encode_answer(job_id: int, answer: Mapping[str, Any], max_bytes: int) -> bytes:
    frame = encode_frame({"id": job_id, "at": time.monotonic(), **answer})
    size = len(frame) - HEADER.size
    if size <= max_bytes:
        return frame
    message = (
        f"the reply of {size} bytes exceeds max_reply_bytes = {max_bytes}; return fewer or shorter parts"
    )
    failure = {"reason": "too_large", "message": message}
    return encode_frame({"id": job_id, "at": time.monotonic(), "failure": failure})


def _read_message(descriptor: int) -> dict[str, Any] | None:
    header = _read_exactly(descriptor, HEADER.size)
    if header is None:
        return None
    body = _read_exactly(descriptor, HEADER.unpack(header)[0])
    return None if body is None else json.loads(body)


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    """Read ``size`` bytes; None when the stream ended, which is how the parent says goodbye."""
    chunks = []
    while size:
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _tie_to_parent(parent_pid: int) -> None:
    """Die when the trainer dies, and adopt the orphans of what rewards start, so that they can be found."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _reap_orphans() -> None:
    """Wait for adopted children that ended; without this a long run would collect zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there are no children


class _Printed(io.RawIOBase):
    """Passes on the last bytes of what is printed, and drops them rather than wait for a reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2  # /dev/null, for programs that a reward starts with stdout=sys.stdout

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(BlockingIOError):
            os.write(self._descriptor, bytes(data[-_MAX_PRINTED_BYTES:]))
        return len(data)


def _redirect_output() -> None:
    """Send descriptors 1 and 2 to /dev/null, and a sample of Python's prints to the parent.

    At start descriptor 2 is a pipe to the parent. A pipe that nobody reads for a while blocks whoever prints,
    so programs print into nothing, and Python prints through a descriptor that drops what does not fit.
    """
    log = os.dup(2)
    os.set_blocking(log, False)
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 1)
        os.dup2(devnull.fileno(), 2)
    printed = io.TextIOWrapper(_Printed(log), errors="backslashreplace", write_through=True)  # type: ignore[arg-type]
    sys.stdout = sys.stderr = printed
    faulthandler.enable(file=log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
