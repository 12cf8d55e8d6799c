"""What a dataset of prompts is, the names of those that exist, and what they share.

A dataset is a fixed, finite sequence of :class:`titan_rl.types.Prompt`. The order in which a run draws from
it is the business of :mod:`titan_rl.data.cursor`, tokens are that of :mod:`titan_rl.data.chat`. No torch
here: the validation of a configuration imports this module.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Message, Prompt

Split = Literal["train", "held_out"]

DATASETS: dict[str, str] = {
    "arithmetic": "titan_rl.data.arithmetic:Arithmetic",
    "jsonl": "titan_rl.data.jsonl:Jsonl",
    "parquet": "titan_rl.data.parquet:Parquet",
    "huggingface": "titan_rl.data.huggingface:HuggingFace",
    "reasoning_gym": "titan_rl.data.reasoning_gym_tasks:ReasoningGym",
}
"""``data.source.type`` -> the class. Each nests a ``Config`` and is built as ``cls(config, split)``."""


class PromptDataset(Protocol):
    """A fixed, finite sequence of prompts: the contract of every dataset.

    A class that follows it is built as ``cls(config, split)`` with ``split`` one of ``"train"`` and
    ``"held_out"``; the two never share a prompt. The held-out split has length 0 when the configuration holds
    nothing out; the train split is never empty.
    """

    @property
    def name(self) -> str:
        """Short name for logs."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that this split contains.

        Equal fingerprints mean equal prompts in equal order: a resumed run compares it, and so should the
        ranks of one run.
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt:
        """Return prompt ``index``, 0 <= index < len.

        Ids are unique in the dataset and the same in every run.
        """
        ...


class FilteredDataset:
    """The prompts of another dataset at chosen indices, in that order.

    The cursor rule holds unchanged over the view, because the indices are decided before the first draw and
    are part of the fingerprint.
    """

    def __init__(self, dataset: PromptDataset, indices: Sequence[int]) -> None:
        """Keep ``dataset[i] for i in indices``.

        Args:
            dataset: Where the prompts are.
            indices: Distinct indices of ``dataset``, at least one.

        Raises:
            ConfigError: Nothing is left.
        """
        if not indices:
            raise ConfigError(
                f"Dataset {dataset.name}",
                "keep at least one prompt after filtering",
                f"0 of {len(dataset)}",
                "Loosen the filter.",
            )
        self._dataset = dataset
        self._indices = array("Q", indices)
        self.name = dataset.name
        kept = hashlib.sha256(dataset.fingerprint.encode())
        for index in self._indices:
            kept.update(index.to_bytes(8, "big"))
        self.fingerprint = kept.hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._dataset[self._indices[index]]


def content_key(messages: Iterable[Message]) -> bytes:
    r"""16 bytes that say which prompts count as the same: equal roles and equal text up to white space.

    >>> content_key([Message("user", "1 + 1")]) == content_key([Message("user", " 1 +\n1")])
    True
    >>> content_key([Message("user", "1 + 1")]) == content_key([Message("user", "1 + 2")])
    False
    """
    text = json.dumps([[message.role, " ".join(message.content.split())] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_held_out(key: bytes, *, fraction: float, split_seed: int) -> bool:
    """Whether a prompt falls into the held-out split when a fraction of the prompts is held out.

    It depends on the prompt's content alone, so duplicates stay together, and adding or removing other rows
    moves nothing.

    Args:
        key: The prompt's :func:`content_key`.
        fraction: Expected share of distinct prompts that are held out, in [0, 1].
        split_seed: Another value draws another split.
    """
    return derive_seed("held_out", split_seed, key.hex()) < int(fraction * 2**63)


def fingerprint_prompts(prompts: Iterable[Prompt]) -> str:
    """SHA-256, in hexadecimal, of ids, messages, answers and metadata in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt_bytes(prompt))
    return digest.hexdigest()


def prompt_bytes(prompt: Prompt) -> bytes:
    """Canonical JSON line of a prompt, for fingerprints.

    Raises:
        ValueError: A float in the metadata is NaN or infinite.
        TypeError: The metadata is not JSON.
    """
    messages = [[message.role, message.content] for message in prompt.messages]
    fields = [prompt.id, messages, prompt.answer, dict(prompt.metadata)]
    return json.dumps(fields, sort_keys=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def require(module: str, *, extra: str, needed_by: str) -> Any:
    """Import an optional dependency.

    Args:
        module: What to import.
        extra: The extra of titan_rl that installs it.
        needed_by: The setting that needs it, for the error.

    Raises:
        ConfigError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            needed_by,
            f"have the package {module.partition('.')[0]} installed",
            str(error),
            f"Run: pip install 'titan_rl[{extra}]'.",
        ) from error
