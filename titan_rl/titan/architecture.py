"""What a decoder's configuration says of its sizes: the numbers that layouts and plans are computed from.

Read from TorchTitan's configuration tree, so that nothing has to be built. Not here: what follows from the
sizes (:mod:`titan_rl.trainers.layout`, :mod:`titan_rl.tools.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a mixture-of-experts layer.

    Attributes:
        num_experts: E.
        top_k: Experts that a token goes to.
        hidden_dim: F of one expert.
        shared_hidden_dim: F of the experts that every token goes to; 0 without.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    shared_hidden_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder.

    Attributes:
        dim: D, width of the hidden states.
        vocab_size: V.
        num_layers: Transformer layers.
        num_heads: Query heads N.
        num_kv_heads: Key and value heads K.
        qk_head_dim: Width of a query or key head.
        v_head_dim: Width of a value head.
        hidden_dims: F of each layer's feed-forward; 0 where a layer has experts.
        experts: Per layer, or None where a layer is dense.
        is_tied: Whether embedding and output projection are one matrix.
        has_qk_norm: Whether queries and keys are normalised.
        has_fused_qkv: Whether queries, keys and values come out of one matrix product.
        is_complex_rope: Whether the rotary embedding multiplies complex numbers (Llama) rather than cosines
            and sines (Qwen).
        latent_kv_dim: Numbers per token and layer in a KV cache of multi-head latent attention; 0 for
            grouped-query attention.
        max_seq_len: Longest row that its rotary embedding is made for.
        is_flex: Whether attention is FlexAttention.
    """

    dim: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    hidden_dims: tuple[int, ...]
    experts: tuple[Experts | None, ...]
    is_tied: bool
    has_qk_norm: bool = False
    has_fused_qkv: bool = True
    is_complex_rope: bool = True
    latent_kv_dim: int = 0
    max_seq_len: int = 0
    is_flex: bool = True

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has them; 0 for a dense model."""
        return next((experts.num_experts for experts in self.experts if experts is not None), 0)

    @property
    def attention_cost(self) -> float:
        """What attending to one more token costs, as a share of a token's matrix products.

        ``b / a`` of ``a L + b L^2``, the floating-point operations of a sample of L tokens: ``a = 2 x weights
        that a token is multiplied with``, and ``b = layers x heads x (query + value width)``, in causal
        attention half of ``2 x ... x L`` per token. Multi-head latent attention is counted as if its heads
        were not compressed.
        """
        qkv = self.num_heads * self.qk_head_dim + self.num_kv_heads * (self.qk_head_dim + self.v_head_dim)
        weights = self.vocab_size * self.dim
        for hidden_dim, experts in zip(self.hidden_dims, self.experts, strict=True):
            if experts is not None:
                hidden_dim += experts.top_k * experts.hidden_dim + experts.shared_hidden_dim
            weights += self.dim * (qkv + self.num_heads * self.v_head_dim + 3 * hidden_dim)
        attention = self.num_layers * self.num_heads * (self.qk_head_dim + self.v_head_dim)
        return attention / (2 * weights)


def architecture_of(model_config: Any) -> Architecture:
    """Read the sizes off TorchTitan's configuration of a decoder.

    Args:
        model_config: ``Decoder.Config``: of a model spec, before or after ``update_from_config``.
    """
    attention: Any = model_config.first_attention
    latent = getattr(attention, "kv_lora_rank", 0)
    if latent:
        qk_head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        v_head_dim, latent_kv_dim = attention.v_head_dim, latent + attention.qk_rope_head_dim
    else:
        qk_head_dim = getattr(attention, "head_dim", None) or model_config.dim // attention.n_heads
        v_head_dim, latent_kv_dim = qk_head_dim, 0
    layers = model_config.layers
    feed_forwards = [getattr(layer, "feed_forward", None) for layer in layers]
    return Architecture(
        dim=model_config.dim,
        vocab_size=model_config.vocab_size,
        num_layers=len(layers),
        num_heads=attention.n_heads,
        num_kv_heads=getattr(attention, "n_kv_heads", None) or attention.n_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=v_head_dim,
        hidden_dims=tuple(0 if f is None else f.w1.out_features for f in feed_forwards),
        experts=tuple(_experts(getattr(layer, "moe", None)) for layer in layers),
        is_tied=bool(getattr(model_config, "enable_weight_tying", False)),
        has_qk_norm=getattr(attention, "qk_norm", None) is not None,
        has_fused_qkv=hasattr(getattr(attention, "qkv_linear", None), "wqkv"),
        is_complex_rope=type(attention.rope).__qualname__.startswith("ComplexRoPE"),
        latent_kv_dim=latent_kv_dim,
        max_seq_len=getattr(attention.rope, "max_seq_len", 0),
        is_flex="Flex" in type(attention.inner_attention).__qualname__
        or "CpuDocument" in type(attention.inner_attention).__qualname__,
    )


def _experts(moe: Any) -> Experts | None:
    if moe is None:
        return None
    inner, shared = moe.routed_experts.inner_experts, getattr(moe, "shared_experts", None)
    return Experts(
        num_experts=inner.num_experts,
        top_k=moe.router.top_k,
        hidden_dim=inner.hidden_dim,
        shared_hidden_dim=0 if shared is None else shared.w1.out_features,
    )
