"""The fixture of a comparison: one JSON file, checked and made into tensors. What is computed of it is in
``rows``; docs/conformance.md describes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_rl.config.registry import suggest
from titan_rl.errors import ConfigError

TOKENS = ("mask", "logp", "old", "roll", "ref", "tok_rew", "values", "vpreds", "returns", "adv")
"""Numbers per token, ``[B, T]``."""
ROLLOUTS = ("scores", "greedy", "rm_scores", "margins")
"""Numbers per rollout, ``[B]``."""
WORDS = ("logits", "teacher_logits")
"""Numbers per token and word, ``[B, T, V]``."""
ALIASES = {"baselines": "greedy"}
"""Another name of a field."""
REQUIRED = ("mask", "logp", "old", "scores", "uid")

MEANINGS = {
    "mask": "1 where a token is trained, 0 elsewhere",
    "logp": "log-probabilities under the policy, with respect to which gradients are taken",
    "old": "log-probabilities under the policy at the start of the iteration",
    "roll": "log-probabilities that the generator reported",
    "ref": "log-probabilities under the reference",
    "scores": "the reward of each rollout",
    "uid": "the group of each rollout",
    "adv": "the advantages of the rows of parts; the algorithms' rows compute their own",
    "tok_rew": "rewards per token, in place of the score at the last trained token",
    "values": "the critic's values at the start of the iteration",
    "vpreds": "the critic's values as they are trained",
    "returns": "what the critic is trained towards; computed from tok_rew or scores, and values, if absent",
    "greedy": "the reward of the greedy rollout of the same prompt, equal within a group",
    "rm_scores": "what a reward model gives to each rollout",
    "margins": "by how much a rollout should win, where it is the chosen one of a pair",
    "logits": "the policy's logits",
    "labels": "the sampled tokens, indices into the last dimension of logits",
    "teacher_logits": "the teacher's logits of the same words",
}
"""What each field is."""


class LeftOutError(Exception):
    """A row cannot be computed of this fixture; the message says why."""


class MissingFieldError(LeftOutError):
    """A row needs a field that the fixture does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"needs fixture.{name}: {MEANINGS[name]}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fixture:
    """A batch that is the whole optimiser step: B rollouts of at most T tokens, each in a row of its own.

    Attributes:
        file: Where it comes from, for errors.
        tensors: The fields that the file has. What stands at masked tokens is 0.
        mask: ``[B, T]`` bool, True where a token is trained.
        groups: Rows of each group, in the order of their first rollouts.
        hyperparameters: The tables of the file, unchecked.
    """

    file: str
    tensors: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    groups: Sequence[Sequence[int]]
    hyperparameters: Mapping[str, Any]

    def need(self, name: str) -> torch.Tensor:
        """The field.

        Raises:
            MissingFieldError: The file does not have it.
        """
        if name not in self.tensors:
            raise MissingFieldError(name)
        return self.tensors[name]

    @property
    def sample_index(self) -> torch.Tensor:
        """``[B, T]`` int64, the row."""
        return torch.arange(self.mask.shape[0])[:, None].expand(self.mask.shape)

    @property
    def lengths(self) -> list[int]:
        """Trained tokens of each rollout."""
        return self.mask.sum(1).tolist()


def read_fixture(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Fixture:
    """Read and check a file.

    Args:
        path: JSON with an object ``fixture`` and, if wanted, an object ``hyperparameters`` of objects. Other
            top-level keys are not looked at.
        dtype: Of all tensors but masks and labels.

    Raises:
        ConfigError: The file cannot be read, a field is missing, unknown or of another shape, or a number at
            a trained token is not finite.
    """
    data = _load(path)
    raw = data.get("fixture")
    if not isinstance(raw, dict):
        got = "no such key" if raw is None else type(raw).__name__
        raise ConfigError(f"{path}: fixture", "be an object of arrays", got, "See docs/conformance.md.")
    reader = _Reader(str(path), raw, dtype)
    mask = reader.mask()
    tensors = reader.tensors(mask)
    groups = reader.groups()
    hyperparameters = data.get("hyperparameters", {})
    if not isinstance(hyperparameters, dict):
        got = type(hyperparameters).__name__
        raise ConfigError(
            f"{path}: hyperparameters", "be an object of objects", got, "Leave it out for none."
        )
    return Fixture(file=str(path), tensors=tensors, mask=mask, groups=groups, hyperparameters=hyperparameters)


def _load(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "be a readable file", str(error), "Name the fixture's file.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}", "be JSON", f"{error.msg}.", "Repair the file.") from error
    if not isinstance(data, dict):
        raise ConfigError(str(path), "hold an object", type(data).__name__, 'Put the arrays under "fixture".')
    return data


class _Reader:
    """Checks of one file. B and T come from the mask, V from the logits."""

    def __init__(self, file: str, raw: dict[str, Any], dtype: torch.dtype) -> None:
        self.file, self.dtype = file, dtype
        known = {*TOKENS, *ROLLOUTS, *WORDS, *ALIASES, "labels", "uid"}
        for name in raw:
            if name not in known:
                remedy = suggest(name, known, otherwise="Remove it, or see docs/conformance.md for the keys.")
                raise self.error(name, "be a known key", type(raw[name]).__name__, remedy)
        for alias, name in ALIASES.items():
            if alias in raw and name in raw:
                raise self.error(alias, f"be absent beside fixture.{name}", "both", "They mean the same.")
        self.keys = {ALIASES.get(name, name): name for name in raw}
        self.raw = {name: raw[key] for name, key in self.keys.items()}
        for name in REQUIRED:
            if name not in raw:
                shape = "[B]" if name in ("scores", "uid") else "[B, T]"
                raise self.error(name, f"be there, {shape}", "no such key", f"It is {MEANINGS[name]}.")
        self.shape: tuple[int, int] = (0, 0)
        self.words: int | None = None

    def error(self, name: str, constraint: str, got: object, remedy: str) -> ConfigError:
        return ConfigError(f"{self.file}: fixture.{name}", constraint, got, remedy)

    def mask(self) -> torch.Tensor:
        rows = self.raw["mask"]
        size = _length(rows)
        first = _length(rows[0]) if size else 0
        if not size or not first:
            raise self.error(
                "mask", "be [B, T] with at least one row and token", _kind(rows), "One row per rollout."
            )
        self.shape = (size, first)
        values = self.numbers("mask", self.shape, "[B, T]")
        for i, row in enumerate(rows):
            for t, value in enumerate(row):
                if value not in (0, 1):
                    raise self.error(f"mask[{i}][{t}]", "be 0 or 1", value, "1 where a token is trained.")
        return values.bool()

    def tensors(self, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.raw:
            if name in ("mask", "uid"):
                continue
            if name in WORDS:
                found[name] = self.of_words(name, mask)
            elif name in ROLLOUTS:
                found[name] = self.finite(name, self.numbers(name, self.shape[:1], "[B]"), None)
            elif name != "labels":
                values = self.finite(name, self.numbers(name, self.shape, "[B, T]"), mask)
                found[name] = torch.where(mask, values, 0.0)
        if "labels" in self.raw:
            found["labels"] = self.labels(mask)
        return found

    def numbers(self, name: str, shape: tuple[int, ...], symbol: str) -> torch.Tensor:
        """A tensor of a field, or the error that names where its shape or a value is wrong."""
        self._check(self.raw[name], shape, name, f"{symbol} = {list(shape)}")
        return torch.tensor(self.raw[name], dtype=self.dtype)

    def _check(self, value: Any, shape: tuple[int, ...], where: str, expected: str) -> None:
        if not shape:
            if isinstance(value, bool) or not isinstance(value, int | float):
                if where.startswith("mask") and isinstance(value, bool):
                    return
                raise self.error(where, "be a number", value, f"The array must be {expected}.")
            return
        if _length(value) != shape[0] or not isinstance(value, list):
            remedy = "B and T are those of fixture.mask."
            raise self.error(where, f"have {shape[0]} entries, being of {expected}", _kind(value), remedy)
        for i, entry in enumerate(value):
            self._check(entry, shape[1:], f"{where}[{i}]", expected)

    def finite(self, name: str, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        bad = ~values.isfinite()
        if mask is not None:
            bad = bad & (mask if values.ndim == mask.ndim else mask[..., None])
        for index in bad.nonzero().tolist()[:1]:
            where = name + "".join(f"[{i}]" for i in index)
            got = values[tuple(index)].item()
            raise self.error(
                where, "be finite where a token is trained", got, "Mask the token, or repair it."
            )
        return values

    def of_words(self, name: str, mask: torch.Tensor) -> torch.Tensor:
        if self.words is None:
            rows = self.raw[name]
            first = rows[0] if _length(rows) and isinstance(rows, list) else None
            words = _length(first[0]) if isinstance(first, list) and first else 0
            if words < 1:
                raise self.error(name, "be [B, T, V]", _kind(rows), "V is the number of words.")
            self.words = words
        values = self.finite(name, self.numbers(name, (*self.shape, self.words), "[B, T, V]"), mask)
        return torch.where(mask[..., None], values, 0.0)

    def labels(self, mask: torch.Tensor) -> torch.Tensor:
        values = self.numbers("labels", self.shape, "[B, T]")
        limit = math.inf if self.words is None else self.words
        bad = mask & ((values < 0) | (values >= limit) | (values != values.round()))
        for i, t in bad.nonzero().tolist()[:1]:
            bound = "" if self.words is None else f" below V = {self.words}"
            raise self.error(
                f"labels[{i}][{t}]", f"be an index, 0 or more{bound}", values[i, t].item(), "See logits."
            )
        return torch.where(mask, values, 0.0).long()

    def groups(self) -> list[list[int]]:
        uid = self.raw["uid"]
        if not isinstance(uid, list) or len(uid) != self.shape[0]:
            raise self.error(
                "uid", f"have {self.shape[0]} entries, being of [B]", _kind(uid), "One name per rollout."
            )
        found: dict[Any, list[int]] = {}
        for i, name in enumerate(uid):
            if isinstance(name, bool) or not isinstance(name, str | int):
                raise self.error(f"uid[{i}]", "be a string or an integer", name, "It names the group.")
            found.setdefault(name, []).append(i)
        groups = list(found.values())
        for rows in groups if "greedy" in self.raw else ():
            values = [self.raw["greedy"][i] for i in rows]
            if min(values) != max(values):
                key = self.keys["greedy"]
                remedy = "A prompt has one greedy rollout."
                raise self.error(f"{key}[{rows[0]}]", "be equal within a group", values, remedy)
        return groups


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{value!r}, which is no list"
