"""The generator's memory on each rank, and how many sequences its KV cache holds. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.tools.plan.run_facts import RunFacts


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes on each rank of a generator group.

    Attributes:
        weights: This rank's part of the group's copy.
        kv_cache: Keys and values. Negative where weights and activations leave no room for it.
        activations: Of the largest forward pass.
        bytes_per_token: Of the cache.
        tokens: That the cache holds.
        sequences: Samples of full length that it holds.
    """

    weights: int
    kv_cache: int
    activations: int
    bytes_per_token: int
    tokens: int
    sequences: int


def generator_memory(facts: RunFacts, *, numel: int, device_bytes: int) -> GeneratorMemory:
    """Weights, KV cache and activations.

    A token's keys and values take ``2 x layers x key-value heads x head width`` numbers (Kwon et al. 2023,
    arXiv 2309.06180, section 3), split over the ranks of the group while there are heads to split, and one
    latent per layer with multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1). On a
    GPU the cache is what ``generator.gpu_memory_utilization`` of the device leaves beside weights and
    activations; on a CPU ``generator.kv_cache_gib``.

    Args:
        facts: The run.
        numel: Parameters of the policy.
        device_bytes: Memory of a device; 0 if not known, and then there is no cache either.
    """
    a, generator, p = facts.architecture, facts.generator, facts.compute_bytes
    degree = generator.degree
    if not generator.is_vllm:
        p = facts.storage_bytes  # the local generator is TorchTitan's model as it stands
    weights = numel * p // degree
    heads = max(a.num_kv_heads // degree, 1)
    per_token = a.num_layers * (a.latent_kv_dim or heads * (a.qk_head_dim + a.v_head_dim)) * p
    activations = _activations(facts)
    if not generator.is_vllm:
        cache = generator.max_num_seqs * facts.sample_tokens * per_token
    elif generator.memory_fraction:
        room = int(generator.memory_fraction * device_bytes) - weights - activations
        cache = room if device_bytes else 0
    else:
        cache = generator.kv_cache_bytes
    tokens = max(cache, 0) // per_token
    return GeneratorMemory(
        weights=weights,
        kv_cache=cache,
        activations=activations,
        bytes_per_token=per_token,
        tokens=tokens,
        sequences=tokens // facts.sample_tokens,
    )


def _activations(facts: RunFacts) -> int:
    """One layer of the widest forward pass, and fp32 logits and log-probabilities of each sequence."""
    a, generator, p = facts.architecture, facts.generator, facts.compute_bytes
    sparse = max(
        (x.top_k * x.hidden_dim + x.shared_hidden_dim for x in a.experts if x is not None), default=0
    )
    widest = max(2 * max(*a.hidden_dims, sparse), (a.num_heads + 2 * a.num_kv_heads) * a.qk_head_dim)
    return generator.batched_tokens * p * (2 * a.dim + widest // generator.degree) + (
        2 * 4 * generator.max_num_seqs * a.vocab_size
    )
