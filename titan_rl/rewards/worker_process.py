"""One reward worker as its parent sees it: the process, three pipes that never block, and its state.

When a worker is due, replaced or retried is decided in :mod:`titan_rl.rewards.pool`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import titan_rl
from titan_rl.rewards.process_tree import MARKER_VARIABLE, kill_tree, new_marker
from titan_rl.rewards.wire import FrameDecoder

_SECRET_WORDS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL"),
    *("API_KEY", "ACCESS_KEY", "PRIVATE_KEY"),
)
_CHUNK_BYTES = 1 << 16
_KEPT_OUTPUT_BYTES = 2000
_REAP_SECONDS = 5.0


def worker_environment(marker: str) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
        marker: Value of ``TITAN_RL_REWARD_WORKER``, by which stray processes are found.

    Returns:
        This process's environment without variables that look like secrets (names that contain TOKEN, SECRET,
        PASSWORD, PASSWD, API_KEY, ACCESS_KEY, PRIVATE_KEY or CREDENTIAL), with one OpenMP thread, and with
        this titan_rl importable.
    """
    kept = {k: v for k, v in os.environ.items() if not any(word in k.upper() for word in _SECRET_WORDS)}
    root = str(Path(titan_rl.__file__).parent.parent)
    inherited = kept.get("PYTHONPATH")
    python_path = root if inherited is None else root + os.pathsep + inherited
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, MARKER_VARIABLE: marker}


class WorkerProcess:
    """A started worker.

    Attributes:
        state: ``starting`` until it announces that its rewards are built, then ``idle`` or ``busy``;
            ``ended`` once it was killed.
        job_id: The job it was given, while it is busy.
        job_started_at: When it began that job by the monotonic clock, None before it says so.
        progress_at: When a byte last went either way.
    """

    def __init__(self, first_frame: bytes, *, selector: selectors.BaseSelector, max_reply_bytes: int) -> None:
        """Start the process; returns at once.

        Args:
            first_frame: The setup message of the protocol.
            selector: Where the pipes are registered, with ``data = (worker, channel)``.
            max_reply_bytes: Largest reply accepted, in bytes.
        """
        self.state: Literal["starting", "idle", "busy", "ended"] = "starting"
        self.job_id: int | None = None
        self.job_started_at: float | None = None
        self.progress_at = time.monotonic()
        self._selector = selector
        self._decoder = FrameDecoder(max_reply_bytes)
        self._outgoing = bytearray()
        self._output = b""
        self._marker = new_marker()
        request_read, self._request = os.pipe()
        self._reply, reply_write = os.pipe()
        self._log, log_write = os.pipe()
        theirs = (request_read, reply_write)
        words = [str(number) for number in (*theirs, os.getpid())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "titan_rl.rewards.worker", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_write,
                pass_fds=theirs,
                start_new_session=True,
                env=worker_environment(self._marker),
            )
        finally:
            for descriptor in (*theirs, log_write):
                os.close(descriptor)
        for descriptor, channel in ((self._reply, "reply"), (self._log, "log")):
            selector.register(descriptor, selectors.EVENT_READ, (self, channel))
        for descriptor in (self._request, self._reply, self._log):
            os.set_blocking(descriptor, False)
        self.send(first_frame)

    def send(self, frame: bytes) -> None:
        """Queue a frame and write what the pipe takes now; the selector asks for the rest."""
        self.progress_at = time.monotonic()
        self._outgoing += frame
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes, without waiting."""
        was_waiting = self._request in self._selector.get_map()
        try:
            while self._outgoing:
                written = os.write(self._request, self._outgoing[:_CHUNK_BYTES])
                del self._outgoing[:written]
                self.progress_at = time.monotonic()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing.clear()  # it has ended; whoever looks at has_exited() learns so
        if self._outgoing and not was_waiting:
            self._selector.register(self._request, selectors.EVENT_WRITE, (self, "request"))
        elif was_waiting and not self._outgoing:
            self._selector.unregister(self._request)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without waiting.

        Raises:
            FrameError: The stream is garbled, or a reply is too large.
        """
        messages = []
        while data := self._read(self._reply):
            self.progress_at = time.monotonic()
            messages.extend(self._decoder.feed(data))
        return messages

    def keep_output(self) -> None:
        """Take what was printed out of the pipe, and keep its end for error messages."""
        while data := self._read(self._log):
            self._output = (self._output + data)[-_KEPT_OUTPUT_BYTES:]

    def has_exited(self) -> bool:
        """Whether the process has ended. It is not waited for, so its number stays taken."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is not None

    def kill(self) -> None:
        """End the process and everything that it started, and release the pipes."""
        kill_tree(self.process.pid, marker=self._marker)
        # Past that time it hangs in the kernel; SIGKILL takes effect when that returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_SECONDS)
        self.keep_output()
        for descriptor in (self._request, self._reply, self._log):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        self.state = "ended"

    def describe_end(self) -> str:
        """Say how the process ended and what it printed last; call it after :meth:`kill`."""
        code = self.process.returncode
        if code is None:
            how = "it did not end"
        elif code < 0:
            how = f"it was ended by {signal.Signals(-code).name}"
        else:
            how = f"it exited with code {code}"
        printed = self._output.decode(errors="replace").strip()
        return f"{how}; it last printed: {printed}" if printed else f"{how}; it printed nothing"

    def _read(self, descriptor: int) -> bytes:
        """Return the next bytes, or none when there are none now or ever."""
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not data and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)  # the end of a stream is always readable
        return data
