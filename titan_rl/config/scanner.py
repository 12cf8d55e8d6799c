"""Line numbers of the keys of a TOML text.

``tomli`` gives values without positions. This scanner gives positions without values; it may assume that the
text is valid, because ``tomli`` has read it first. It knows tables, arrays of tables, dotted keys, inline
tables and arrays over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from titan_rl.config.locations import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_VALUE = re.compile(r"[^,\]}#\n]*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


def scan_lines(text: str) -> Mapping[KeyPath, int]:
    """Return the line (from 1) of every table, key and array element of a valid TOML text.

    A table that is only implied (``a`` in ``[a.b]``) has the line where it first appears.

    >>> lines = scan_lines("[a]\\nb.c = 1\\n[[d]]\\nx = [\\n 1,\\n 2]")
    >>> lines["a", "b", "c"], lines["d", 0, "x"], lines["d", 0, "x", 1]
    (2, 4, 6)
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self.lengths: dict[KeyPath, int] = {}  # elements so far of each array of tables

    def scan(self) -> Mapping[KeyPath, int]:
        table: KeyPath = ()
        while self._skip(_BLANK) < len(self.text):
            if self.text.startswith("[[", self.position):
                self.position += 2
                table = self._array_element(self._key())
                self.position += 2
            elif self.text[self.position] == "[":
                self.position += 1
                table = self._resolve(self._key())
                self._record(table)
                self.position += 1
            else:
                self._pair(table)
        return self.lines

    def _array_element(self, key: KeyPath) -> KeyPath:
        array = (*self._resolve(key[:-1]), key[-1])
        index = self.lengths.get(array, 0)
        self.lengths[array] = index + 1
        self._record((*array, index))
        return (*array, index)

    def _resolve(self, key: KeyPath) -> KeyPath:
        # [reward.options] after [[reward]] speaks of the last element.
        path: KeyPath = ()
        for part in key:
            path = (*path, part)
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._record(path, line)
        self.position += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self.text[self.position]
        if opening == "[":
            self.position += 1
            index = 0
            while self._next_item("]"):
                self._record((*path, index))
                self._value((*path, index))
                index += 1
        elif opening == "{":
            self.position += 1
            while self._next_item("}"):
                self._pair(path)
        elif opening in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_BARE_VALUE)

    def _next_item(self, closing: str) -> bool:
        self._skip(_BLANK)
        if self.text[self.position] == ",":
            self.position += 1
            self._skip(_BLANK)
        if self.text[self.position] != closing:
            return True
        self.position += 1
        return False

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            start = self._skip(_SPACE)
            quoted = self.text[start] in "\"'"
            end = self._skip(_STRING if quoted else _BARE_KEY)
            part = self.text[start:end]
            parts.append(_unquote(part) if quoted else part)
            if self.text[self._skip(_SPACE)] != ".":
                return tuple(parts)
            self.position += 1

    def _record(self, path: KeyPath, line: int | None = None) -> None:
        line = self._line() if line is None else line
        self.lines[path] = line
        for length in range(len(path) - 1, 0, -1):
            self.lines.setdefault(path[:length], line)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.position)
        self.position = match.end() if match else self.position
        return self.position

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1


def _unquote(quoted: str) -> str:
    if quoted[0] == "'":
        return quoted[1:-1]

    def replace(match: re.Match[str]) -> str:
        short, long, letter = match.groups()
        return _ESCAPED.get(letter, letter) if letter else chr(int(short or long, 16))

    return _ESCAPE.sub(replace, quoted[1:-1])
