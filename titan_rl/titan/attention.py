"""Attention over packed rows on a CPU, at a cost per document instead of per row.

TorchTitan's FlexAttention has no backward pass on a CPU. :class:`CpuDocumentAttention` takes its place: a
row holds several documents, each attends only within itself, and each is one causal
``scaled_dot_product_attention``, so that no mask over the whole row exists. A branch of a document also
attends to its prefix. Sliding windows and other masks fall back to a dense mask.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torchtitan.models.common.attention import FlexAttention

from titan_rl.titan.branches import Pieces, branch_mask_mod, has_branches

_BUCKET_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Stretches:
    """n stretches of at most L consecutive tokens, filled up at their end to ``[n, L]``.

    Attributes:
        gather: Flat token indices ``[n, L]``; filled up with each stretch's last token.
        scatter: Positions ``[m]`` of the m real tokens among the n * L.
        tokens: Flat indices ``[m]`` of the real tokens, each once.
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, lengths: torch.Tensor) -> Stretches:
        """From flat starts ``[n]`` and lengths ``[n]``, at least 1."""
        offsets = torch.arange(int(lengths.max()), device=starts.device)
        is_real = offsets < lengths[:, None]
        gather = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
        scatter = is_real.reshape(-1).nonzero().squeeze(1)
        return cls(gather, scatter, gather.reshape(-1)[scatter])


@dataclass(frozen=True, slots=True)
class Branches:
    """n branches of similar length, whose prefixes are of similar length too.

    Attributes:
        own: Their own tokens, at most L.
        prefix: The prefixes of f documents, each document's longest, at most S tokens.
        prefix_of: ``[n]``, which of the prefixes.
        mask: ``[n, 1, L, S + L]`` bool, or ``[1, 1, L, S + L]`` when all prefixes have S tokens: True where a
            token sees one of the prefix (first) or of its own branch.
    """

    own: Stretches
    prefix: Stretches
    prefix_of: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(
        cls, starts: torch.Tensor, lengths: torch.Tensor, prefix_starts: torch.Tensor, prefixes: torch.Tensor
    ) -> Branches:
        """From flat starts and lengths ``[n]``, of the branches and of their prefixes."""
        # Of a document the longest prefix alone: two would have tokens in common (see _GatherStretches).
        distinct, prefix_of = torch.unique(prefix_starts, return_inverse=True)
        most = torch.zeros_like(distinct).scatter_reduce(0, prefix_of, prefixes, "amax")
        longest, own_length = int(prefixes.max()), int(lengths.max())
        sees_prefix = torch.arange(longest, device=starts.device) < prefixes[:, None]
        if bool((prefixes == longest).all()):
            sees_prefix = sees_prefix[:1]
        sees_own = torch.ones(own_length, own_length, dtype=torch.bool, device=starts.device).tril()
        mask = torch.cat(
            [
                sees_prefix[:, None, None].expand(-1, 1, own_length, -1),
                sees_own.expand(len(sees_prefix), 1, -1, -1),
            ],
            dim=-1,
        )
        return cls(Stretches.of(starts, lengths), Stretches.of(distinct, most), prefix_of, mask)


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """Where documents and their branches lie in the rows of a batch, in buckets of similar length.

    A bucket of n documents of at most L tokens is computed as one batch ``[n, L]``. Shorter documents are
    filled up at their end, where causal attention never looks from a real token. Branches are computed
    likewise, their keys and values after those of their prefix (:mod:`titan_rl.titan.branches`).

    Attributes:
        num_tokens: B * T, tokens of the batch; each is in one document or one branch.
        documents: Buckets.
        branches: Buckets.
    """

    num_tokens: int
    documents: tuple[Stretches, ...]
    branches: tuple[Branches, ...]

    @classmethod
    def from_positions(cls, positions: torch.Tensor) -> DocumentSpans:
        """Documents start where the position is 0, and at the start of a row.

        Args:
            positions: ``[B, T]`` integers, position of each token in its document.

        Raises:
            ValueError: a branch continues more tokens than stand before it in its document.

        >>> spans = DocumentSpans.from_positions(torch.tensor([[0, 1, 2, 0, 1]]))
        >>> [bucket.gather.tolist() for bucket in spans.documents]
        [[[3, 4]], [[0, 1, 2]]]
        """
        pieces = Pieces.of(positions)
        row = torch.arange(positions.numel(), device=positions.device).view_as(positions)[:, :1]
        piece_start = (pieces.piece_start + row).reshape(-1)
        starts, lengths = torch.unique_consecutive(piece_start, return_counts=True)
        document_starts = (pieces.document_start + row).reshape(-1)[starts]
        prefixes = (pieces.prefix_end + row).reshape(-1)[starts] - document_starts
        is_branch = starts != document_starts
        length_of = dict(zip(starts.tolist(), lengths.tolist(), strict=True))
        for start, prefix in zip(
            document_starts[is_branch].tolist(), prefixes[is_branch].tolist(), strict=True
        ):
            if not 0 < prefix <= length_of[start]:
                raise ValueError(
                    f"positions must restart within the document's {length_of[start]} tokens; got {prefix}."
                )
        documents = [
            Stretches.of(starts[index], lengths[index])
            for index in _indices(~is_branch, [lengths], positions.device)
        ]
        branches = [
            Branches.of(starts[index], lengths[index], document_starts[index], prefixes[index])
            for index in _indices(is_branch, [prefixes, lengths], positions.device)
        ]
        return cls(positions.numel(), tuple(documents), tuple(branches))


def _indices(chosen: torch.Tensor, sizes: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Indices of the chosen pieces in buckets that are of similar size in every respect."""
    indices = chosen.nonzero().squeeze(1).tolist()
    buckets = [indices]
    for size in sizes:
        values = size.tolist()
        buckets = [
            [bucket[i] for i in part] for bucket in buckets for part in _buckets([values[i] for i in bucket])
        ]
    return (torch.tensor(bucket, device=device) for bucket in buckets)


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
    spans: DocumentSpans,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of every document by itself, and of branches to their prefix; ``[B, L, N, H]``."""
    own = [*spans.documents, *(bucket.own for bucket in spans.branches)]
    prefixes = [bucket.prefix for bucket in spans.branches]
    queries = _gather(query, own)
    keys, values = (_gather(x, [*own, *prefixes]) for x in (key, value))
    parts = []
    for number, stretches in enumerate(own):
        bucket = [queries[number], keys[number], values[number]]
        options: dict[str, Any] = {"is_causal": True}
        branch = number - len(spans.documents)
        if branch >= 0:
            prefix_of = spans.branches[branch].prefix_of
            for place, tensors in ((1, keys), (2, values)):
                prefix = tensors[len(own) + branch].index_select(0, prefix_of)
                bucket[place] = torch.cat([prefix, bucket[place]], dim=1)
            options = {"attn_mask": spans.branches[branch].mask}
        q, k, v = (x.transpose(1, 2) for x in bucket)
        part = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa, **options)
        parts.append(part.transpose(1, 2).flatten(0, 1).index_select(0, stretches.scatter))
    tokens = torch.cat([stretches.tokens for stretches in own])
    out = query.new_zeros(spans.num_tokens, query.shape[2], value.shape[-1])
    return out.index_copy(0, tokens, torch.cat(parts)).view(*query.shape[:3], value.shape[-1])


def _gather(x: torch.Tensor, stretches: Sequence[Stretches]) -> tuple[torch.Tensor, ...]:
    """``[n, L, N, H]`` of ``[B, L, N, H]`` for each of the stretches."""
    indices = [index for part in stretches for index in (part.gather, part.scatter, part.tokens)]
    return _GatherStretches.apply(x.flatten(0, 1), *indices)


class _GatherStretches(torch.autograd.Function):
    """``x[gather]`` for several buckets, with a gradient that leaves the filled-up places out.

    No real query attends to a filled-up key and the outputs of filled-up queries are dropped, so their
    gradients are zero; without them no token occurs twice in a bucket and no slow accumulating scatter is
    needed. In several buckets a token occurs when it is in a document and in the prefix of branches.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: torch.Tensor, *indices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*indices[1::3], *indices[2::3])
        ctx.shape = x.shape
        return tuple(
            x.index_select(0, gather.reshape(-1)).view(*gather.shape, *x.shape[1:]) for gather in indices[::3]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        total = grads[0].new_zeros(ctx.shape)
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look at them is refused
        scatters, tokens = saved[: len(grads)], saved[len(grads) :]
        for scatter, token, grad in zip(scatters, tokens, grads, strict=True):
            rows = grad.flatten(0, 1).index_select(0, scatter)
            total.index_copy_(0, token, rows.add_(total.index_select(0, token)))
        return (total, *(None,) * (3 * len(grads)))


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


def install_on_cpu(titan_attention: types.ModuleType) -> None:
    """Make block masks without a compiler, also those of context parallelism.

    The compiler of context parallelism makes a mask anew for each length of a row, and gives up at the ninth.

    Args:
        titan_attention: The module ``torchtitan.models.common.attention``.
    """
    attention: Any = titan_attention
    context_parallel: Any = context_parallel_attention
    attention._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask


def install(titan_decoder: types.ModuleType) -> None:
    """Make TorchTitan's masks of packed documents know branches, and be :class:`DocumentSpans` on a CPU.

    Args:
        titan_decoder: The module ``torchtitan.models.common.decoder``.
    """
    decoder = titan_decoder.Decoder
    original = decoder._create_flex_attention_mask_for_document
    if getattr(original, "_knows_branches", False):
        return  # installed already

    def document_mask(self: Any, positions: torch.Tensor, attn_config: Any) -> DocumentSpans | BlockMask:
        inner = attn_config.inner_attention
        if isinstance(inner, CpuDocumentAttention.Config) and inner.per_document:
            return DocumentSpans.from_positions(positions)
        if has_branches(positions):
            return self._create_flex_attention_mask(positions, attn_config, [branch_mask_mod(positions)])
        return original(self, positions, attn_config)

    document_mask._knows_branches = True  # type: ignore[attr-defined]
    decoder._create_flex_attention_mask_for_document = document_mask
