"""Bytes that a forward pass keeps for the backward pass, per token and layer. Pure arithmetic.

What autograd saves in TorchTitan's blocks, operator by operator, after the method of Korthikanti et al. 2022
(arXiv 2205.05198, section 4.1), for kernels that keep no ``[T, T]`` matrix (FlashAttention, Dao et al. 2022,
arXiv 2205.14135, algorithm 1; FlexAttention alike). With ``D`` the width, ``N`` and ``K`` query and key heads
of width ``H``, ``F`` the feed-forward's width and ``p`` bytes of a number, one layer keeps of a token::

    p (D + D)              input of the block, and its norm, which the projections share
    p (N + K) H            queries and keys before their norm (Qwen)
    p (2 N + 2 K) H + 4 N  queries, keys, values, output, and the row sums of the attention
    p (D + D)              input of the feed-forward's norm, and its output
    4 p F                  both projections, the activation, and their product
    4 H or 8 H             the rows of the rotary embedding (complex; cosine and sine), fp32
    4 per norm and row     reciprocals of the root mean squares

Tensor parallelism divides everything but what a projection takes whole: TorchTitan gathers the norm's output
and autograd keeps what was gathered. Sequence parallelism divides the inputs of the norms too.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.titan.architecture import Architecture, Experts
from titan_rl.tools.plan.run_facts import RunFacts


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer per token of this rank's part of a row.

    Attributes:
        whole: Without recomputation.
        kept: With the run's recomputation.
        per_layer: Beside these, whatever the number of tokens.
    """

    whole: float
    kept: float
    per_layer: int = 0


def layer_bytes(facts: RunFacts, index: int) -> LayerBytes:
    """What one layer keeps.

    Args:
        facts: The run.
        index: Of the layer.
    """
    experts = facts.architecture.experts[index]
    attention = _attention(facts)
    feed_forward, per_layer = _dense(facts, index), 0
    if experts is not None:
        feed_forward, per_layer = _sparse(facts, experts)
    whole = attention + feed_forward
    return LayerBytes(whole, _kept(facts, index, whole), per_layer)


def outside_layers(facts: RunFacts, *, is_first: bool, is_last: bool) -> float:
    """Bytes per token of what is kept beside the layers: token ids, the last norm, selected hidden states.

    Hidden states of trained tokens are selected for the output projection; at most all of them are.

    Args:
        facts: The run.
        is_first: Whether the embedding is on this rank.
        is_last: Whether the last norm is.
    """
    dim, p = facts.architecture.dim, facts.compute_bytes
    inputs = 2 * 8 if is_first else 8  # token ids and positions, int64
    norm = _split(facts, p * dim * _norm_copies(facts) + 4)
    return inputs + (norm + p * dim if is_last else 0.0)


def _attention(facts: RunFacts) -> float:
    a, p = facts.architecture, facts.compute_bytes
    query, key, value = (
        a.num_heads * a.qk_head_dim,
        a.num_kv_heads * a.qk_head_dim,
        a.num_kv_heads * a.v_head_dim,
    )
    output = a.num_heads * a.v_head_dim
    kept = p * (query + key + value + output) + 4 * a.num_heads
    if facts.device_type == "cpu":
        kept += 2 * p * output  # documents are gathered for it, and the result is put back in place
    if a.has_qk_norm:
        kept += _norm_copies(facts) * p * (query + key) + 4 * (a.num_heads + a.num_kv_heads)
    rotary = (4 if a.is_complex_rope else 8) * a.qk_head_dim
    latent = 2 * p * a.latent_kv_dim  # multi-head latent attention: the latent and its norm, on every rank
    return (
        kept / facts.degrees.tensor
        + rotary
        + latent
        + _split(facts, _norm_copies(facts) * p * a.dim + 4)
        + p * a.dim
    )


def _dense(facts: RunFacts, index: int) -> float:
    a, p = facts.architecture, facts.compute_bytes
    norm = _split(facts, _norm_copies(facts) * p * a.dim + 4)
    return norm + p * a.dim + 4 * p * a.hidden_dims[index] / facts.degrees.tensor


def _sparse(facts: RunFacts, experts: Experts) -> tuple[float, int]:
    """Bytes per token and per layer of a mixture of experts whose load is balanced.

    A token is copied to ``top_k`` experts, which compute in bf16: the input of the matrix products, four
    times the hidden width, and the output in fp32, which the score multiplies; then indices, scores, and the
    router in fp32.
    """
    a, p, k = facts.architecture, facts.compute_bytes, experts.top_k
    casts = 0 if p == 2 else 2  # both first products cast their input and keep the copy
    routed = k * ((2 * (casts or 1)) * a.dim + 4 * 2 * experts.hidden_dim + 4 * a.dim)
    indices = k * (3 * 8 + 2 * 4)
    router = 4 * experts.num_experts + (4 * a.dim if p == 2 else 0)
    shared = 4 * p * experts.shared_hidden_dim
    norm = _split(facts, _norm_copies(facts) * p * a.dim + 4) + p * a.dim
    # Expert parallelism hands a token to one rank; without it, tensor ranks share the hidden width.
    divisor = facts.degrees.tensor
    weights = 0
    if p != 2:
        local = experts.num_experts // facts.degrees.expert
        weights = 3 * 2 * local * experts.hidden_dim * a.dim
    return norm + (routed + shared) / divisor + indices + router, weights


def _kept(facts: RunFacts, index: int, whole: float) -> float:
    """Bytes per token and layer that survive until the backward pass."""
    if facts.recomputation == "none":
        return whole
    block_input = _split(facts, facts.compute_bytes * facts.architecture.dim)
    if facts.recomputation == "full":
        return block_input
    if facts.recomputation == "budget":
        return block_input + facts.memory_budget * (whole - block_input)
    return block_input + _selected(facts, index)


def _selected(facts: RunFacts, index: int) -> float:
    """What TorchTitan's selective recomputation saves: every second matrix product and the attention.

    ``torchtitan.distributed.activation_checkpoint.SelectiveAC``: products are counted within the block, the
    router's left out; the first, third, ... are kept. Experts' grouped products are not among the kept
    operators. Under tensor parallelism reduce-scattered outputs are kept as well.
    """
    a, p, tensor = facts.architecture, facts.compute_bytes, facts.degrees.tensor
    output = a.num_heads * a.v_head_dim
    kept = sum(_product_widths(facts, index)[::2]) * p
    if facts.device_type == "cuda":  # the CPU's attention is not among the operators that are kept
        kept += (p * output + 4 * a.num_heads) / tensor
    experts = a.experts[index]
    if experts is not None:
        kept += experts.top_k * (8 + 4)  # the choice of experts, so that recomputation makes the same
        if facts.degrees.expert > 1:
            kept += 2 * experts.top_k * p * a.dim / tensor  # exchanged with other ranks, there and back
    return kept + (2 * p * a.dim / tensor if tensor > 1 else 0.0)


def _product_widths(facts: RunFacts, index: int) -> list[float]:
    """Widths of the outputs of a block's matrix products, in order, on this rank."""
    a: Architecture = facts.architecture
    tensor = facts.degrees.tensor
    query, key = a.num_heads * a.qk_head_dim, a.num_kv_heads * a.qk_head_dim
    value = a.num_kv_heads * a.v_head_dim
    if a.latent_kv_dim:
        projections = [
            query / tensor,
            float(a.latent_kv_dim),
            a.num_heads * (a.qk_head_dim + a.v_head_dim) / tensor,
        ]
    elif a.has_fused_qkv:
        projections = [(query + key + value) / tensor]
    else:
        projections = [query / tensor, key / tensor, value / tensor]
    experts = a.experts[index]
    hidden = a.hidden_dims[index] if experts is None else experts.shared_hidden_dim
    feed_forward = [hidden / tensor, hidden / tensor, float(a.dim)] if hidden else []
    return [*projections, float(a.dim), *feed_forward]


def _norm_copies(facts: RunFacts) -> int:
    """Tensors that a norm keeps: its input; on a CPU, where it is no single kernel, its scaled input too."""
    return 2 if facts.device_type == "cpu" else 1


def _split(facts: RunFacts, number: float) -> float:
    """Divide what sequence parallelism cuts over tensor-parallel ranks."""
    is_split = facts.parallelism.enable_sequence_parallel
    return number / facts.degrees.tensor if is_split else number
