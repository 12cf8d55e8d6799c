"""A small model of the same architecture, and the configuration of a small run of the same algorithm."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.hf_config import hf_from_spec, spec_from_hf
from titan_rl.tools.check.layouts import Layout
from titan_rl.tools.check.rollouts import MAX_TOKENS
from titan_rl.trainers.layout import SINGLE_STAGE_SCHEDULES

VOCAB_SIZE = 96
_HEAD_DIM, _DIM, _HIDDEN_DIM, _MAX_SEQ_LEN = 8, 32, 48, 512
# Room for the longest sample and a short one. Context parallelism cuts rows at blocks of 128 tokens.
_ROW, _CONTEXT_PARALLEL_ROW = 32, 256


def shrink_model(config: Any, directory: Path) -> None:
    """Write the ``config.json`` of a small model of the same family.

    Kept: tied or not, normalised queries and keys, several query heads for a key head, the rotary embedding
    with its scaling, the norm's epsilon.

    Args:
        config: The user's, with ``model_spec`` and ``[parallelism]``.
        directory: To be made.

    Raises:
        ConfigError: the model is neither Llama nor dense Qwen3.
    """
    architecture = architecture_of(config.model_spec.model)
    if architecture.num_experts or architecture.latent_kv_dim:
        raise ConfigError(
            "model",
            "be a Llama or a dense Qwen3 model to be checked",
            f"{config.model_spec.name} {config.model_spec.flavor}",
            'Other architectures are not shrunk yet; check the algorithm with name = "qwen3".',
        )
    small = shrink_sizes(hf_from_spec(config.model_spec), num_layers(config.parallelism))
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")


def shrink_sizes(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """``config.json`` with small sizes. At most 4 heads, so that 2 ranks share them.

    Args:
        hf: In Hugging Face's layout.
        layers: Of the small model.
    """
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    small_kv_heads = min(kv_heads, 2) if kv_heads < heads else min(heads, 4)
    small_heads = 2 * small_kv_heads if kv_heads < heads else small_kv_heads
    is_exact = hf["head_dim"] * heads == hf["hidden_size"]
    return hf | {
        "hidden_size": small_heads * _HEAD_DIM if is_exact else _DIM,
        "head_dim": _HEAD_DIM if is_exact else 2 * _HEAD_DIM,
        "intermediate_size": _HIDDEN_DIM,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": _MAX_SEQ_LEN,
    }


def num_layers(parallelism: Any) -> int:
    """Fewest layers, at least 2, that give each stage of a pipeline of 2 ranks one.

    Args:
        parallelism: TorchTitan's section of the user's run.
    """
    if parallelism.pipeline_parallel_degree == 1:
        return 2
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    is_single = parallelism.pipeline_parallel_schedule.lower() in SINGLE_STAGE_SCHEDULES
    stages = 2 if is_single else 4
    return max(stages * (max(first, last) + 1) - first - last, 2)


def shrink_config(config: Any, layout: Layout, directory: Path) -> Any:
    """The user's configuration with the small model, the layout and short rows, in fp32.

    Args:
        config: The user's; it stays as it is.
        layout: Which degrees are 2.
        directory: Of :func:`shrink_model`.
    """
    model = spec_from_hf(directory).model
    use_cpu_attention(model, per_document="context" not in layout.axes)
    is_pipelined = "pipeline" in layout.axes
    parallelism = dataclasses.replace(
        config.parallelism,
        **layout.degrees,
        module_fqns_per_model_part=None,
        pipeline_parallel_layers_per_stage=None,
        pipeline_parallel_microbatch_size=1,
    )
    training = dataclasses.replace(
        config.training,
        seq_len=_CONTEXT_PARALLEL_ROW if "context" in layout.axes else _ROW,
        local_batch_size=2 if is_pipelined else 1,
        dtype="float32",
        mixed_precision_param="float32",
        enable_cpu_offload=False,
        disable_cuda_graphs=True,
    )
    shaping = dataclasses.replace(
        config.shaping, overlong_buffer_tokens=min(config.shaping.overlong_buffer_tokens, MAX_TOKENS // 4)
    )
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(config.model_spec, model=model),
        parallelism=parallelism,
        training=training,
        shaping=shaping,
        sampling=dataclasses.replace(config.sampling, max_tokens=MAX_TOKENS),
        compile=dataclasses.replace(copy.copy(config.compile), enable=False),
    )
