"""Attention over packed rows on a CPU, at a cost per document instead of per row.

TorchTitan's FlexAttention has no backward pass on a CPU. :class:`CpuDocumentAttention` takes its place: a
row holds several documents, each attends only within itself, and each is one causal
``scaled_dot_product_attention``, so that no mask over the whole row exists. Sliding windows and other
masks that are not plain causal documents fall back to a dense mask.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torchtitan.models.common.attention import FlexAttention


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """Where documents lie in the rows of a batch.

    Attributes:
        spans: For each row the ``(start, end)`` of its documents, in order, covering the row.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def from_positions(cls, positions: torch.Tensor) -> DocumentSpans:
        """Documents start where the position is 0.

        Args:
            positions: ``[B, T]`` integers, position of each token in its document.

        >>> DocumentSpans.from_positions(torch.tensor([[0, 1, 2, 0, 1]])).spans
        (((0, 3), (3, 5)),)
        """
        rows = []
        for row in positions.tolist():
            starts = [i for i, position in enumerate(row) if position == 0 or i == 0]
            rows.append(tuple(zip(starts, [*starts[1:], len(row)], strict=True)))
        return cls(tuple(rows))


class CpuDocumentAttention(FlexAttention):
    """FlexAttention's place-holder on a CPU. A subclass, so that TorchTitan's checks for it still hold."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """``block_size`` and ``kernel_options`` of the parent concern GPU kernels; not carried over."""

        per_document: bool = True
        """Attend per document. False: a dense mask over the row, made from TorchTitan's block mask."""

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803 (TorchTitan passes these by name)
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: DocumentSpans | BlockMask,
        score_mod: Callable[..., torch.Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend within each document.

        Args:
            q_BLNH: Queries ``[B, L, N, H]``.
            k_BLNH: Keys ``[B, L, K, H]``, K dividing N when ``enable_gqa``.
            v_BLNH: Values ``[B, L, K, H]``.
            attention_masks: :class:`DocumentSpans`, or a ``BlockMask`` for any other mask.
            score_mod: Not supported on a CPU.
            scale: Factor on the scores; ``H ** -0.5`` if None.
            enable_gqa: Whether several query heads share a key head.
            out_transform: Not supported on a CPU.
            kwargs: Ignored, as in FlexAttention.

        Returns:
            ``[B, L, N, H]``.
        """
        if score_mod is not None or out_transform is not None:
            raise NotImplementedError("CPU attention supports neither score_mod nor out_transform.")
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if isinstance(attention_masks, DocumentSpans):
            out = _attend_per_document(query, key, value, attention_masks, scale, enable_gqa)
        else:
            mask = _dense_mask(attention_masks, query.shape[2], key.shape[2])
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
        return out.transpose(1, 2)


def _attend_per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: DocumentSpans,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of every document by itself; tensors are ``[B, N, L, H]``."""
    rows = []
    for row, spans in enumerate(documents.spans):
        parts = [
            F.scaled_dot_product_attention(
                query[row : row + 1, :, start:end],
                key[row : row + 1, :, start:end],
                value[row : row + 1, :, start:end],
                is_causal=True,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            for start, end in spans
        ]
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows, dim=0)


def _dense_mask(mask: BlockMask, num_queries: int, num_keys: int) -> torch.Tensor:
    """The dense form of a block mask, made once per batch and shared by all layers."""
    dense = getattr(mask, "_titan_rl_dense", None)
    if dense is None:
        with torch.no_grad():
            dense = create_mask(mask.mask_mod, mask.shape[0], 1, num_queries, num_keys, device="cpu")
        mask._titan_rl_dense = dense  # type: ignore[attr-defined]
    return dense


def use_cpu_attention(model_config: Any, *, per_document: bool = True) -> None:
    """Swap every FlexAttention in a model's configuration for :class:`CpuDocumentAttention`, in place.

    Args:
        model_config: TorchTitan's configuration tree of a model.
        per_document: False keeps block masks, which context parallelism shards over ranks.
    """
    for _, config, parent, attribute in list(model_config.traverse(FlexAttention.Config)):
        swapped = CpuDocumentAttention.Config(
            param_init=config.param_init, sharding_config=config.sharding_config, per_document=per_document
        )
        if isinstance(parent, list):
            parent[attribute] = swapped
        else:
            setattr(parent, attribute, swapped)


def install(titan_attention: types.ModuleType, titan_decoder: types.ModuleType) -> None:
    """Make TorchTitan build :class:`DocumentSpans` for packed documents, and other masks without a compiler.

    Args:
        titan_attention: The module ``torchtitan.models.common.attention``.
        titan_decoder: The module ``torchtitan.models.common.decoder``.
    """
    titan_attention._compiled_create_block_mask = create_block_mask
    decoder = titan_decoder.Decoder
    original = decoder._create_flex_attention_mask_for_document

    def document_mask(self: Any, positions: torch.Tensor, attn_config: Any) -> DocumentSpans | BlockMask:
        inner = attn_config.inner_attention
        if isinstance(inner, CpuDocumentAttention.Config) and inner.per_document:
            return DocumentSpans.from_positions(positions)
        return original(self, positions, attn_config)

    decoder._create_flex_attention_mask_for_document = document_mask
