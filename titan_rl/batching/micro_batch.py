"""The tensors of one forward-backward. How samples get into it is in :mod:`titan_rl.batching.pack`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B rows of T tokens for one forward-backward. A row holds whole samples ("documents"), then padding.

    ``targets``, ``loss_mask``, ``generator_logprobs`` and ``advantages`` are aligned with the *prediction*:
    what stands at index ``t`` is about the token at ``t + 1`` of the same document.

    Attributes:
        input_ids: ``[B, T]`` int64 token ids; 0 in the padding.
        positions: ``[B, T]`` int64, 0, 1, 2, ... from the start of each document; the padding at the end of a
            row is a document too. A sample that shares its prompt with the document before it begins with the
            prompt's last token, at that token's position. So attention can be kept inside samples from this
            tensor alone.
        targets: ``[B, T]`` int64, the next token of the same document where it is trained, else 0.
        loss_mask: ``[B, T]`` bool, True at ``t`` when ``targets[t]`` is trained.
        generator_logprobs: ``[B, T]`` fp32 natural logarithms of ``targets``; 0 where not trained.
        advantages: ``[B, T]`` fp32, the sample's advantage where a token is trained, else 0.
        sample_index: ``[B, T]`` int64, index into the list of samples that was packed; -1 in the padding.
        document_lengths: Per row, the lengths of its samples in order, without the padding and without the
            tokens that they share with the sample before them.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    sample_index: torch.Tensor
    document_lengths: list[list[int]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the attributes, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @classmethod
    def empty(cls, rows: int, length: int) -> Self:
        """Nothing but padding, nothing trained: for a rank that ran out of samples, so that it stays in step.

        Args:
            rows: B, at least 1.
            length: T, at least 1.

        >>> MicroBatch.empty(1, 3).positions.tolist()
        [[0, 1, 2]]
        """
        if rows < 1 or length < 1:
            raise ValueError(f"rows and length must be at least 1; got {rows} and {length}.")
        return cls(
            input_ids=torch.zeros(rows, length, dtype=torch.int64),
            positions=torch.arange(length).repeat(rows, 1),
            targets=torch.zeros(rows, length, dtype=torch.int64),
            loss_mask=torch.zeros(rows, length, dtype=torch.bool),
            generator_logprobs=torch.zeros(rows, length),
            advantages=torch.zeros(rows, length),
            sample_index=torch.full((rows, length), -1),
            document_lengths=[[] for _ in range(rows)],
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the same micro-batch with its tensors on ``device``."""
        names = [field.name for field in fields(self) if field.name != "document_lengths"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def num_loss_tokens(self) -> int:
        """Number of trained tokens (waits for the device when the tensors are on one)."""
        return int(self.loss_mask.sum())

    @property
    def num_attended(self) -> int:
        """Sum of ``2 x position + 1`` over the tokens without the padding: ``L^2`` for a whole sample of L.

        Waits for the device when the tensors are on one.
        """
        return int((2 * self.positions + 1)[self.sample_index >= 0].sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the padding."""
        return sum(map(sum, self.document_lengths))
