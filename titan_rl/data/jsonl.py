"""Prompts from JSON Lines files: one JSON object per line, UTF-8."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.data.paths import Concatenated, find_files
from titan_rl.data.row_dataset import FileDataset, FileKeys
from titan_rl.data.rows import RowConfig, RowReader, shorten
from titan_rl.errors import ConfigError


class JsonLines:
    """The lines of one file, found by offset. It keeps 32 bytes per line in memory and the file open."""

    def __init__(self, path: Path, label: str) -> None:
        """Find the lines.

        Args:
            path: The file.
            label: What ids call it.

        Raises:
            ConfigError: The file cannot be opened or holds no line.
        """
        self._path, self._label = path, label
        self._starts, self._sizes, self._numbers, self._digests = (array("Q") for _ in range(4))
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(str(path), "be readable", str(error), "Check its permissions.") from error
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._starts.append(start)
                self._sizes.append(len(line))
                self._numbers.append(number)
                self._digests.append(_digest(line))
            start += len(line)
        if not self._starts:
            raise ConfigError(
                str(path), "hold at least one row", "an empty file", "Check how the file was written."
            )

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return the object of a line.

        Raises:
            ConfigError: The line is not UTF-8, not JSON or not an object, or it changed since the start.
        """
        where = self.where(index)
        # pread leaves no file position behind, so threads may read side by side.
        line = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        if _digest(line) != self._digests[index]:
            raise ConfigError(where, "stay as it was at the start", "another text", "Restart the run.")
        try:
            text = line.decode("utf-8-sig" if self._starts[index] == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                where, "be UTF-8", str(error), "Convert the file, for example with iconv -t UTF-8."
            ) from error
        try:
            row = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                where, f"be one JSON object ({error})", shorten(text.strip()), "Correct or remove the line."
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                where, "be one JSON object", shorten(text.strip()), "Correct or remove the line."
            )
        return row

    def where(self, index: int) -> str:
        """Return ``file:line``."""
        return f"{self._path}:{self._numbers[index]}"

    def default_id(self, index: int) -> str:
        """Return ``label:line``."""
        return f"{self._label}:{self._numbers[index]}"


class JsonlFiles(FileDataset):
    """JSON Lines files, which stay where they are.

    A row that changes during the run is an error. Default ids are ``<file>:<line>``, lines counted from 1.
    Empty lines are skipped.
    """

    @staticmethod
    def open_files(path: str, key: str, columns: list[str]) -> Concatenated:
        """Open the files; a line is read whole, whatever the columns."""
        return Concatenated([JsonLines(file, label) for file, label in find_files(path, key)])


class Jsonl(JsonlFiles):
    """One split of one or several JSON Lines files."""

    @dataclass(kw_only=True, slots=True)
    class Config(FileKeys, RowConfig):
        """Which files, which columns, which rows are held out."""

    format = "jsonl"
    reader_class = RowReader


def _digest(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
