"""What a preference is, the names of the datasets that hold them, and the checks before the first draw.

A dataset of preferences is a dataset of prompts (:class:`titan_rl.data.datasets.PromptDataset`) whose prompts
carry their completions in ``metadata``, written by :func:`with_preference` and read by
:func:`preference_of`. So the split rule, the cursor rule and the fingerprints are those of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from titan_rl.data.datasets import FilteredDataset, PromptDataset, content_key
from titan_rl.errors import ConfigError
from titan_rl.types import Message, Prompt

PREFERENCES: dict[str, str] = {
    "arithmetic": "titan_rl.data.arithmetic_preferences:ArithmeticPreferences",
    "jsonl": "titan_rl.data.preference_rows:JsonlPreferences",
    "parquet": "titan_rl.data.preference_rows:ParquetPreferences",
    "huggingface": "titan_rl.data.preference_rows:HuggingFacePreferences",
}
"""``data.source.type`` of preference and reward-model runs -> the class, built as ``cls(config, split)``."""

Side = Literal["chosen", "rejected"]
_KEYS = ("chosen", "rejected", "margin")


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with a better and a worse completion, or with one completion that is labelled good or bad.

    Attributes:
        id: Of the prompt.
        messages: Of the prompt.
        chosen: The better completion, or one labelled good; None when the only one is labelled bad.
        rejected: The worse completion, or one labelled bad; None when the only one is labelled good.
        margin: By how much the chosen one is better, in units of reward; 0 when unknown.
    """

    id: str
    messages: tuple[Message, ...]
    chosen: str | None
    rejected: str | None
    margin: float = 0.0

    @property
    def is_pair(self) -> bool:
        """Whether both completions are there."""
        return self.chosen is not None and self.rejected is not None

    def sides(self) -> Iterator[tuple[Side, Prompt]]:
        """The completions that are there, the chosen one first, each as the answer of the prompt."""
        if self.chosen is not None:
            yield "chosen", Prompt(self.id, self.messages, answer=self.chosen)
        if self.rejected is not None:
            yield "rejected", Prompt(self.id, self.messages, answer=self.rejected)


def with_preference(
    prompt: Prompt, *, chosen: str | None, rejected: str | None, margin: float = 0.0
) -> Prompt:
    """A prompt that carries a preference. Arguments as for :class:`Preference`."""
    values = {"chosen": chosen, "rejected": rejected, "margin": margin}
    return replace(prompt, answer=None, metadata={**prompt.metadata, **values})


def preference_of(prompt: Prompt) -> Preference:
    """The preference that a prompt carries.

    Raises:
        ConfigError: It carries none: the source is a source of prompts alone.
    """
    metadata = prompt.metadata
    chosen, rejected, margin = (metadata.get(key) for key in _KEYS)
    chosen, rejected = (value if isinstance(value, str) else None for value in (chosen, rejected))
    if chosen is None and rejected is None:
        raise ConfigError(
            f"Prompt {prompt.id} of data.source",
            "come with a chosen or a rejected completion in its metadata",
            {key: metadata[key] for key in _KEYS if key in metadata},
            'See docs/data.md, "Preferences".',
        )
    number = margin if isinstance(margin, int | float) else 0.0
    return Preference(prompt.id, prompt.messages, chosen, rejected, float(number))


@dataclass(frozen=True, slots=True)
class Encoded:
    """The documents of one preference: prompt, completion, end of sequence.

    Attributes:
        preference: What was encoded.
        documents: Side, token ids, and True where a token is of the completion; one or two.
    """

    preference: Preference
    documents: tuple[tuple[Side, list[int], list[bool]], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(ids) for _, ids, _ in self.documents]


class Encoder(Protocol):
    """What this module needs of :class:`titan_rl.data.chat.PromptEncoder`."""

    def encode_with_answer(self, prompt: Prompt) -> tuple[list[int], list[bool]]:
        """Token ids of prompt, answer and end of sequence, and True for the last two."""
        ...


def encode(preference: Preference, encoder: Encoder) -> Encoded:
    """Encode the completions of a preference, each behind the prompt.

    Raises:
        ConfigError: both completions are the same tokens.
    """
    documents = tuple((side, *encoder.encode_with_answer(prompt)) for side, prompt in preference.sides())
    if len(documents) == 2 and documents[0][1] == documents[1][1]:
        raise identical(preference.id, preference.chosen or "")
    return Encoded(preference, documents)


def identical(where: str, text: str) -> ConfigError:
    """The error for a pair that prefers nothing."""
    return ConfigError(
        f"{where}: rejected",
        "differ from the chosen completion",
        repr(text[:60]),
        "Remove the pair: equal completions teach nothing.",
    )


@dataclass(frozen=True, slots=True)
class PreferenceReport:
    """What :func:`check_preferences` found.

    Attributes:
        num_preferences: Preferences of the dataset.
        num_too_long: Those that were left out because they are too long.
    """

    num_preferences: int
    num_too_long: int


def check_preferences(
    dataset: PromptDataset,
    encoder: Encoder,
    *,
    row_tokens: int,
    rows: int,
    too_long: Literal["error", "skip"],
    pairs_for: str | None,
) -> tuple[PromptDataset, PreferenceReport]:
    """Encode every preference once, before the first draw.

    Args:
        dataset: The preferences.
        encoder: How completions become tokens.
        row_tokens: Most tokens of a document (``training.seq_len``).
        rows: Rows of a micro-batch, into which both documents of a pair must fit.
        too_long: ``"error"`` raises on a preference that does not fit, ``"skip"`` leaves it out.
        pairs_for: What needs both completions of every preference, for the error; None if nothing does.

    Returns:
        The dataset, or what is left of it; and what was found.

    Raises:
        ConfigError: a pair is incomplete, identical or too long, or nothing is left.
    """
    kept, first = [], ""
    for index in range(len(dataset)):
        encoded = encode(preference_of(dataset[index]), encoder)
        preference, lengths = encoded.preference, encoded.lengths
        if pairs_for is not None and not preference.is_pair:
            raise _no_pair(preference, pairs_for)
        if max(lengths) <= row_tokens and (rows > 1 or sum(lengths) <= row_tokens):
            kept.append(index)
        elif not first:
            first = f"{preference.id} has {' and '.join(map(str, lengths))} tokens"
    report = PreferenceReport(len(dataset), len(dataset) - len(kept))
    if not first:
        return dataset, report
    if too_long == "error" or not kept:
        what = "both completions of a pair, with their prompts" if rows == 1 else "every completion"
        raise ConfigError(
            "training.seq_len",
            f"hold {what}, in {'one row' if rows == 1 else 'a row'}",
            f"{row_tokens}; {report.num_too_long} of {len(dataset)} do not fit, first: {first}",
            'Raise training.seq_len or training.local_batch_size, or set data.too_long = "skip".',
        )
    return FilteredDataset(dataset, kept), report


def _no_pair(preference: Preference, pairs_for: str) -> ConfigError:
    missing = "rejected" if preference.rejected is None else "chosen"
    return ConfigError(
        "data.source",
        f"hold pairs, which {pairs_for} compares",
        f"{preference.id} without a {missing} completion",
        "Name chosen_column and rejected_column, or choose a loss for single labelled completions.",
    )


def mismatched(dataset: PromptDataset) -> list[int]:
    """For each preference, another one with a different prompt: the next such one, in order, around the end.

    Their completions under this prompt are what a KL baseline is estimated on. A fixed function of the
    dataset, so that the reference's scores of these can be computed once.

    Raises:
        ConfigError: all preferences have the same prompt.
    """
    keys = [content_key(dataset[index].messages) for index in range(len(dataset))]
    count = len(keys)
    if len(set(keys)) < 2:
        raise ConfigError(
            "data.source",
            "hold at least two different prompts, for the KL baseline of the loss",
            "one prompt",
            "Add prompts, or choose a loss without a KL baseline.",
        )
    others = [0] * count
    start = next(i for i in range(count) if keys[i] != keys[(i + 1) % count])
    other = (start + 1) % count
    for step in range(count):  # backwards from `start`, so that the next different one is known
        index = (start - step) % count
        if keys[index] != keys[(index + 1) % count]:
            other = (index + 1) % count
        others[index] = other
    return others
