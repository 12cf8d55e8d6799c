"""From the rows of a file to prompts: columns, checks and error messages that name file, line and field.

The formats are in :mod:`titan_rl.data.jsonl`, ``parquet`` and ``huggingface``; which row belongs to which
split is in :mod:`titan_rl.data.row_dataset`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

from annotated_types import Gt, Lt

from titan_rl.config.registry import suggest
from titan_rl.errors import ConfigError
from titan_rl.types import Json, Message, Prompt


@dataclass(kw_only=True, slots=True)
class RowConfig:
    """Which columns hold what, and which rows are held out. Shared by all datasets that are files."""

    prompt_column: str | None = None
    """Column of text that becomes one user message. Set this, ``messages_column`` or
    ``conversation_column``."""

    messages_column: str | None = None
    """Column with a list of ``{"role": ..., "content": ...}`` that ends before the reply."""

    conversation_column: str | None = None
    """Column with a list of messages that ends with the assistant's reply, which is the answer. For
    supervised runs."""

    answer_column: str | None = None
    """Column with the reference answer, text or a number. Leave it out for tasks without one."""

    answer_pattern: str | None = None
    """Regular expression; group 1 of its first match in the answer column is the answer, without white space
    around it. GSM8K: ``'####\\s*(.+)'``."""

    id_column: str | None = None
    """Column with a unique name of the row. Default: file name and line (JSONL) or row (others)."""

    metadata_columns: list[str] = field(default_factory=list)
    """Further columns for rewards. They must hold JSON values."""

    held_out_fraction: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of the distinct prompts that the held-out split gets, by a hash of their content. Without it, and
    without held-out rows given separately, nothing is held out."""

    split_seed: int = 0
    """Another value holds out other prompts. Independent of the run's seed."""


class RowSource(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return the columns of a row.

        Raises:
            ConfigError: It cannot be read.
        """
        ...

    def where(self, index: int) -> str:
        """Return what errors call the row: ``file:line`` or ``file: row N``."""
        ...

    def default_id(self, index: int) -> str:
        """Return a name that no other row of this source has."""
        ...


class SplitConfig(Protocol):
    """Which rows are held out, and how rows are called."""

    id_column: str | None
    held_out_fraction: float | None
    split_seed: int


class PromptReader(Protocol):
    """Turns rows into prompts."""

    def prompt(self, source: RowSource, index: int) -> Prompt:
        """Return row ``index`` of a source as a prompt.

        Raises:
            ConfigError: The row cannot be used.
        """
        ...


class RowReader:
    """Turns rows into prompts, or says exactly what is wrong with them."""

    def __init__(self, config: RowConfig) -> None:
        """Check the configuration.

        Raises:
            ConfigError: The columns or the pattern make no sense.
        """
        named = [config.prompt_column, config.messages_column, config.conversation_column]
        count = sum(name is not None for name in named)
        if count != 1:
            raise ConfigError(
                "data.source",
                "set exactly one of prompt_column, messages_column and conversation_column",
                ("neither", "one", "two of them", "all of them")[count],
                'Write for example prompt_column = "question".',
            )
        if config.conversation_column is not None and config.answer_column is not None:
            raise ConfigError(
                "data.source.answer_column",
                "be left out with data.source.conversation_column, whose last message is the answer",
                config.answer_column,
                "Remove one of the two.",
            )
        self._config = config
        self._pattern = _compile(config)

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        config = self._config
        named = [
            config.prompt_column,
            config.messages_column,
            config.conversation_column,
            config.answer_column,
            config.id_column,
        ]
        return list(dict.fromkeys([name for name in named if name is not None] + config.metadata_columns))

    def prompt(self, source: RowSource, index: int) -> Prompt:
        """Return row ``index`` of a source as a prompt.

        Raises:
            ConfigError: A column is missing or holds a value of the wrong type.
        """
        row, where, config = source.row(index), source.where(index), self._config
        check_columns(self.columns, row, where)
        if config.id_column is None:
            name = source.default_id(index)
        else:
            value = row[config.id_column]
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise wrong_value(where, config.id_column, "be text (not empty) or a whole number", value)
            name = str(value)
        messages, answer = self._content(row, where)
        metadata = {column: _json(row[column], where, column) for column in config.metadata_columns}
        return Prompt(id=name, messages=messages, answer=answer, metadata=metadata)

    def _content(self, row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], str | None]:
        """The messages of the prompt, and the answer."""
        config = self._config
        if config.conversation_column is not None:
            column = config.conversation_column
            *messages, reply = read_messages(row[column], where, column, ends_with_reply=True)
            if not messages:
                raise wrong_value(where, column, "hold a message before the reply", row[column])
            return tuple(messages), reply.content
        if config.prompt_column is not None:
            text = read_text(row[config.prompt_column], where, config.prompt_column)
            return (Message("user", text),), self._answer(row, where)
        column = cast("str", config.messages_column)
        return read_messages(row[column], where, column), self._answer(row, where)

    def _answer(self, row: Mapping[str, Any], where: str) -> str | None:
        column = self._config.answer_column
        if column is None:
            return None
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise wrong_value(where, column, "be text or a number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong_value(where, column, "be finite", value)
        text = _encodable(value, where, column) if isinstance(value, str) else str(value)
        if self._pattern is None:
            return text
        match = self._pattern.search(text)
        if match is None or match.group(1) is None:
            raise ConfigError(
                f"{where}: {column}",
                f"match data.source.answer_pattern {self._pattern.pattern!r}",
                shorten(text),
                "Correct the row or the pattern.",
            )
        return match.group(1).strip()


def check_columns(wanted: list[str], available: Any, where: str) -> None:
    """Raise a ConfigError that names the nearest column when one is missing."""
    for column in wanted:
        if column not in available:
            names = [str(name) for name in available]
            remedy = suggest(column, names, otherwise="Name an existing column in [data.source].")
            raise ConfigError(f"{where}: {column}", "be present", f"columns {', '.join(names)}", remedy)


def shorten(value: object) -> str:
    """The start of a value, for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:60] + f"... ({len(text)} characters)"


def wrong_value(where: str, column: str, constraint: str, value: object) -> ConfigError:
    """The error for a column that holds something else than it should."""
    got = f"{type(value).__name__} {shorten(repr(value))}"
    remedy = "Correct the row, or name another column in [data.source]."
    return ConfigError(f"{where}: {column}", constraint, got, remedy)


def _compile(config: RowConfig) -> re.Pattern[str] | None:
    if config.answer_pattern is None:
        return None
    if config.answer_column is None:
        raise ConfigError(
            "data.source.answer_pattern",
            "stand next to data.source.answer_column",
            config.answer_pattern,
            "Set answer_column, or delete answer_pattern.",
        )
    try:
        pattern = re.compile(config.answer_pattern)
    except re.error as error:
        problem = f"{config.answer_pattern} ({error})"
        raise ConfigError(
            "data.source.answer_pattern", "be a regular expression", problem, "Correct the pattern."
        ) from error
    if pattern.groups < 1:
        raise ConfigError(
            "data.source.answer_pattern",
            "have a group, in parentheses, for the answer",
            config.answer_pattern,
            r"Write for example '####\s*(.+)'.",
        )
    return pattern


def read_text(value: object, where: str, column: str) -> str:
    """Return a text that is more than white space.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, str):
        raise wrong_value(where, column, "be text", value)
    if not value.strip():
        raise wrong_value(where, column, "hold more than white space", value)
    return _encodable(value, where, column)


def _encodable(value: str, where: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is no character and has no UTF-8.
        raise wrong_value(where, column, "be valid Unicode", ascii(value)) from error
    return value


def read_messages(
    value: object, where: str, column: str, *, ends_with_reply: bool = False
) -> tuple[Message, ...]:
    """Return a list of chat messages.

    Args:
        value: A list of ``{"role": ..., "content": ...}``.
        where: What errors call the row.
        column: What errors call the column.
        ends_with_reply: Whether the last message is the assistant's, or must not be.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, list) or not value:
        raise wrong_value(where, column, "be a list of at least one message", value)
    messages = []
    for number, item in enumerate(value):
        field_name = f"{column}[{number}]"
        if not isinstance(item, Mapping):
            raise wrong_value(where, field_name, "be an object with role and content", item)
        check_columns(["role", "content"], item, f"{where}: {field_name}")
        role, content = item["role"], item["content"]
        if not isinstance(role, str) or not role:
            raise wrong_value(where, f"{field_name}.role", "be text", role)
        if not isinstance(content, str):
            raise wrong_value(where, f"{field_name}.content", "be text", content)
        messages.append(
            Message(
                _encodable(role, where, f"{field_name}.role"),
                _encodable(content, where, f"{field_name}.content"),
            )
        )
    if ends_with_reply and messages[-1].role != "assistant":
        raise wrong_value(where, column, "end with an assistant message", f"one of role {messages[-1].role}")
    if not ends_with_reply and messages[-1].role == "assistant":
        raise ConfigError(
            f"{where}: {column}",
            "end before the reply",
            "an assistant message at the end",
            "Remove the last message of every row; the policy writes it. In a supervised run name "
            "conversation_column instead.",
        )
    return tuple(messages)


def _json(value: object, where: str, column: str) -> Json:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise wrong_value(where, column, f"be a JSON value ({error})", value) from error
    return cast("Json", value)
