"""One job per output directory. Standard library only.

The lock is the kernel's (a POSIX record lock), so it goes with the process however that ends, children do
not inherit it, and file systems such as NFS keep it between machines. Who holds it stands in the file, for
people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from titan_rl.errors import ConfigError

NAME = ".lock"


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """What to raise when a run cannot write to its output directory.

    Args:
        folder: The run's ``dump_folder``.
        error: Of the system.
    """
    return ConfigError(
        "dump_folder",
        "be a directory that can be written",
        f"{folder} ({error.strerror})",
        "Free some space, or set dump_folder to another directory.",
    )


class FolderLock:
    """Held by rank 0 of a run for as long as it writes to its ``dump_folder``.

    Attributes:
        stale: Who held it before and ended without giving it back, in words; None if nobody did.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock, and make the folder if there is none.

        Args:
            folder: The run's ``dump_folder``.

        Raises:
            ConfigError: another process holds it, or the folder cannot be written.
        """
        self._path = folder / NAME
        self.stale: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise unwritable(folder, error) from error
        self._take(folder)
        while not self.is_in_place():  # its last holder removed it while we waited for the kernel
            os.close(self._descriptor)
            self._open()
            self._take(folder)
        self.stale = self._holder()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def is_in_place(self) -> bool:
        """Whether the file that is locked is still the folder's."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _take(self, folder: Path) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            os.close(self._descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    "dump_folder",
                    "be on a file system with locks, so that two jobs cannot write to it at once",
                    f"{folder} ({error.strerror})",
                    "Mount it with locks (Lustre: -o flock), or set dump_folder to another directory.",
                ) from error
            raise ConfigError(
                "dump_folder",
                "belong to one job at a time",
                f"{folder}, which {holder or 'another process'} is writing to",
                "Wait until that job has ended, or set another dump_folder.",
            ) from error

    def claim(self) -> None:
        """Write down who holds it."""
        content = {"host": socket.gethostname(), "pid": os.getpid()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(content) + "\n").encode(), 0)

    def keep(self) -> bool:
        """Take the lock anew if somebody has deleted its file: without it a second job could start.

        Returns:
            Whether the file was gone.

        Raises:
            ConfigError: another job has taken the folder meanwhile.
        """
        if self.is_in_place():
            return False
        lost = self._descriptor
        try:
            self._open()
            self._take(self._path.parent)
        except BaseException:
            self._descriptor = lost
            raise
        os.close(lost)
        self.claim()
        return True

    def release(self, *, is_claimed: bool = True) -> None:
        """Give it back.

        Args:
            is_claimed: Whether the name in it is ours; another's is left.
        """
        if (is_claimed or self.stale is None) and self.is_in_place():  # somebody may have deleted it
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)  # any close of the file by this process gives the lock back

    def _holder(self) -> str | None:
        # Through the same descriptor: closing another one of the same file would give the lock back.
        text = os.pread(self._descriptor, 4096, 0).decode(errors="replace")
        try:
            content = json.loads(text)
            return f"process {content['pid']} on {content['host']}"
        except (ValueError, KeyError, TypeError):
            return text.strip() or None
