"""The preferences of a run: opened, checked, drawn by one global cursor, and dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.batching.balance import cost, largest_differencing
from titan_rl.config.choice import build
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import PromptDataset
from titan_rl.data.preferences import (
    Encoded,
    Preference,
    check_preferences,
    encode,
    mismatched,
    preference_of,
)
from titan_rl.errors import ConfigError
from titan_rl.titan.api import logger
from titan_rl.titan.collectives import Collectives
from titan_rl.trainers.pair_sections import PairDataSection


class PairSplit:
    """The preferences of one split, and for each the completions of another prompt."""

    def __init__(self, dataset: PromptDataset, *, with_mismatched: bool) -> None:
        """Bind a dataset.

        Args:
            dataset: Checked preferences.
            with_mismatched: Whether :meth:`mismatched` is going to be asked.

        Raises:
            ConfigError: it is, and all prompts are the same.
        """
        self.dataset = dataset
        self._others: list[int] = mismatched(dataset) if with_mismatched else []
        self._index = {dataset[i].id: i for i in range(len(dataset))} if with_mismatched else {}

    def mismatched(self, preference: Preference) -> Preference:
        """The completions of another preference behind this one's prompt."""
        other = preference_of(self.dataset[self._others[self._index[preference.id]]])
        return Preference(preference.id, preference.messages, other.chosen, other.rejected)


@dataclass(frozen=True, slots=True)
class PairData:
    """Preferences, and how they become tokens.

    Attributes:
        train: The training split.
        held_out: The split that is never trained on; None when nothing is held out.
        stream: The training split in the order in which it is drawn.
        encoder: The tokenizer with its chat template.
        fingerprint: Of the training preferences and of how they are rendered.
    """

    train: PairSplit
    held_out: PairSplit | None
    stream: PromptStream
    encoder: PromptEncoder
    fingerprint: str

    def draw(self, cursor: int, count: int) -> list[Preference]:
        """Preferences ``cursor`` to ``cursor + count - 1`` of the run, of all ranks."""
        return [preference_of(prompt) for prompt in self.stream.take(cursor, count)]

    def held_out_preferences(self, count: int) -> list[Preference]:
        """The first held-out preferences, at most ``count``."""
        if self.held_out is None:
            return []
        data = self.held_out.dataset
        return [preference_of(data[index]) for index in range(min(count, len(data)))]

    def drawn(self, total: int) -> list[Preference]:
        """All preferences that the first ``total`` draws can bring, each once."""
        data = self.train.dataset
        if total >= len(data):
            return [preference_of(data[index]) for index in range(len(data))]
        return self.draw(0, total)

    def encode(self, preferences: Sequence[Preference]) -> list[Encoded]:
        """Tokens of preferences."""
        return [encode(preference, self.encoder) for preference in preferences]


def open_pair_data(
    section: PairDataSection,
    *,
    assets: str,
    vocab_size: int,
    row_tokens: int,
    rows: int,
    seed: int,
    pairs_for: str | None,
    with_mismatched: bool = False,
) -> PairData:
    """Open both splits, encode every preference once, and refuse what could fail later.

    Args:
        section: ``[data]``.
        assets: Directory of the tokenizer.
        vocab_size: Of the model.
        row_tokens: ``training.seq_len``.
        rows: ``training.local_batch_size``.
        seed: The run seed: decides the order.
        pairs_for: What needs both completions of every preference; None if nothing does.
        with_mismatched: Whether the loss has a KL baseline.

    Raises:
        ConfigError: a file, column, tokenizer or length does not fit.
    """
    encoder = PromptEncoder(
        assets,
        system_prompt=section.system_prompt or None,
        max_prompt_tokens=row_tokens,
        use_chat_template={"auto": None, "on": True, "off": False}[section.chat_template],
    )
    if encoder.vocab_size > vocab_size:
        raise ConfigError(
            "model.hf_assets_path",
            f"hold a tokenizer of at most {vocab_size} tokens, the model's vocabulary",
            encoder.vocab_size,
            "The tokenizer belongs to another model.",
        )
    options: dict[str, Any] = {
        "row_tokens": row_tokens, "rows": rows, "too_long": section.too_long, "pairs_for": pairs_for,
    }  # fmt: skip
    train, report = check_preferences(build(section.source, split="train"), encoder, **options)
    if report.num_too_long:
        logger.warning(
            "%d of %d preferences are too long and left out.", report.num_too_long, report.num_preferences
        )
    held_out = build(section.source, split="held_out")
    if len(held_out):
        held_out = check_preferences(held_out, encoder, **options)[0]
    return PairData(
        train=PairSplit(train, with_mismatched=with_mismatched),
        held_out=PairSplit(held_out, with_mismatched=with_mismatched) if len(held_out) else None,
        stream=PromptStream(train, seed, shuffle=section.shuffle),
        encoder=encoder,
        fingerprint=f"{train.fingerprint}/{encoder.fingerprint}",
    )


def deal(
    preferences: Sequence[Preference],
    encode: Callable[[Sequence[Preference]], Sequence[Encoded]],
    *,
    attention_cost: float,
    collectives: Collectives,
) -> list[Encoded]:
    """The preferences that this data-parallel rank trains on, so that all have equal work. Collective.

    Every rank knows all preferences. It encodes every n-th to find their lengths, and those that it has then
    not encoded yet.

    Args:
        preferences: Of all ranks.
        encode: Gives their tokens.
        attention_cost: As for :func:`titan_rl.batching.balance.cost`.
        collectives: Of the run.

    Returns:
        In the order of the preferences.
    """
    rank, size = collectives.data_rank, collectives.data_size
    known: dict[int, Encoded] = {}

    def add(indices: Sequence[int]) -> None:
        known.update(zip(indices, encode([preferences[i] for i in indices]), strict=True))

    add(range(rank, len(preferences), size))
    costs = [0.0] * len(preferences)
    for first, numbers in enumerate(
        collectives.gather_integers([n for e in known.values() for n in _work(e)])
    ):
        costs[first::size] = [
            cost(tokens, attended, attention_cost)
            for tokens, attended in zip(numbers[::2], numbers[1::2], strict=True)
        ]
    mine = largest_differencing(costs, size)[rank]
    add([index for index in mine if index not in known])
    return [known[index] for index in mine]


def _work(preference: Encoded) -> tuple[int, int]:
    """Tokens of the documents, and the sum of their squares."""
    return sum(preference.lengths), sum(n**2 for n in preference.lengths)


def num_sides(preferences: Sequence[Preference]) -> tuple[int, int]:
    """Chosen and rejected completions among preferences.

    >>> num_sides([Preference("a", (), "x", "y"), Preference("b", (), "x", None)])
    (2, 1)
    """
    return (
        sum(p.chosen is not None for p in preferences),
        sum(p.rejected is not None for p in preferences),
    )
