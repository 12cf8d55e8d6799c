"""Whether a plan fits: each phase into the device's memory, a sequence into the KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from titan_rl.errors import ConfigError
from titan_rl.tools.plan.generation import GeneratorMemory
from titan_rl.tools.plan.memory import RankMemory
from titan_rl.tools.plan.run_facts import GIB, RunFacts

_SHARDED = (
    "parameters",
    "gradients",
    "optimiser state",
    "reference",
    "critic",
    "critic gradients",
    "critic optimiser state",
    "teacher",
    "reward model",
)


def check_memory(facts: RunFacts, memory: RankMemory, *, device_bytes: int) -> Iterator[ConfigError]:
    """Find the phases that need more than a device has.

    Args:
        facts: The run.
        memory: Of the rank that needs most.
        device_bytes: Of a device.
    """
    for phase in memory.phases:
        total = memory.total(phase)
        if total <= device_bytes:
            continue
        items = {name: memory.items.get(name, 0) for name in memory.phases[phase]}
        largest = sorted(items, key=lambda name: -items[name])[:3]
        shown = ", ".join(f"{name} {items[name] / GIB:.1f}" for name in largest)
        yield ConfigError(
            f"the memory of a rank during {phase}",
            f"be at most {device_bytes / GIB:.1f} GiB (--device-memory-gib)",
            f"{total / GIB:.1f} GiB, {(total - device_bytes) / GIB:.1f} too much: {shown}",
            _remedy(facts, items, device_bytes),
        )


def _remedy(facts: RunFacts, items: dict[str, int], device_bytes: int) -> str:
    """What would make a phase fit: more ranks where shards are the cause, else the largest other item."""
    sharded = sum(size for name, size in items.items() if name in _SHARDED)
    others = sum(items.values()) - sharded
    advice = []
    if others < device_bytes and sharded:
        ranks = facts.degrees.fsdp
        wanted = -(-sharded * ranks // (device_bytes - others))
        copies = facts.world_size // ranks
        advice.append(f"shard over {wanted} ranks instead of {ranks} (--world-size {wanted * copies})")
    names = [name for name in items if name not in _SHARDED and name in _ADVICE]
    worst = max(names, key=lambda name: items[name], default=None)
    if worst is not None and (items[worst] > 0.1 * device_bytes or not advice):
        advice.append(_ADVICE[worst](facts))
    text = ", or ".join(advice)
    return f"{text[:1].upper()}{text[1:]}."


def _less_activation(facts: RunFacts) -> str:
    if facts.recomputation != "full":
        return 'set activation_checkpoint.type = "full"'
    if facts.rows > 1 and facts.degrees.pipeline == 1:
        return f"set training.local_batch_size = {facts.rows // 2} (now {facts.rows})"
    return "raise parallelism.context_parallel_degree or tensor_parallel_degree, which share a row"


def _less_generator(facts: RunFacts) -> str:
    if facts.generator.memory_fraction:
        return f"lower generator.gpu_memory_utilization (now {facts.generator.memory_fraction})"
    return "lower generator.kv_cache_gib or generator.max_num_seqs"


def _less_logits(facts: RunFacts) -> str:
    return (
        f"raise parallelism.tensor_parallel_degree (now {facts.degrees.tensor}), which shares the vocabulary"
    )


_ADVICE = {
    "activations": _less_activation,
    "recomputed layer": _less_activation,
    "scoring activations": _less_activation,
    "logits": _less_logits,
    "gathered weights": _less_logits,
    "KV cache": _less_generator,
    "generator weights": lambda facts: (
        f"raise generator.tensor_parallel_degree (now {facts.generator.degree})"
    ),
    "generator activations": lambda facts: "lower generator.max_num_batched_tokens",
    "weights in transit": lambda facts: "lower weight_sync.bucket_mib",
}


def check_cache(facts: RunFacts, generator: GeneratorMemory, *, device_bytes: int) -> Iterator[ConfigError]:
    """The KV cache must hold one sample of full length, or the engine will not start.

    Args:
        facts: The run.
        generator: Its memory.
        device_bytes: Of a device; 0 if not known.
    """
    needed = facts.sample_tokens * generator.bytes_per_token
    if generator.kv_cache >= needed or (facts.generator.memory_fraction and not device_bytes):
        return
    if facts.generator.memory_fraction:
        key, got = "generator.gpu_memory_utilization", str(facts.generator.memory_fraction)
        least = (generator.weights + generator.activations + needed) / device_bytes
        remedy = f"Set {least + 0.005:.2f} or more" if least < 0.95 else "Take more ranks for a copy"
        remedy += f", or raise generator.tensor_parallel_degree (now {facts.generator.degree})."
    else:
        key, got = "generator.kv_cache_gib", f"{generator.kv_cache / GIB:.3g}"
        remedy = (
            f"Set {needed / GIB * 1.05:.2g} or more; with several sequences at once generation is faster."
        )
    yield ConfigError(
        key,
        f"leave a KV cache of {needed / GIB:.2g} GiB for one sequence of data.max_prompt_tokens + "
        f"sampling.max_tokens = {facts.sample_tokens} tokens",
        f"{got}: {max(generator.kv_cache, 0) / GIB:.2g} GiB beside {generator.weights / GIB:.1f} GiB of "
        "weights",
        remedy,
    )
