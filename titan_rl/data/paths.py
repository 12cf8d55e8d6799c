"""From ``data.source.path`` to files, and several files as one source of rows."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan_rl.data.rows import RowSource
from titan_rl.errors import ConfigError


def find_files(path: str, key: str) -> list[tuple[Path, str]]:
    """Return the files that a path or a glob pattern stands for, in alphabetical order.

    Args:
        path: One file, or a pattern such as ``data/train-*.parquet``. ``~`` is the home directory.
        key: The configuration key, for errors.

    Returns:
        Pairs of a file and its label: the path from the nearest common directory on, unique among the files.

    Raises:
        ConfigError: There is no such file, or it is a directory.
    """
    expanded = os.path.expanduser(path)
    files = [Path(expanded)] if os.path.exists(expanded) else [Path(p) for p in sorted(glob.glob(expanded))]
    if not files:
        raise ConfigError(key, f"name an existing file (from {os.getcwd()})", path, "Correct the path.")
    for file in files:
        if not file.is_file():
            raise ConfigError(
                key,
                "name files",
                f"the directory {file}",
                "Write a pattern such as dir/*.jsonl.",
            )
    common = os.path.commonpath([file.parent for file in files])
    return [(file, Path(os.path.relpath(file, common)).as_posix()) for file in files]


class Concatenated:
    """The rows of several sources, one after the other."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        """Join sources.

        Args:
            sources: At least one, each with at least one row.
        """
        self._sources = list(sources)
        self._starts = [0, *accumulate(len(source) for source in sources)]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Mapping[str, Any]:
        """Return the columns of a row."""
        source, local = self._find(index)
        return source.row(local)

    def where(self, index: int) -> str:
        """Return what errors call the row."""
        source, local = self._find(index)
        return source.where(local)

    def default_id(self, index: int) -> str:
        """Return a name that no other row has."""
        source, local = self._find(index)
        return source.default_id(local)

    def _find(self, index: int) -> tuple[RowSource, int]:
        number = bisect_right(self._starts, index) - 1
        return self._sources[number], index - self._starts[number]
