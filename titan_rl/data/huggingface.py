"""Prompts from the Hugging Face hub or a directory that ``save_to_disk`` wrote. Needs the extra ``data``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from titan_rl.data.datasets import Split, require
from titan_rl.data.row_dataset import RowDataset
from titan_rl.data.rows import RowConfig, RowReader, SplitConfig, check_columns
from titan_rl.errors import ConfigError


# No slots: Python cannot combine two bases that have them.
@dataclass(kw_only=True)
class HubKeys:
    """Which dataset, which of its splits. Combined with the keys of the columns."""

    path: str
    """Name on the hub (``"openai/gsm8k"``), or a directory: one that ``save_to_disk`` wrote, or one with
    data files that ``datasets.load_dataset`` can read."""

    name: str | None = None
    """Configuration of the hub's dataset, such as ``"main"``."""

    revision: str | None = None
    """Branch, tag or commit on the hub. A commit makes the run repeatable."""

    split: str = "train"
    """The dataset's split that ours trains on (or both are cut from, see held_out_fraction)."""

    held_out_split: str | None = None
    """The dataset's split that is held out. It must share no prompt with ``split``."""


class HubConfig(SplitConfig, Protocol):
    """What :class:`HubDataset` reads."""

    path: str
    name: str | None
    revision: str | None
    split: str
    held_out_split: str | None


class HubDataset(RowDataset):
    """One split of a dataset of the ``datasets`` library. Subclasses say what a row is.

    Rows stay in the library's memory-mapped files. Code from the hub is never run. Default ids are
    ``<split>:<row>``, rows counted from 0.

    Attributes:
        reader_class: Is made of the configuration, and turns rows into prompts.
    """

    reader_class: ClassVar[type[Any]]

    def __init__(self, config: HubConfig, split: Split) -> None:
        """Load the dataset and check every row.

        Args:
            config: Which dataset, which columns, which rows are held out.
            split: Which rows.

        Raises:
            ConfigError: ``datasets`` is missing, or the dataset, a row or the configuration cannot be used.
        """
        reader, held_out = self.reader_class(config), config.held_out_split

        def rows(name: str, key: str) -> HubRows:
            return HubRows(config, name, key=f"data.source.{key}", columns=reader.columns)

        super().__init__(
            reader,
            config,
            name=config.path,
            split=split,
            train=rows(config.split, "split"),
            held_out=None if held_out is None else rows(held_out, "held_out_split"),
            held_out_key="held_out_split",
        )


class HuggingFace(HubDataset):
    """One split of a dataset of the ``datasets`` library."""

    @dataclass(kw_only=True, slots=True)
    class Config(HubKeys, RowConfig):
        """Which dataset, which of its splits, which columns, which rows are held out."""

    reader_class = RowReader


class HubRows:
    """The rows of one split."""

    def __init__(self, config: HubConfig, split: str, *, key: str, columns: list[str]) -> None:
        """Load a split.

        Args:
            config: Which dataset.
            split: Which of its splits.
            key: The configuration key that names the split, for errors.
            columns: What to read.

        Raises:
            ConfigError: It cannot be loaded, has no rows or lacks a column.
        """
        self._split = split
        self._label = f"{config.path}[{split}]"
        data = _load(config, split, key)
        check_columns(columns, data.column_names, self._label)
        if len(data) == 0:
            raise ConfigError(self._label, "hold at least one row", "an empty split", "Name another split.")
        self._data = data.select_columns(columns).with_format(None)

    def __len__(self) -> int:
        return len(self._data)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return the columns of a row."""
        return self._data[index]

    def where(self, index: int) -> str:
        """Return ``dataset[split]: row N``, counted from 0."""
        return f"{self._label}: row {index}"

    def default_id(self, index: int) -> str:
        """Return ``split:row``."""
        return f"{self._split}:{index}"


def _load(config: HubConfig, split: str, key: str) -> Any:
    datasets = require("datasets", extra="data", needed_by="data.source.type 'huggingface'")
    directory = Path(os.path.expanduser(config.path))
    saved = (directory / "state.json").exists() or (directory / "dataset_dict.json").exists()
    try:
        if saved:
            data = datasets.load_from_disk(str(directory))
        else:
            path = str(directory) if directory.is_dir() else config.path
            return datasets.load_dataset(path, config.name, split=split, revision=config.revision)
    # IndexError is what load_from_disk makes of a dataset without rows.
    except (OSError, ValueError, RuntimeError, IndexError, datasets.exceptions.DatasetsError) as error:
        problem = f"{config.path} [{split}]: {type(error).__name__}: {error}"
        raise ConfigError(
            key if "split" in str(error).lower() else "data.source.path",
            "name a dataset that can be loaded",
            problem,
            "Check name, network and login (hf auth login). Without a network, save_to_disk it elsewhere.",
        ) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ConfigError(key, f"be one of {sorted(data)}", split, f"Name a split of {config.path}.")
        return data[split]
    saved_split = str(data.split) if data.split is not None else split
    if saved_split != split:
        raise ConfigError(key, f"be {saved_split!r}, the one that {config.path} holds", split, "Change it.")
    return data
