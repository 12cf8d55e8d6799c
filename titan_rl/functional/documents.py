"""From values per token of packed rows to one value per document."""

from __future__ import annotations

import torch

from titan_rl.functional.shapes import check_same_shape


def document_sum(
    values: torch.Tensor, loss_mask: torch.Tensor, sample_index: torch.Tensor, num_documents: int
) -> torch.Tensor:
    """Sum over the trained tokens of each document, such as a sequence's log-probability.

    Args:
        values: ``[B, T]`` per token, with or without grad. What stands outside the mask has no influence.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, the document's number, -1 in the padding.
        num_documents: N.

    Returns:
        ``[N]``, with grad as ``values`` has it; 0 for a document without a trained token.

    >>> index = torch.tensor([[0, 0, 2], [1, 1, -1]])
    >>> document_sum(torch.ones(2, 3), index >= 0, index, 3).tolist()
    [2.0, 2.0, 1.0]
    """
    check_same_shape(values=values, loss_mask=loss_mask, sample_index=sample_index)
    empty = torch.zeros(num_documents, dtype=values.dtype, device=values.device)
    return empty.index_add(0, sample_index[loss_mask], values[loss_mask])


def at_last_token(values: torch.Tensor, sample_index: torch.Tensor, num_documents: int) -> torch.Tensor:
    """The value at the last token of each document, such as a reward model's.

    Args:
        values: ``[B, T]`` per token, with or without grad.
        sample_index: ``[B, T]`` int64, the document's number, -1 in the padding.
        num_documents: N; each number below it occurs.

    Returns:
        ``[N]``, with grad as ``values`` has it.

    >>> at_last_token(torch.arange(6.0).view(2, 3), torch.tensor([[0, 0, 2], [1, 1, -1]]), 3).tolist()
    [1.0, 4.0, 2.0]
    """
    check_same_shape(values=values, sample_index=sample_index)
    index = sample_index.flatten()
    places = torch.arange(index.numel(), device=index.device)
    is_document = index >= 0
    last = torch.zeros(num_documents, dtype=torch.int64, device=index.device)
    last = last.scatter_reduce(0, index[is_document], places[is_document], "amax")
    return values.flatten()[last]
