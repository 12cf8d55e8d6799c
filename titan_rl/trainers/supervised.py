"""Supervised training on prompts with answers: pretraining and SFT, by TorchTitan's own trainer.

Only the data loader is ours; the training step, checkpoints and metrics are TorchTitan's unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt

from titan_rl.config.choice import Choice, build
from titan_rl.data.arithmetic import Arithmetic
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import DATASETS
from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.titan.api import IGNORE_INDEX, BaseDataLoader, CheckpointManager, CrossEntropyLoss, Trainer
from titan_rl.titan.models import ModelSection
from titan_rl.trainers import assembly, checks, initial_weights
from titan_rl.trainers.exporting import export
from titan_rl.types import Prompt


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

    train_on: Literal["answer", "text"] = "answer"
    """Train the answer's tokens only, or all tokens of the document."""


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
        section = config.section
        self._stream = MixtureStream(section, config.seed)
        self._encoder = PromptEncoder(
            Path(tokenizer.tokenizer_path),
            system_prompt=section.system_prompt or None,
            max_prompt_tokens=section.max_prompt_tokens,
            use_chat_template={"auto": None, "on": True, "off": False}[section.chat_template],
        )
        self._trains_all = section.train_on == "text"
        self._ranks, self._rank = dp_world_size, dp_rank
        self._row_tokens, self._rows = seq_len, local_batch_size
        self._cursor = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches without end: ``input`` and ``positions`` ``[B, T]``, and labels ``[B, T]``."""
        while True:
            rows = [self._next_row() for _ in range(self._rows * self._ranks)]
            mine = rows[self._rank * self._rows : (self._rank + 1) * self._rows]
            tokens, positions, labels = (torch.tensor(list(part)) for part in zip(*mine, strict=True))
            yield {"input": tokens, "positions": positions}, labels

    def _next_row(self) -> tuple[list[int], list[int], list[int]]:
        """The next documents that fit into one row, then padding."""
        tokens: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        while True:
            prompt = self._stream.at(self._cursor)
            ids, trained = self._encoder.encode_with_answer(prompt)
            if len(ids) > self._row_tokens:
                raise ConfigError(
                    "training.seq_len",
                    f"hold every document; {prompt.id} has {len(ids)} tokens",
                    self._row_tokens,
                    "Raise it.",
                )
            if len(tokens) + len(ids) > self._row_tokens:
                break
            self._cursor += 1
            tokens += ids
            positions += range(len(ids))
            keep = [True] * len(ids) if self._trains_all else trained
            labels += [i if k else IGNORE_INDEX for i, k in zip(ids[1:], keep[1:], strict=True)]
            labels.append(IGNORE_INDEX)
        padding = self._row_tokens - len(tokens)
        return (
            tokens + [0] * padding,
            positions + list(range(padding)),
            labels + [IGNORE_INDEX] * padding,
        )

    def state_dict(self) -> dict[str, Any]:
        """The global document cursor, equal on all ranks."""
        return {"cursor": torch.tensor(self._cursor)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a cursor, on any number of ranks."""
        if state_dict:
            self._cursor = int(state_dict["cursor"])


class SupervisedTrainer(Trainer):
    """TorchTitan's trainer on our prompts and answers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's sections, ``[model]`` and ``[data]``."""

        model: ModelSection = field(default_factory=ModelSection)
        """Which model."""
        data: SupervisedDataSection = field(default_factory=SupervisedDataSection)
        """Which documents."""
        # TorchTitan types these fields by their base classes; each is built by its own class alone.
        loss: CrossEntropyLoss.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=CrossEntropyLoss.Config
        )
        dataloader: SupervisedDataLoader.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=SupervisedDataLoader.Config
        )
        checkpoint: CheckpointManager.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=CheckpointManager.Config
        )

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]  # narrower, as the class above is

    def __init__(self, config: Config) -> None:
        """Hand ``[data]`` to the data loader, then let TorchTitan build.

        Raises:
            ConfigError: the configuration contradicts itself.
        """
        checks.check_supervised_config(config, world_size=assembly.world_size_from_env())
        self.hf_config = assembly.hf_config(config) if assembly.needs_hf_config(config) else None
        config.dataloader = SupervisedDataLoader.Config(
            section=config.data, seed=config.debug.seed if config.debug.seed is not None else 0
        )
        super().__init__(config)

    def train(self) -> None:
        """Load the initial weights, let TorchTitan train, and export.

        A checkpoint of the run takes precedence over the initial weights.
        """
        initial_weights.load(self)
        super().train()
        if self.config.model.export:
            export(self)
