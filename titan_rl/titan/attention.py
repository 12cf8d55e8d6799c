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

_BUCKET_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """Where documents lie in the rows of a batch, in buckets of similar length.

    A bucket of n documents of at most L tokens is computed as one batch ``[n, L]``. Shorter documents are
    filled up at their end, where causal attention never looks from a real token.

    Attributes:
        num_tokens: B * T, tokens of the batch.
        gather: Per bucket the flat token indices ``[n, L]``; filled up with each document's last token.
        scatter: Per bucket the positions ``[m]`` of the m real tokens among the n * L.
    """

    num_tokens: int
    gather: tuple[torch.Tensor, ...]
    scatter: tuple[torch.Tensor, ...]

    @classmethod
    def from_positions(cls, positions: torch.Tensor) -> DocumentSpans:
        """Documents start where the position is 0, and at the start of a row.

        Args:
            positions: ``[B, T]`` integers, position of each token in its document.

        >>> spans = DocumentSpans.from_positions(torch.tensor([[0, 1, 2, 0, 1]]))
        >>> [bucket.tolist() for bucket in spans.gather]
        [[[3, 4]], [[0, 1, 2]]]
        """
        is_start = positions == 0
        is_start[:, 0] = True
        starts = is_start.reshape(-1).nonzero().squeeze(1)
        ends = torch.cat([starts[1:], starts.new_tensor([positions.numel()])])
        lengths = ends - starts
        gather, scatter = [], []
        for chosen in _buckets(lengths.tolist()):
            index = torch.tensor(chosen, device=positions.device)
            longest = int(lengths[index].max())
            offsets = torch.arange(longest, device=positions.device)
            is_real = offsets < lengths[index, None]
            gather.append(starts[index, None] + torch.minimum(offsets, lengths[index, None] - 1))
            scatter.append(is_real.reshape(-1).nonzero().squeeze(1))
        return cls(positions.numel(), tuple(gather), tuple(scatter))


def _buckets(lengths: list[int]) -> list[list[int]]:
    """Indices of documents, shortest first, in buckets whose lengths differ by at most a quarter.

    >>> _buckets([10, 3, 12, 40])
    [[1], [0, 2], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    buckets: list[list[int]] = []
    limit = 0.0
    for index in order:
        if not buckets or lengths[index] > limit:
            buckets.append([])
            limit = lengths[index] * _BUCKET_GROWTH
        buckets[-1].append(index)
    return buckets


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
        if isinstance(attention_masks, DocumentSpans):
            return _attend_per_document(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, enable_gqa)
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
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
    """Causal attention of every document by itself; tensors are ``[B, L, N, H]``."""
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    out = flat[0].new_zeros(documents.num_tokens, query.shape[2], value.shape[-1])
    for gather, scatter in zip(documents.gather, documents.scatter, strict=True):
        bucket = [_GatherDocuments.apply(x, gather, scatter).transpose(1, 2) for x in flat]
        part = F.scaled_dot_product_attention(*bucket, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        real = part.transpose(1, 2).flatten(0, 1).index_select(0, scatter)
        out = out.index_copy(0, gather.reshape(-1)[scatter], real)
    return out.view(*query.shape[:3], value.shape[-1])


class _GatherDocuments(torch.autograd.Function):
    """``x[gather]``, with a gradient that leaves the filled-up places out.

    No real query attends to a filled-up key and the outputs of filled-up queries are dropped, so their
    gradients are zero; without them no token occurs twice and no slow accumulating scatter is needed.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gather, scatter)
        ctx.shape = x.shape
        return x.index_select(0, gather.reshape(-1)).view(*gather.shape, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyrefly: ignore[bad-override]
        gather, scatter = ctx.saved_tensors
        real = grad.flatten(0, 1).index_select(0, scatter)
        return grad.new_zeros(ctx.shape).index_copy_(0, gather.reshape(-1)[scatter], real), None, None


def _dense_mask(mask: BlockMask, num_queries: int, num_keys: int) -> torch.Tensor:
    """The dense form of a block mask, made once per batch and shared by all layers."""
    dense = getattr(mask, "_titan_rl_dense", None)
    if dense is None:
        with torch.no_grad():
            rows, heads = mask.shape[:2]
            dense = create_mask(mask.mask_mod, rows, heads, num_queries, num_keys, device="cpu")
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
    attention: Any = titan_attention
    attention._compiled_create_block_mask = create_block_mask
    decoder = titan_decoder.Decoder
    original = decoder._create_flex_attention_mask_for_document

    def document_mask(self: Any, positions: torch.Tensor, attn_config: Any) -> DocumentSpans | BlockMask:
        inner = attn_config.inner_attention
        if isinstance(inner, CpuDocumentAttention.Config) and inner.per_document:
            return DocumentSpans.from_positions(positions)
        return original(self, positions, attn_config)

    decoder._create_flex_attention_mask_for_document = document_mask
