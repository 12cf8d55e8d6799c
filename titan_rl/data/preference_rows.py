"""Preferences from files and from the Hugging Face hub: columns, checks, and one dataset a format.

Which row belongs to which split is in :mod:`titan_rl.data.row_dataset`, as for prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Lt

from titan_rl.data.huggingface import HubDataset, HubKeys
from titan_rl.data.jsonl import JsonlFiles
from titan_rl.data.parquet import ParquetFiles
from titan_rl.data.preferences import identical, with_preference
from titan_rl.data.row_dataset import FileKeys
from titan_rl.data.rows import RowSource, check_columns, read_messages, read_text, wrong_value
from titan_rl.errors import ConfigError
from titan_rl.types import Message, Prompt


@dataclass(kw_only=True, slots=True)
class PreferenceRowConfig:
    """Which columns hold what, and which rows are held out. Shared by all preference datasets that are files.

    A completion is text, or a list of messages: the reply alone, or, without a prompt column, the whole
    conversation, whose last message is the completion.
    """

    prompt_column: str | None = None
    """Column of text that becomes one user message. Leave it and ``messages_column`` out when the completions
    are whole conversations."""

    messages_column: str | None = None
    """Column with a list of ``{"role": ..., "content": ...}`` that ends before the reply."""

    chosen_column: str = "chosen"
    """Column with the better completion."""

    rejected_column: str = "rejected"
    """Column with the worse completion."""

    margin_column: str | None = None
    """Column with a number: by how much the chosen completion is better, in units of reward."""

    completion_column: str | None = None
    """Column with the only completion of a row, for data that is labelled one by one. It replaces
    ``chosen_column`` and ``rejected_column`` and needs ``label_column``."""

    label_column: str | None = None
    """Column with true or false (1 or 0): whether ``completion_column`` is good."""

    id_column: str | None = None
    """Column with a unique name of the row. Default: file name and line (JSONL) or row (others)."""

    held_out_fraction: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of the distinct prompts that the held-out split gets, by a hash of their content. Without it, and
    without held-out rows given separately, nothing is held out."""

    split_seed: int = 0
    """Another value holds out other prompts. Independent of the run's seed."""


class PreferenceReader:
    """Turns rows into prompts that carry a preference, or says exactly what is wrong with them."""

    def __init__(self, config: PreferenceRowConfig) -> None:
        """Check the configuration.

        Raises:
            ConfigError: The columns contradict one another.
        """
        if config.prompt_column is not None and config.messages_column is not None:
            raise ConfigError(
                "data.source.prompt_column",
                "be absent when data.source.messages_column is set",
                config.prompt_column,
                "Delete one of the two.",
            )
        if (config.completion_column is None) != (config.label_column is None):
            missing = "label_column" if config.label_column is None else "completion_column"
            raise ConfigError(
                f"data.source.{missing}",
                "be set: completion_column and label_column go together",
                None,
                "Set both for completions that are labelled one by one, none for pairs.",
            )
        self._config = config

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        config = self._config
        named = [config.prompt_column, config.messages_column, config.id_column]
        if config.completion_column is None:
            named += [config.chosen_column, config.rejected_column, config.margin_column]
        else:
            named += [config.completion_column, config.label_column]
        return list(dict.fromkeys(name for name in named if name is not None))

    def prompt(self, source: RowSource, index: int) -> Prompt:
        """Return row ``index`` of a source as a prompt that carries a preference.

        Raises:
            ConfigError: A column is missing or holds something else than it should.
        """
        row, where, config = source.row(index), source.where(index), self._config
        check_columns(self.columns, row, where)
        if config.completion_column is not None and config.label_column is not None:
            messages, text = self._completion(row, where, config.completion_column)
            good = _label(row[config.label_column], where, config.label_column)
            chosen, rejected, margin = (text, None, 0.0) if good else (None, text, 0.0)
        else:
            messages, chosen = self._completion(row, where, config.chosen_column)
            other, rejected = self._completion(row, where, config.rejected_column)
            if other != messages:
                raise ConfigError(
                    f"{where}: {config.rejected_column}",
                    f"continue the same conversation as {config.chosen_column}",
                    "other messages before the reply",
                    "Correct or remove the row.",
                )
            if chosen.strip() == rejected.strip():
                raise identical(where, chosen)
            margin = self._margin(row, where)
        plain = Prompt(id=self._name(row, source, index), messages=messages)
        return with_preference(plain, chosen=chosen, rejected=rejected, margin=margin)

    def _completion(self, row: Mapping[str, Any], where: str, column: str) -> tuple[tuple[Message, ...], str]:
        """The prompt's messages and a completion's text."""
        config, value = self._config, row[column]
        before: tuple[Message, ...] = ()
        if isinstance(value, list):
            *earlier, reply = read_messages(value, where, column, ends_with_reply=True)
            before, text = tuple(earlier), read_text(reply.content, where, f"{column}[-1].content")
        else:
            text = read_text(value, where, column)
        if config.prompt_column is not None:
            prompt: tuple[Message, ...] = (
                Message("user", read_text(row[config.prompt_column], where, config.prompt_column)),
            )
        elif config.messages_column is not None:
            prompt = read_messages(row[config.messages_column], where, config.messages_column)
        elif before:
            return before, text
        else:
            raise wrong_value(where, column, "hold the whole conversation, or prompt_column be set", value)
        if before:
            raise ConfigError(
                f"{where}: {column}",
                "hold the reply alone, since the prompt has a column of its own",
                f"{len(before) + 1} messages",
                "Delete prompt_column or messages_column from [data.source] to read whole conversations.",
            )
        return prompt, text

    def _margin(self, row: Mapping[str, Any], where: str) -> float:
        column = self._config.margin_column
        if column is None:
            return 0.0
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise wrong_value(where, column, "be a finite number", value)
        return float(value)

    def _name(self, row: Mapping[str, Any], source: RowSource, index: int) -> str:
        column = self._config.id_column
        if column is None:
            return source.default_id(index)
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise wrong_value(source.where(index), column, "be text (not empty) or a whole number", value)
        return str(value)


def _label(value: object, where: str, column: str) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise wrong_value(where, column, "be true or false, or 1 or 0", value)


class JsonlPreferences(JsonlFiles):
    """One split of one or several JSON Lines files, a preference a line."""

    @dataclass(kw_only=True, slots=True)
    class Config(FileKeys, PreferenceRowConfig):
        """Which files, which columns, which rows are held out."""

    format = "jsonl preferences"
    reader_class = PreferenceReader


class ParquetPreferences(ParquetFiles):
    """One split of one or several parquet files, a preference a row. Needs pyarrow."""

    @dataclass(kw_only=True, slots=True)
    class Config(FileKeys, PreferenceRowConfig):
        """Which files, which columns, which rows are held out."""

    format = "parquet preferences"
    reader_class = PreferenceReader


class HuggingFacePreferences(HubDataset):
    """One split of a dataset of the ``datasets`` library, a preference a row. Needs ``datasets``."""

    @dataclass(kw_only=True, slots=True)
    class Config(HubKeys, PreferenceRowConfig):
        """Which dataset, which of its splits, which columns, which rows are held out."""

    reader_class = PreferenceReader
