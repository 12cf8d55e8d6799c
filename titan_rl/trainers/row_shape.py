"""What rows the parallel layout of a run asks for, and whether siblings share a prompt in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.policy.teacher import teacher_spec
from titan_rl.titan.branches import knows_branches
from titan_rl.trainers.layout import row_multiple

_EMPTY_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape of micro-batches.

    Attributes:
        rows: Rows of a micro-batch, at most.
        length_multiple: Tokens of a row are a multiple of this.
        is_fixed: All micro-batches have ``rows`` rows of the whole budget.
        empty: Rows and tokens of an empty micro-batch.
    """

    rows: int
    length_multiple: int
    is_fixed: bool
    empty: tuple[int, int]


def row_shape(config: Any) -> RowShape:
    """The shape that ``[parallelism]`` asks for.

    A pipeline takes micro-batches of ``pipeline_parallel_microbatch_size`` whole rows, all of one shape.

    Args:
        config: With TorchTitan's ``[training]`` and ``[parallelism]``.
    """
    parallelism, training = config.parallelism, config.training
    multiple = row_multiple(parallelism, is_flex=True)
    is_fixed = parallelism.pipeline_parallel_degree > 1
    rows = parallelism.pipeline_parallel_microbatch_size if is_fixed else training.local_batch_size
    empty = (rows, training.seq_len) if is_fixed else (1, math.lcm(_EMPTY_TOKENS, multiple))
    return RowShape(rows, multiple, is_fixed, empty)


def shares_prompts(config: Any) -> bool:
    """Whether samples of a group share the tokens of their prompt in a row.

    Args:
        config: The whole configuration of an RL run, with ``model_spec``.

    Raises:
        ConfigError: ``batching.share_prompts`` is "on", and a model's attention cannot.
    """
    wanted = config.batching.share_prompts
    if wanted == "off":
        return False
    unable = _models_without_branches(config)
    if unable and wanted == "on":
        raise ConfigError(
            "batching.share_prompts",
            f'be "auto" or "off" with {unable[0]}, whose attention follows whole documents only: it needs '
            "FlexAttention without sliding windows and linear layers",
            "on",
            'Leave it out, or set model.attn_backend = "flex" where that is the reason.',
        )
    return not unable


def _models_without_branches(config: Any) -> list[str]:
    models = [("[model]", config.model_spec)]
    if config.teacher is not None:
        models.append(("[teacher]", teacher_spec(config.teacher, config.model)))
    return [where for where, spec in models if not knows_branches(spec.model)]
