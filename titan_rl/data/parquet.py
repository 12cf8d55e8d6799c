"""Prompts from parquet files. Needs pyarrow, from the extra ``data``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.data.datasets import require
from titan_rl.data.paths import Concatenated, find_files
from titan_rl.data.row_dataset import FileDataset, FileKeys
from titan_rl.data.rows import RowConfig, RowReader, check_columns
from titan_rl.errors import ConfigError


class ParquetRows:
    """The rows of one file."""

    def __init__(self, path: Path, label: str, *, columns: list[str]) -> None:
        """Read some columns.

        Args:
            path: The file.
            label: What ids call it.
            columns: What to read.

        Raises:
            ConfigError: pyarrow is missing, a column is missing, or the file is empty or damaged.
        """
        pyarrow = require("pyarrow", extra="data", needed_by="data.source.type 'parquet'")
        parquet = require("pyarrow.parquet", extra="data", needed_by="data.source.type 'parquet'")
        self._path, self._label = path, label
        try:
            with parquet.ParquetFile(path) as file:
                check_columns(columns, file.schema_arrow.names, str(path))
                table = file.read(columns=columns)
        except (OSError, pyarrow.ArrowException) as error:
            problem = str(error).strip().splitlines()[0]
            raise ConfigError(
                str(path), "be a whole, readable parquet file", problem, "Copy or write it again."
            ) from error
        if table.num_rows == 0:
            raise ConfigError(
                str(path), "hold at least one row", "an empty table", "Check how the file was written."
            )
        self._num_rows = table.num_rows
        self._columns = {name: table.column(name) for name in columns}

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        """Return the columns of a row.

        Raises:
            ConfigError: A text is not UTF-8.
        """
        row = {}
        for name, column in self._columns.items():
            try:
                row[name] = column[index].as_py()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self.where(index)}: {name}", "be UTF-8", str(error), "Write the file again with UTF-8."
                ) from error
        return row

    def where(self, index: int) -> str:
        """Return ``file: row N``, counted from 0."""
        return f"{self._path}: row {index}"

    def default_id(self, index: int) -> str:
        """Return ``label:row``."""
        return f"{self._label}:{index}"


class ParquetFiles(FileDataset):
    """Parquet files, read at once.

    The named columns, and only those, are held in memory uncompressed. Default ids are ``<file>:<row>``, rows
    counted from 0.
    """

    @staticmethod
    def open_files(path: str, key: str, columns: list[str]) -> Concatenated:
        """Read some columns of the files."""
        files = find_files(path, key)
        return Concatenated([ParquetRows(file, label, columns=columns) for file, label in files])


class Parquet(ParquetFiles):
    """One split of one or several parquet files."""

    @dataclass(kw_only=True, slots=True)
    class Config(FileKeys, RowConfig):
        """Which files, which columns, which rows are held out."""

    format = "parquet"
    reader_class = RowReader
