"""Documents of supervised runs: drawn from a mixture, encoded, and packed whole into rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt

from titan_rl import heartbeat
from titan_rl.config.choice import Choice, build
from titan_rl.data.arithmetic import Arithmetic
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import DATASETS
from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.titan.api import IGNORE_INDEX, BaseDataLoader, logger
from titan_rl.types import Prompt

_MOST_SKIPPED = 10_000
"""Documents in a row that may be too long: as many hardly come by chance."""


@dataclass(kw_only=True, slots=True)
class SourceSection:
    """One entry of ``[[data.mixture]]``."""

    source: Annotated[object, Choice(DATASETS)] = field(default_factory=Arithmetic.Config)
    """Where prompts and answers come from; the training split is used."""

    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the documents, relative to the other entries."""


@dataclass(kw_only=True, slots=True)
class SupervisedDataSection:
    """Table ``[data]`` of a supervised run."""

    mixture: list[SourceSection] = field(default_factory=lambda: [SourceSection()])
    """One or more sources, drawn from in proportion to their weights."""

    system_prompt: str = ""
    """Put before every prompt as a system message; empty: none."""

    chat_template: Literal["auto", "on", "off"] = "auto"
    """Render with the tokenizer's chat template: if it has one, always, or never."""

    max_prompt_tokens: int = 512
    """Longest prompt, in tokens after the chat template."""

    train_on: Literal["assistant", "answer", "text"] = "assistant"
    """Train the answer and all earlier replies of the assistant (needs a chat template to tell them apart),
    the answer only, or all tokens of the document."""

    too_long: Literal["error", "skip"] = "error"
    """A document longer than ``training.seq_len`` ends the run, or is left out and counted."""


class Encoder:
    """From a prompt with its answer to documents: token ids, and True where a token is trained."""

    def __init__(self, section: SupervisedDataSection, *, tokenizer_dir: Path, row_tokens: int) -> None:
        """Load the tokenizer.

        Args:
            section: ``[data]``.
            tokenizer_dir: Directory with the tokenizer.
            row_tokens: Longest document, ``training.seq_len``.
        """
        self._section, self._row_tokens = section, row_tokens
        self._encoder = PromptEncoder(
            tokenizer_dir,
            system_prompt=section.system_prompt or None,
            max_prompt_tokens=section.max_prompt_tokens,
            use_chat_template={"auto": None, "on": True, "off": False}[section.chat_template],
        )
        self.num_skipped = 0

    def documents(self, prompt: Prompt) -> list[tuple[list[int], list[bool]]]:
        """The documents of a prompt that fit into a row: usually one, fewer when they are too long.

        Raises:
            ConfigError: a document is too long and ``too_long`` is ``"error"``, or the prompt has no answer.
        """
        if self._section.train_on == "assistant":
            found = self._encoder.encode_conversation(prompt)
        else:
            found = [self._encoder.encode_with_answer(prompt)]
        if self._section.train_on == "text":
            found = [(ids, [True] * len(ids)) for ids, _ in found]
        fitting = [(ids, trained) for ids, trained in found if len(ids) <= self._row_tokens]
        if len(fitting) < len(found):
            self._skip(prompt, max(len(ids) for ids, _ in found))
        return fitting

    def _skip(self, prompt: Prompt, length: int) -> None:
        if self._section.too_long == "error":
            raise ConfigError(
                "training.seq_len",
                f"hold every document; {prompt.id} has {length} tokens",
                self._row_tokens,
                'Raise it, or set data.too_long = "skip".',
            )
        if not self.num_skipped:
            logger.warning(
                "Documents longer than %d tokens are left out; the first is %s.", self._row_tokens, prompt.id
            )
        self.num_skipped += 1


@dataclass(slots=True)
class Row:
    """Whole documents one behind the other.

    Attributes:
        tokens: Token ids.
        positions: Position of each token in its document.
        labels: What each token predicts; ``IGNORE_INDEX`` where nothing is trained.
        documents: Number of the document that each token is of.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], trained: Sequence[bool], *, number: int = 0) -> None:
        """Append a document."""
        self.tokens += ids
        self.positions += range(len(ids))
        self.labels += [i if keep else IGNORE_INDEX for i, keep in zip(ids[1:], trained[1:], strict=True)]
        self.labels.append(IGNORE_INDEX)
        self.documents += [number] * len(ids)

    def pad(self, length: int) -> None:
        """Fill up to ``length`` tokens with a document that trains nothing."""
        missing = length - len(self.tokens)
        self.tokens += [0] * missing
        self.positions += range(missing)
        self.labels += [IGNORE_INDEX] * missing
        self.documents += [-1] * missing


def to_batch(rows: Sequence[Row]) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """``input`` and ``positions``, labels, and document numbers of padded rows: all ``[B, T]`` int64."""
    tokens, positions, labels, documents = (
        torch.tensor([getattr(row, name) for row in rows])
        for name in ("tokens", "positions", "labels", "documents")
    )
    return {"input": tokens, "positions": positions}, labels, documents


class MixtureStream:
    """An endless draw from several sources: the n-th document depends on the seed and n alone."""

    def __init__(self, section: SupervisedDataSection, seed: int) -> None:
        """Open all sources.

        Args:
            section: ``[data]``.
            seed: The run seed.
        """
        self._seed = seed
        self._streams = [
            PromptStream(build(entry.source, split="train"), derive_seed(seed, "mixture", index))
            for index, entry in enumerate(section.mixture)
        ]
        total = sum(entry.weight for entry in section.mixture)
        self._shares = [entry.weight / total for entry in section.mixture]

    def at(self, cursor: int) -> Prompt:
        """Document number ``cursor``."""
        if len(self._streams) == 1:
            return self._streams[0].at(cursor)[0]
        point = derive_seed(self._seed, "source", cursor) / 2**63
        for share, stream in zip(self._shares, self._streams, strict=True):
            if point < share:
                return stream.at(cursor)[0]
            point -= share
        return self._streams[-1].at(cursor)[0]


class SupervisedDataLoader(BaseDataLoader):
    """Packs whole documents into rows; all data-parallel ranks walk the same rows and keep every n-th."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Set by the trainer from ``[data]``."""

        section: SupervisedDataSection = field(default_factory=SupervisedDataSection)
        """The table."""

        seed: int = 0
        """The run seed."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        """Open the sources. The arguments are those that TorchTitan gives to every data loader."""
        self._stream = MixtureStream(config.section, config.seed)
        self._encoder = Encoder(
            config.section, tokenizer_dir=Path(tokenizer.tokenizer_path), row_tokens=seq_len
        )
        self._ranks, self._rank = dp_world_size, dp_rank
        self._row_tokens, self._rows = seq_len, local_batch_size
        self._cursor = self._part = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches without end: ``input`` and ``positions`` ``[B, T]``, and labels ``[B, T]``."""
        while True:
            with heartbeat.phase("data"):
                rows = [self._next_row() for _ in range(self._rows * self._ranks)]
                inputs, labels, _ = to_batch(rows[self._rank * self._rows : (self._rank + 1) * self._rows])
            yield inputs, labels

    def _next_row(self) -> Row:
        """The next documents that fit into one row, then padding."""
        row, num_empty = Row(), 0
        while True:
            documents = self._encoder.documents(self._stream.at(self._cursor))
            for ids, trained in documents[self._part :]:
                if len(row.tokens) + len(ids) > self._row_tokens:
                    row.pad(self._row_tokens)
                    return row
                row.add(ids, trained)
                self._part += 1
            self._cursor, self._part = self._cursor + 1, 0
            num_empty = 0 if documents else num_empty + 1
            if num_empty == _MOST_SKIPPED:
                raise ConfigError(
                    "training.seq_len",
                    'hold some documents, of which data.too_long = "skip" leaves out the longer ones',
                    f"{self._row_tokens}; {num_empty} in a row are longer",
                    "Raise it.",
                )

    def state_dict(self) -> dict[str, Any]:
        """The next document, equal on all ranks: its prompt's cursor, and which of the prompt's it is."""
        return {"cursor": torch.tensor(self._cursor), "part": torch.tensor(self._part)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a document, on any number of ranks."""
        if state_dict:
            self._cursor = int(state_dict["cursor"])
            self._part = int(state_dict.get("part", 0))
