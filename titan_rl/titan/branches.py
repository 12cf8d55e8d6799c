"""Where documents and their branches lie in packed rows, from positions alone.

Positions count 0, 1, 2, ... from the start of a document. Where they restart at p > 0, a *branch* of the
document begins: it continues the document's first p tokens, its *prefix*, and sees them and itself, but
neither the rest of the document nor another branch. So siblings of a group share one computed prompt. How
rows get such positions is in :mod:`titan_rl.batching.pack`; why nothing else is needed in
docs/adr/0007-one-pass-over-a-shared-prompt.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Documents and branches of ``[B, T]`` tokens; together they hold each token once. All ``[B, T]`` int64.

    Attributes:
        document_start: Place in its row of the start of each token's document.
        piece_start: Of the start of its piece: the document's, or its branch's.
        prefix_end: Of the end of its prefix; ``document_start`` where there is none.
    """

    document_start: torch.Tensor
    piece_start: torch.Tensor
    prefix_end: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor) -> Pieces:
        """Find them.

        A document starts where the position is 0, and at the start of a row.

        Args:
            positions: ``[B, T]`` integers.

        >>> pieces = Pieces.of(torch.tensor([[0, 1, 2, 3, 2, 3, 0]]))
        >>> pieces.document_start.tolist(), pieces.piece_start.tolist()
        ([[0, 0, 0, 0, 0, 0, 6]], [[0, 0, 0, 0, 4, 4, 6]])
        >>> pieces.prefix_end.tolist()
        [[0, 0, 0, 0, 2, 2, 6]]
        """
        place = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        starts_document, starts_branch = _starts(positions)
        document_start = torch.where(starts_document, place, 0).cummax(1).values
        piece_start = torch.where(starts_document | starts_branch, place, 0).cummax(1).values
        # Counted from the document's own first position, in case a row begins in the middle of one.
        prefix = positions.gather(1, piece_start) - positions.gather(1, document_start)
        return cls(document_start, piece_start, document_start + prefix)


def _starts(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two ``[B, T]`` masks: starts of documents, and of branches."""
    starts_document = positions == 0
    starts_document[:, 0] = True
    starts_branch = torch.zeros_like(starts_document)
    starts_branch[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return starts_document, starts_branch & ~starts_document


def has_branches(positions: torch.Tensor) -> bool:
    """Whether any document has a branch (waits for the device when the tensor is on one).

    Args:
        positions: ``[B, T]`` integers.

    >>> has_branches(torch.tensor([[0, 1, 2, 0, 1]])), has_branches(torch.tensor([[0, 1, 2, 1, 2]]))
    (False, True)
    """
    return bool(_starts(positions)[1].any())


def branch_mask_mod(positions: torch.Tensor) -> MaskMod:
    """Attention within documents and branches, as a mask function of FlexAttention.

    Token q sees token k of the same row when ``k <= q``, k is of the document, and k is of q's own piece or
    of its prefix. Without branches it is causal attention within documents.

    Args:
        positions: ``[B, T]`` integers.
    """
    pieces = Pieces.of(positions)
    document_start, piece_start, prefix_end = (
        x.to(torch.int32) for x in (pieces.document_start, pieces.piece_start, pieces.prefix_end)
    )

    def branch_mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        in_piece_or_prefix = (k >= piece_start[b, q]) | (k < prefix_end[b, q])
        return (k <= q) & (k >= document_start[b, q]) & in_piece_or_prefix

    return branch_mask


def sharers(positions: torch.Tensor) -> torch.Tensor:
    """How many samples each token is of: 1, and in a document's prefix 1 for each of its branches more.

    Args:
        positions: ``[B, T]`` integers.

    Returns:
        ``[B, T]`` int64.

    >>> sharers(torch.tensor([[0, 1, 2, 3, 2, 3, 2, 0]])).tolist()
    [[3, 3, 1, 1, 1, 1, 1, 1]]
    """
    pieces = Pieces.of(positions)
    # +1 at the start of a branch's document, -1 at the end of its prefix; their running sum is the number.
    begins = _starts(positions)[1].to(torch.int64)
    steps = torch.zeros(
        positions.shape[0], positions.shape[1] + 1, dtype=torch.int64, device=positions.device
    )
    steps.scatter_add_(1, pieces.document_start, begins)
    steps.scatter_add_(1, pieces.prefix_end, -begins)
    return 1 + steps.cumsum(1)[:, :-1]


def knows_branches(model_config: Any) -> bool:
    """Whether attention of a model can follow branches.

    It can where TorchTitan's decoder makes the masks of all layers from the positions, for FlexAttention. It
    cannot with masks of the model's own (sliding windows, linear attention) or with variable-length kernels,
    which know documents only.

    Args:
        model_config: TorchTitan's configuration of a decoder.
    """
    model: Any = getattr(type(model_config), "_owner", None)
    names = ("get_attention_masks", "_create_flex_attention_mask_for_document")
    is_plain = all(getattr(model, name, None) is getattr(Decoder, name) for name in names)
    return is_plain and isinstance(
        getattr(model_config.first_attention, "inner_attention", None), FlexAttention.Config
    )
