"""Rows as the parallel layout takes them: hand-computed shapes, and micro-batches of them."""

from types import SimpleNamespace

import pytest
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import llama3

from titan_rl.errors import ConfigError
from titan_rl.trainers.row_shape import RowShape, row_shape, shares_prompts
from titan_rl.trainers.sections import RLBatchingSection

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ({}, RowShape(rows=6, length_multiple=1, is_fixed=False, empty=(1, 8))),
        ({"data_parallel_shard_degree": 16}, RowShape(6, 1, False, (1, 8))),
        # A token a rank; empty rows of 8 tokens where that divides, of 24 where it does not.
        ({TP: 4}, RowShape(6, 4, False, (1, 8))),
        ({TP: 3}, RowShape(6, 3, False, (1, 24))),
        ({TP: 4, "enable_sequence_parallel": False}, RowShape(6, 1, False, (1, 8))),
        # Two slices a rank, between blocks of 128 tokens.
        ({CP: 2}, RowShape(6, 256, False, (1, 256))),
        ({CP: 3}, RowShape(6, 384, False, (1, 384))),
        ({CP: 2, TP: 3}, RowShape(6, 768, False, (1, 768))),
        ({CP: 2, TP: 3, "enable_sequence_parallel": False}, RowShape(6, 256, False, (1, 256))),
        # Micro-batches of one shape, which is a share of the rows.
        ({PP: 2}, RowShape(1, 1, True, (1, 1536))),
        ({PP: 4, "pipeline_parallel_microbatch_size": 3}, RowShape(3, 1, True, (3, 1536))),
        ({PP: 2, TP: 4}, RowShape(1, 4, True, (1, 1536))),
        ({PP: 2, CP: 2}, RowShape(1, 256, True, (1, 1536))),
        ({"pipeline_parallel_microbatch_size": 3}, RowShape(6, 1, False, (1, 8))),
    ],
)
def test_the_shape_is_what_the_degrees_ask_for(parallelism, expected):
    config = SimpleNamespace(
        parallelism=ParallelismConfig(**parallelism),
        training=TrainingConfig(local_batch_size=6, seq_len=1536),
    )
    shape = row_shape(config)
    assert shape == expected
    assert shape.empty[1] % shape.length_multiple == 0


def run_of(share_prompts, *, backend="flex", teacher=None):
    return SimpleNamespace(
        batching=RLBatchingSection(share_prompts=share_prompts),
        model_spec=llama3.model_registry("debugmodel", attn_backend=backend),
        model=None,
        teacher=teacher,
    )


@pytest.mark.parametrize(
    ("share_prompts", "backend", "expected"),
    [("auto", "flex", True), ("on", "flex", True), ("off", "flex", False), ("auto", "varlen", False)],
)
def test_prompts_are_shared_where_attention_can_and_the_run_may(share_prompts, backend, expected):
    assert shares_prompts(run_of(share_prompts, backend=backend)) is expected


def test_sharing_is_refused_where_it_is_asked_for_and_attention_cannot():
    with pytest.raises(ConfigError, match=r'batching\.share_prompts must be "auto" or "off" with \[model\]'):
        shares_prompts(run_of("on", backend="varlen"))


def test_a_teacher_has_to_follow_branches_too(monkeypatch):
    of_teacher = llama3.model_registry("debugmodel", attn_backend="varlen")
    monkeypatch.setattr("titan_rl.trainers.row_shape.teacher_spec", lambda section, model: of_teacher)
    assert not shares_prompts(run_of("auto", teacher=object()))
    with pytest.raises(ConfigError, match=r"with \[teacher\], whose attention"):
        shares_prompts(run_of("on", teacher=object()))
