"""Rows as the parallel layout takes them: hand-computed shapes, and micro-batches of them."""

from types import SimpleNamespace

import pytest
from torchtitan.config import ParallelismConfig, TrainingConfig

from titan_rl.trainers.row_shape import RowShape, row_shape

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
