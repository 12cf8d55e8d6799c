"""What is compared, how a model shrinks, and that attention between documents shows in packed rows."""

import dataclasses
import math

import pytest
import torch
from torchtitan.config import ParallelismConfig

from titan_rl.config.toml import Document, load_document
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.without_trainer import gloo_world
from titan_rl.tools.check.compare import compare, relative, render
from titan_rl.tools.check.layouts import Case, Layout, layouts_of, not_covered
from titan_rl.tools.check.rollouts import LONGEST, make_groups
from titan_rl.tools.check.shrink import num_layers, shrink_config, shrink_model, shrink_sizes
from titan_rl.tools.check.step import SmallRun, Step
from titan_rl.trainers.configuration import configure

LLAMA = {"hidden_size": 4096, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
PADDED, JOINED = Case("padded", ""), Case("joined", "rows", rows="joined")


def axes_of(**degrees):
    return [layout.axes for layout in layouts_of(ParallelismConfig(**degrees))]


def test_every_axis_is_run_alone_and_every_pair_together():
    axes = axes_of(tensor_parallel_degree=8, pipeline_parallel_degree=4)
    assert axes[:4] == [(), ("shard",), ("tensor",), ("pipeline",)]
    assert set(axes[4:]) == {("shard", "tensor"), ("shard", "pipeline"), ("tensor", "pipeline")}


def test_data_parallel_ranks_are_compared_where_the_layout_has_none():
    layouts = layouts_of(ParallelismConfig(data_parallel_shard_degree=1, tensor_parallel_degree=2))
    assert [(layout.axes, layout.world_size) for layout in layouts] == [
        ((), 1),
        (("shard",), 2),
        (("tensor",), 2),
    ]
    assert [case.about for case in layouts[1].cases] == ["data parallel", "data parallel"]


def test_copies_of_the_whole_model_are_the_data_parallel_ranks_where_it_is_not_sharded():
    degrees = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 4}
    alone, replicated = layouts_of(ParallelismConfig(**degrees))
    assert (alone.axes, replicated.axes, replicated.world_size) == ((), ("replicate",), 2)
    assert [case.about for case in replicated.cases] == ["data parallel", "data parallel", "layout"]
    both = axes_of(data_parallel_replicate_degree=2)
    assert both == [(), ("replicate",), ("shard",), ("replicate", "shard")]


def test_what_a_pair_of_axes_leaves_out_is_said():
    parallelism = ParallelismConfig(tensor_parallel_degree=8, pipeline_parallel_degree=2)
    notes = not_covered(parallelism)
    assert "shard x tensor x pipeline together" in notes[0]
    assert "tensor_parallel_degree = 8" in notes[1]


@pytest.mark.parametrize(
    ("changes", "heads", "kv_heads"),
    [
        ({}, 4, 2),
        ({"num_key_value_heads": 32}, 4, 4),
        ({"num_key_value_heads": 1}, 2, 1),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 128}, 1, 1),
    ],
)
def test_shared_key_heads_stay_shared(changes, heads, kv_heads):
    small = shrink_sizes(LLAMA | changes | {"tie_word_embeddings": True}, 2)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (heads, kv_heads)
    assert small["head_dim"] * heads == small["hidden_size"]
    assert small["tie_word_embeddings"]


def test_heads_wider_than_the_model_stay_wider():
    small = shrink_sizes(LLAMA | {"hidden_size": 1024}, 2)
    assert small["head_dim"] * small["num_attention_heads"] > small["hidden_size"]


@pytest.mark.parametrize(("schedule", "less", "layers"), [("1F1B", 1, 2), ("Interleaved1F1B", 1, 6)])
def test_every_stage_gets_a_layer(schedule, less, layers):
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=8,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_first_stage_less_layers=less,
    )
    assert num_layers(parallelism) == layers


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
def test_groups_are_ragged_and_odd_in_number(group_size):
    groups = make_groups(group_size, vocab_size=96, with_baseline=False)
    lengths = [
        len(rollout.turns[0].prompt_token_ids) + len(rollout.turns[0].completion.token_ids)
        for group in groups
        for rollout in group.rollouts
    ]
    assert len(groups) % 2 == 1
    assert len(lengths) >= 8
    assert len(set(lengths)) >= 5
    assert max(lengths) <= LONGEST


def test_the_bound_is_on_each_tensor():
    one, thousand = torch.ones(1), torch.full((1,), 1000.0)
    expected = Step({"loss": 1.0}, {"a": one, "b": thousand})
    near = Step({"loss": 1.0}, {"a": one * (1 + 8e-6), "b": thousand})
    far = Step({"loss": 1.0}, {"a": one * (1 + 5e-5), "b": thousand})
    assert compare(PADDED, near, expected).is_equal
    comparison = compare(PADDED, far, expected)
    assert (comparison.is_equal, comparison.worst, comparison.num_unequal) == (False, "a", 1)
    assert "DIFFERS  1 gradients, most in a" in render([comparison], ["x"])


def test_a_number_that_is_not_finite_differs():
    expected = Step({"loss": 1.0}, {"a": torch.ones(1)})
    for bad in (math.nan, math.inf):
        assert not compare(PADDED, Step({"loss": bad}, {"a": torch.ones(1)}), expected).is_equal
        assert not compare(PADDED, Step({"loss": 1.0}, {"a": torch.full((1,), bad)}), expected).is_equal
    assert relative(0.0, 0.0, 1e-8) == 0.0


def test_steps_of_other_parameters_are_refused():
    with pytest.raises(ValueError, match="other parameters"):
        compare(PADDED, Step({"loss": 1.0}, {}), Step({"loss": 1.0}, {"a": torch.ones(1)}))


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """The tiny recipe on one rank."""
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    loaded: Document = load_document("train_configs/tiny_grpo.toml")
    config = configure(loaded, "rl")
    config = dataclasses.replace(config, activation_checkpoint=None)
    shrink_model(config, tmp_path / "model")
    with gloo_world(tmp_path / "store", rank=0, world_size=1):
        yield SmallRun(shrink_config(config, Layout((), ()), tmp_path / "model"))


def test_attention_between_documents_shows_in_packed_rows(small_run, monkeypatch):
    expected, right = small_run.step(PADDED), small_run.step(JOINED)
    assert compare(JOINED, right, expected).is_equal
    prepare = ShardedModel.prepare

    def leaking(model, rows):
        inputs, kwargs, index = prepare(model, rows)
        row = torch.arange(rows.positions.shape[1]).expand_as(rows.positions)
        return inputs, kwargs | {"attention_masks": model.parts[0].get_attention_masks(row)}, index

    monkeypatch.setattr(ShardedModel, "prepare", leaking)
    assert not compare(JOINED, small_run.step(JOINED), expected).is_equal
