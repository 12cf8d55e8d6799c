"""Datasets over rows: the split, the check for overlap, ids and the fingerprint. Rows stay where they are."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from titan_rl.data.datasets import Split, content_key, is_held_out, prompt_bytes
from titan_rl.data.rows import PromptReader, RowSource, SplitConfig, shorten
from titan_rl.errors import ConfigError
from titan_rl.types import Prompt


class RowDataset:
    """One split of the rows of a source, converted anew at every access.

    Every row of the source is read and checked once, at construction; what is kept per row is its index. Rows
    whose prompts are equal (see :func:`titan_rl.data.datasets.content_key`) are all kept, but always in the
    same split.
    """

    def __init__(
        self,
        reader: PromptReader,
        config: SplitConfig,
        *,
        name: str,
        split: Split,
        train: RowSource,
        held_out: RowSource | None,
        held_out_key: str,
    ) -> None:
        """Select the rows of a split and check all of them.

        Args:
            reader: How a row becomes a prompt.
            config: Where the split is configured.
            name: For logs.
            split: Which rows.
            train: The rows of the train split, or of both splits.
            held_out: Rows of the held-out split, when they are given separately.
            held_out_key: The key that gives them, for errors.

        Raises:
            ConfigError: A row is wrong, an id stands twice, the splits overlap, or this split came out empty.
        """
        _check_split(config, has_rows=held_out is not None, held_out_key=held_out_key)
        self.name = name
        self._reader = reader
        self._source = held_out if split == "held_out" and held_out is not None else train
        self._indices = array("Q")
        if split == "held_out" and held_out is None and config.held_out_fraction is None:
            self.fingerprint = hashlib.sha256().hexdigest()
            return
        first: dict[bytes, int] = {}
        names: dict[str, int] = {}
        digest = hashlib.sha256()
        for index in range(len(self._source)):
            prompt = reader.prompt(self._source, index)
            key = content_key(prompt.messages)
            if config.id_column is not None and names.setdefault(prompt.id, index) != index:
                raise self._duplicate_id(prompt.id, config.id_column, index=index, other=names[prompt.id])
            if config.held_out_fraction is not None:
                chosen = is_held_out(key, fraction=config.held_out_fraction, split_seed=config.split_seed)
                if chosen != (split == "held_out"):
                    continue
            if held_out is not None:
                first.setdefault(key, index)
            digest.update(prompt_bytes(prompt))
            self._indices.append(index)
        if not self._indices:
            raise ConfigError(
                "data.source.held_out_fraction",
                f"leave at least one prompt in the {split} split",
                f"0 of {len(self._source)} with held_out_fraction = {config.held_out_fraction}",
                "Change held_out_fraction or split_seed, or add prompts.",
            )
        self.fingerprint = digest.hexdigest()
        if held_out is not None:
            other = train if split == "held_out" else held_out
            self._check_overlap(first, other, split=split, held_out_key=held_out_key)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._reader.prompt(self._source, self._indices[index])

    def _duplicate_id(self, name: str, column: str, *, index: int, other: int) -> ConfigError:
        return ConfigError(
            f"{self._source.where(index)}: {column}",
            f"differ from that of {self._source.where(other)}",
            name,
            "Make the ids unique, or delete id_column from the data section.",
        )

    def _check_overlap(
        self, first: dict[bytes, int], other: RowSource, *, split: Split, held_out_key: str
    ) -> None:
        shared: dict[bytes, int] = {}
        for index in range(len(other)):
            key = content_key(self._reader.prompt(other, index).messages)
            if key in first:
                shared.setdefault(key, index)
        if not shared:
            return
        # The first in the order of the held-out rows, whichever split was asked for.
        pairs = [(first[key], index) for key, index in shared.items()]
        mine, theirs = min(pairs) if split == "held_out" else min(pairs, key=lambda pair: pair[1])
        here, there = self._source.where(mine), other.where(theirs)
        held, train = (here, there) if split == "held_out" else (there, here)
        text = self._reader.prompt(self._source, mine).messages[-1].content
        raise ConfigError(
            f"data.source.{held_out_key}",
            "share no prompt with the train split",
            f"{len(shared)} shared prompts, the first at {held} and {train}: {shorten(text)!r}",
            "Remove them from one of the two.",
        )


# No slots: Python cannot combine two bases that have them.
@dataclass(kw_only=True)
class FileKeys:
    """Which files. Combined with the keys of the columns."""

    path: str
    """File, or glob pattern of files, with the train split (or both splits, see held_out_fraction)."""

    held_out_path: str | None = None
    """File, or glob pattern of files, with the held-out split. It must share no prompt with ``path``."""


class FileConfig(SplitConfig, Protocol):
    """What :class:`FileDataset` reads."""

    path: str
    held_out_path: str | None


class FileDataset(RowDataset):
    """One split of the rows of one or several files. Subclasses say what a file and what a row is.

    Attributes:
        format: What holds the rows, for logs.
        reader_class: Is made of the configuration, and turns rows into prompts.
    """

    format: ClassVar[str]
    reader_class: ClassVar[type[Any]]

    def __init__(self, config: FileConfig, split: Split) -> None:
        """Open the files and check every row.

        Args:
            config: Which files, which columns, which rows are held out.
            split: Which rows.

        Raises:
            ConfigError: A library is missing, or a file, a row or the configuration cannot be used as it is.
        """
        reader, held_out = self.reader_class(config), config.held_out_path

        def rows(path: str, key: str) -> RowSource:
            return self.open_files(path, f"data.source.{key}", reader.columns)

        super().__init__(
            reader,
            config,
            name=self.format,
            split=split,
            train=rows(config.path, "path"),
            held_out=None if held_out is None else rows(held_out, "held_out_path"),
            held_out_key="held_out_path",
        )

    @staticmethod
    def open_files(path: str, key: str, columns: list[str]) -> RowSource:
        """Open the files that a path or pattern stands for.

        Args:
            path: File or glob pattern.
            key: The configuration key, for errors.
            columns: What will be read.
        """
        raise NotImplementedError


def _check_split(config: SplitConfig, *, has_rows: bool, held_out_key: str) -> None:
    if has_rows and config.held_out_fraction is not None:
        raise ConfigError(
            "data.source.held_out_fraction",
            f"be absent when data.source.{held_out_key} is set",
            config.held_out_fraction,
            "Delete one of the two.",
        )
    fraction = config.held_out_fraction
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            "data.source.held_out_fraction", "be between 0 and 1", fraction, "Set held_out_fraction = 0.1."
        )
