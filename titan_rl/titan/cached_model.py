"""A whole TorchTitan decoder with a cache of keys and values, for generation token by token.

Here: the cache, the attention that reads it, and the forward passes. Sampling and scheduling are in
:mod:`titan_rl.generation.local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3 import MTPDecoder
from torchtitan.protocols.model import BaseModel
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan.models import build_unsharded

_SCORED_AT_ONCE = 256
"""Positions whose logits exist at a time while scoring."""


@dataclass(slots=True)
class _Capacity:
    """Size of the cache that all layers shall have, in rows and in tokens of a row."""

    num_rows: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Prefill:
    """First pass over whole prompts, padded on the right. ``rows``: which prompt each cache row takes."""

    first_row: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Score:
    """A causal pass that leaves the cache alone."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """One token for each of the first B cache rows.

    ``lengths [B]``: tokens already cached. ``mask [B, 1, 1, S]``: True at the S cached positions that a row
    attends to, its new token included.
    """

    lengths: torch.Tensor
    mask: torch.Tensor


class CachedAttention(nn.Module):
    """Takes the place of a TorchTitan ``inner_attention``. Its cache is ``[rows, tokens, heads, dim]``."""

    def __init__(self, capacity: _Capacity) -> None:
        super().__init__()
        self._capacity = capacity
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803 (TorchTitan's names)
        k_BLKH: torch.Tensor,  # noqa: N803
        v_BLKH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: _Prefill | _Score | _Decode,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Causal attention over cached and new tokens.

        Args:
            q_BLNH: Queries ``[B, L, N, H]``, rotated.
            k_BLKH: Keys ``[B, L, K, H]``, rotated; query head n reads key head ``n // (N / K)``.
            v_BLKH: Values ``[B, L, K, Hv]``.
            attention_masks: What this pass does with the cache; TorchTitan's layers hand it through.
            scale: Factor on the scores; ``H ** -0.5`` if None.
            enable_gqa: Whether K < N.
            unsupported: Anything else must be None.

        Returns:
            ``[B, L, N, Hv]``.
        """
        for name, value in unsupported.items():
            if value is not None:
                raise _unsupported(f"an attention that passes {name}")
        if isinstance(attention_masks, _Decode):
            return self._decode(q_BLNH, k_BLKH, v_BLKH, step=attention_masks, scale=scale)
        if isinstance(attention_masks, _Prefill):
            self._store(k_BLKH, v_BLKH, step=attention_masks)
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)

    def _store(self, k: torch.Tensor, v: torch.Tensor, *, step: _Prefill) -> None:
        keys, values = self._grow(k, v)
        rows = slice(step.first_row, step.first_row + len(step.rows))
        keys[rows, : k.shape[1]] = k[step.rows]
        values[rows, : v.shape[1]] = v[step.rows]

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, step: _Decode, scale: float | None
    ) -> torch.Tensor:
        keys, values = self._grow(k, v)
        num_rows, num_keys = len(step.lengths), step.mask.shape[-1]
        rows = torch.arange(num_rows, device=q.device)
        keys[rows, step.lengths] = k[:, 0]
        values[rows, step.lengths] = v[:, 0]
        # The query heads that share a key head become its queries [B, K, N/K, H]: the cache is not repeated.
        grouped = q.reshape(num_rows, k.shape[2], -1, q.shape[-1])
        out = F.scaled_dot_product_attention(
            grouped,
            keys[:num_rows, :num_keys].transpose(1, 2),
            values[:num_rows, :num_keys].transpose(1, 2),
            attn_mask=step.mask,
            scale=scale,
        )
        return out.reshape(num_rows, 1, q.shape[2], -1)

    def _grow(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the cache its wanted size, keeping its contents."""
        self.keys = keys = _grown(self.keys, self._capacity, like=k)
        self.values = values = _grown(self.values, self._capacity, like=v)
        return keys, values


def _grown(old: torch.Tensor | None, capacity: _Capacity, *, like: torch.Tensor) -> torch.Tensor:
    if old is not None and old.shape[:2] == (capacity.num_rows, capacity.num_tokens):
        return old
    # Zeros: whatever lies at masked positions is multiplied by an attention weight of 0, and 0 * NaN is NaN.
    new = like.new_zeros(capacity.num_rows, capacity.num_tokens, *like.shape[2:])
    if old is not None:
        new[: old.shape[0], : old.shape[1]] = old
    return new


class CachedModel:
    """A decoder that continues several sequences at once, one row of the cache for each.

    Rows are dense: a sequence that ends gives its row to the last one (:meth:`move`), so that no pass
    computes or copies a row that nobody needs. The caller keeps track of rows and lengths.
    """

    def __init__(self, model: Decoder, *, max_rows: int, max_tokens: int) -> None:
        """Put a cache into a model.

        Args:
            model: A whole decoder, on the device where it runs, that :func:`check_supported` accepts.
            max_rows: Most rows.
            max_tokens: Most tokens of a row.
        """
        self.model = model
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._capacity = _Capacity()
        self._device = next(model.parameters()).device
        self._attentions = []
        model._skip_lm_head = True  # logits are computed only where a token is sampled or scored
        for layer in model.layers.values():
            attention = CachedAttention(self._capacity)
            cast(Any, layer).attention.inner_attention = attention
            self._attentions.append(attention)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[tuple[int, ...]], *, first_row: int) -> torch.Tensor:
        """Run prompts and cache them; equal prompts are computed once.

        Args:
            prompts: M prompts of at least one token, for the rows from ``first_row`` on.
            first_row: The first free row.

        Returns:
            ``[M, V]`` fp32 logits of the token after each prompt.
        """
        distinct = list(dict.fromkeys(prompts))
        order = {prompt: index for index, prompt in enumerate(distinct)}
        rows = self._tensor([order[prompt] for prompt in prompts])
        width = max(len(prompt) for prompt in distinct)
        self._reserve(first_row + len(prompts), width)
        tokens = self._tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in distinct])
        hidden = self._run(tokens, torch.arange(width, device=self._device)[None], _Prefill(first_row, rows))
        last = self._tensor([len(prompt) - 1 for prompt in distinct])
        return self._logits(hidden[torch.arange(len(distinct), device=self._device), last])[rows]

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the first M rows.

        Args:
            tokens: M tokens.
            lengths: Tokens that each row has cached already.

        Returns:
            ``[M, V]`` fp32 logits of the token after it.
        """
        width = max(lengths) + 1
        self._reserve(len(tokens), width)
        cached = self._tensor(lengths)
        mask = torch.arange(width, device=self._device)[None] <= cached[:, None]
        step = _Decode(cached, mask[:, None, None])
        return self._logits(self._run(self._tensor(tokens)[:, None], cached[:, None], step)[:, 0])

    @torch.no_grad()
    def score(self, tokens: tuple[int, ...], *, temperature: float) -> torch.Tensor:
        """Log-probabilities ``[N - 1]``, fp32, of the tokens 1 to N - 1 of one sequence; no cache is used."""
        positions = torch.arange(len(tokens) - 1, device=self._device)[None]
        ids = self._tensor(tokens)
        hidden = self._run(ids[None, :-1], positions, _Score())[0]
        scores = []
        for states, targets in zip(
            hidden.split(_SCORED_AT_ONCE), ids[1:].split(_SCORED_AT_ONCE), strict=True
        ):
            logprobs = F.log_softmax(self._logits(states) / temperature, dim=-1)
            scores.append(logprobs.gather(1, targets[:, None])[:, 0])
        return torch.cat(scores)

    def move(self, source: int, *, target: int) -> None:
        """Copy one row of the cache over another."""
        for attention in self._attentions:
            for cache in (attention.keys, attention.values):
                if cache is not None:
                    cache[target] = cache[source]

    def drop_cache(self) -> None:
        """Free the cache."""
        self._capacity.num_rows = self._capacity.num_tokens = 0
        for attention in self._attentions:
            attention.keys = attention.values = None

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Enlarge the cache by doubling, so that growing copies each entry a bounded number of times."""
        capacity = self._capacity
        if num_rows > capacity.num_rows:
            capacity.num_rows = min(self._max_rows, max(num_rows, 2 * capacity.num_rows))
        if num_tokens > capacity.num_tokens:
            capacity.num_tokens = min(self._max_tokens, max(num_tokens, 64, 2 * capacity.num_tokens))

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: _Prefill | _Score | _Decode
    ) -> torch.Tensor:
        """Hidden states ``[B, L, D]`` after the last norm."""
        return self.model(tokens, positions, cast(Any, step))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden).float()

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def build_cached_model(
    model_config: BaseModel.Config, *, dtype: str, max_rows: int, max_tokens: int
) -> CachedModel:
    """Build a whole copy of a model on this process's device. Its weights are not set.

    Args:
        model_config: TorchTitan's configuration, without a rank's parallelism in it; not modified.
        dtype: ``"float32"`` or ``"bfloat16"``, of weights and cache.
        max_rows: Most sequences at once.
        max_tokens: Most tokens of a sequence.

    Raises:
        ConfigError: The model's layers do something that this cache would compute differently.
    """
    with torch.device("meta"):
        check_supported(model_config.build())
    # The initialiser draws values that are overwritten; the run's own draws must not notice.
    devices = [torch.cuda.current_device()] if titan_utils.device_type == "cuda" else []
    with torch.random.fork_rng(devices), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[dtype]):
        model = build_unsharded(model_config, max_seq_len=max_tokens)
    return CachedModel(cast(Decoder, model), max_rows=max_rows, max_tokens=max_tokens)


def check_supported(model: nn.Module) -> None:
    """Refuse models whose attention is not plainly causal, or that keep other state than keys and values.

    Supported are decoders with TorchTitan's own ``Decoder.forward`` and masks, in which every layer has an
    ``attention.inner_attention``: Llama 3, Qwen3 (dense and MoE), DeepSeek-V3 without layers that predict
    further tokens, and a user's own of that form.

    Raises:
        ConfigError: The model is another one.
    """
    kind = type(model)
    if not isinstance(model, Decoder):
        raise _unsupported(f"{kind.__name__}, which is no TorchTitan Decoder")
    # Without layers that predict further tokens, its forward pass is the decoder's.
    is_plain = kind.forward is MTPDecoder.forward and model.mtp_layers is None
    for method in ("forward", "get_attention_masks"):
        if getattr(kind, method) is not getattr(Decoder, method) and not (method == "forward" and is_plain):
            raise _unsupported(f"{kind.__name__}, which has its own {method}")
    for name, layer in model.layers.items():
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        is_causal = isinstance(inner, FlexAttention | ScaledDotProductAttention) or (
            isinstance(inner, VarlenAttention) and tuple(inner.window_size) == (-1, 0)
        )
        if not is_causal:
            raise _unsupported(f"layer {name} with {type(inner).__name__} as its inner attention")


def _unsupported(got: str) -> ConfigError:
    return ConfigError(
        'generator.type = "local"',
        "be used with a decoder whose layers all have plain causal attention",
        got,
        'Set generator.type = "vllm" if vLLM knows the architecture.',
    )
