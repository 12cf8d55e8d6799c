"""Layouts as TorchTitan resolves them; a layout that cannot work is found, with both keys and a way out."""

import dataclasses

import pytest
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from titan_rl.titan.architecture import Architecture, Experts, architecture_of
from titan_rl.titan.models import ModelSection, build_spec
from titan_rl.trainers.layout import Degrees, layers_per_stage, num_stages, row_multiple
from titan_rl.trainers.layout_checks import contradictions

SMALL = Architecture(
    dim=64,
    vocab_size=100,
    num_layers=8,
    num_heads=12,
    num_kv_heads=4,
    qk_head_dim=16,
    v_head_dim=16,
    hidden_dims=(128,) * 8,
    experts=(None,) * 8,
    is_tied=False,
    max_seq_len=4096,
)
MOE = dataclasses.replace(
    SMALL, hidden_dims=(0,) * 8, experts=(Experts(num_experts=8, top_k=2, hidden_dim=32),) * 8
)
TIED = dataclasses.replace(SMALL, is_tied=True)
VARLEN = dataclasses.replace(SMALL, is_flex=False)


def find(
    world_size=1, *, architecture=SMALL, seq_len=1024, rows=4, generator=1, cuda_graphs=False, **parallelism
):
    return [
        str(error)
        for error in contradictions(
            ParallelismConfig(**parallelism),
            architecture=architecture,
            world_size=world_size,
            seq_len=seq_len,
            local_batch_size=rows,
            generator_degree=generator,
            has_cuda_graphs=cuda_graphs,
        )
    ]


TP, PP, CP = "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"
EP, SHARD = "expert_parallel_degree", "data_parallel_shard_degree"
SCHEDULE, PARTS = "pipeline_parallel_schedule", "module_fqns_per_model_part"
LAYERS = [f"layers.{i}" for i in range(8)]
WANTED_PARTS = (
    "parallelism.module_fqns_per_model_part must name each of tok_embeddings, layers.0 to layers.7 "
    "([model]), norm and lm_head once, in the order of the model"
)


@pytest.mark.parametrize(
    ("world_size", "parallelism"),
    [
        (1, {}),
        (8, {TP: 2, PP: 2}),
        (16, {TP: 4, CP: 2, "data_parallel_replicate_degree": 2, SHARD: 1}),
        (16, {PP: 4, SCHEDULE: "Interleaved1F1B", "pipeline_parallel_layers_per_stage": 1,
              "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}),
    ],
)  # fmt: skip
def test_a_layout_that_works_has_no_contradictions(world_size, parallelism):
    for parts in (
        [["tok_embeddings", *LAYERS], ["norm", "lm_head"]],
        [["layers.1", "layers.0", "tok_embeddings", "extra"], [*LAYERS[2:], "norm", "lm_head"]],
    ):
        assert find(2, **{PP: 2, PARTS: parts}) == []
    assert find(8, **{CP: 2, "context_parallel_load_balancer": None}) == []
    assert find(4, architecture=dataclasses.replace(SMALL, vocab_size=10), **{TP: 4}) == []
    assert find(world_size, **parallelism) == []
    assert find(8, architecture=MOE, **{EP: 4}) == []


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (6, {TP: 4},
         "parallelism.tensor_parallel_degree must divide the 6 rank(s) together with the other "
         "degrees: replicate 1 x pipeline 1 x context 1 x tensor 4 = 4; got 4. Start 4 or 8 ranks,"
         " or lower a degree."),
        (8, {TP: 2, SHARD: 2},
         "parallelism.data_parallel_shard_degree must make 8 rank(s) when multiplied by the other "
         "degrees (replicate 1 x pipeline 1 x context 1 x tensor 2 = 2); got 2. Set 4, leave it "
         "out (-1 takes all ranks that are left), or start 4 ranks."),
        (8, {TP: 8},
         "parallelism.tensor_parallel_degree must divide the model's 12 attention heads ([model]);"
         " got 8. Set 4; possible are 1, 2, 4."),
        (6, {TP: 6, "seq_len": 1020},
         "parallelism.tensor_parallel_degree must divide the model's 4 key and value heads "
         "([model]); got 6. Set 4; possible are 1, 2, 4."),
        (4, {TP: 4, "seq_len": 1022},
         "training.seq_len must be a multiple of 4, for parallelism.tensor_parallel_degree = 4 and"
         " context_parallel_degree = 1; got 1022. Set 1024 or 1020."),
        (4, {TP: 2, CP: 2, "seq_len": 1028},
         "training.seq_len must be a multiple of 256, for parallelism.tensor_parallel_degree = 2 "
         "and context_parallel_degree = 2; got 1028. Set 1280 or 1024."),
        (2, {CP: 2, "seq_len": 64},
         "training.seq_len must be a multiple of 256, for parallelism.tensor_parallel_degree = 1 "
         "and context_parallel_degree = 2; got 64. Set 256."),
        (1, {"seq_len": 8192},
         "training.seq_len must be at most 4096, the reach of the model's rotary embedding ([model])"
         "; got 8192. Set 4096."),
        (2, {CP: 2, "architecture": VARLEN},
         "model.attn_backend must be flex with parallelism.context_parallel_degree = 2; got 'varlen'. "
         'Set model.attn_backend = "flex", or context_parallel_degree = 1.'),
        (2, {CP: 2, "context_parallel_load_balancer": "zigzag"},
         'parallelism.context_parallel_load_balancer must be "headtail", "ptrr" or "none"; got '
         "'zigzag'. Leave it out."),
        (4, {TP: 4, "architecture": dataclasses.replace(SMALL, vocab_size=5)},
         "parallelism.tensor_parallel_degree must leave every rank an output row of the model "
         "([model]): 5 rows, 2 a rank, are all on the first 3; got 4. Set 3."),
        (2, {PP: 2, PARTS: [["tok_embeddings", *LAYERS[:3]], [*LAYERS[4:], "norm", "lm_head"]]},
         f"{WANTED_PARTS}; got without layers.3. Mend it, or leave it out."),
        (2, {PP: 2, PARTS: [["tok_embeddings", *LAYERS[:4]], [*LAYERS[3:], "norm", "lm_head"]]},
         f"{WANTED_PARTS}; got layers.3 twice. Mend it, or leave it out."),
        (2, {PP: 2, PARTS: [["tok_embeddings", *LAYERS[4:]], [*LAYERS[:4], "norm", "lm_head"]]},
         f"{WANTED_PARTS}; got layers.0 too late. Mend it, or leave it out."),
        (2, {PP: 2, PARTS: [["tok_embeddings"], LAYERS, ["norm", "lm_head"]]},
         "parallelism.module_fqns_per_model_part must make 2 stages for "
         "parallelism.pipeline_parallel_degree = 2 and schedule 1F1B; got 3 stages. Mend it, or "
         "leave it out."),
        (2, {PP: 2, "architecture": TIED},
         "parallelism.pipeline_parallel_degree must be 1 for a model whose embedding and output "
         "projection are one matrix ([model]): they are on the first and the last stage; got 2. "
         "Shard more over parallelism.data_parallel_shard_degree or tensor_parallel_degree, or "
         "choose a model with tie_word_embeddings = false."),
        (2, {PP: 2, SCHEDULE: "ZBVZeroBubble"},
         "parallelism.pipeline_parallel_schedule must be 1F1B, GPipe, Interleaved1F1B, LoopedBFS or "
         "InterleavedZeroBubble, with which scoring passes can share the stages of "
         "parallelism.pipeline_parallel_degree = 2; got ZBVZeroBubble (V-shaped). "
         'Set "Interleaved1F1B" for two stages per rank, or "1F1B" for one.'),
        (16, {PP: 16, "rows": 16},
         "parallelism.pipeline_parallel_degree must leave a layer for each of 16 stages: the model"
         " has 8 layers ([model]), and the first and the last stage have 1 and 1 fewer; got 16. "
         "Set at most 8, or pipeline_parallel_first_stage_less_layers = "
         "pipeline_parallel_last_stage_less_layers = 0."),
        (2, {PP: 2, "pipeline_parallel_layers_per_stage": 2},
         "parallelism.pipeline_parallel_layers_per_stage must make 2 stages of 8 layers for "
         "parallelism.pipeline_parallel_degree = 2 and schedule 1F1B; got 2: 5 stages. Set 9, or "
         "leave it out."),
        (4, {PP: 4, "rows": 2},
         "training.local_batch_size must give 1F1B at least as many micro-batches of 1 row(s) as "
         "parallelism.pipeline_parallel_degree = 4; got 2. Set 4 or more; more also make the "
         "bubble smaller."),
        (2, {PP: 2, "rows": 3, "pipeline_parallel_microbatch_size": 2},
         "training.local_batch_size must be a multiple of "
         "parallelism.pipeline_parallel_microbatch_size = 2; got 3. Set 4."),
        (2, {PP: 2, "rows": 5, SCHEDULE: "Interleaved1F1B"},
         "training.local_batch_size must give Interleaved1F1B a multiple of 2 micro-batches: 5 on "
         "parallelism.pipeline_parallel_degree = 2 go in 2 rounds; got 5. Set 4 or 6."),
        (8, {EP: 2},
         "parallelism.expert_parallel_degree must be 1 for a model without experts ([model]); got "
         "2. Remove it."),
        (6, {EP: 3, "architecture": MOE},
         "parallelism.expert_parallel_degree must divide the model's 8 experts ([model]); got 3. "
         "Set 2; possible are 1, 2."),
        (6, {EP: 4, "architecture": MOE},
         "parallelism.expert_parallel_degree must divide the 6 ranks that hold one copy of a layer"
         " (parallelism: shard 6 x context 1 x tensor 1); got 4. Set 2; possible are 1, 2."),
        (9, {"generator": 6},
         "generator.tensor_parallel_degree must divide the number of ranks (9); got 6. Set 1; "
         "possible are 1."),
        (8, {"generator": 8},
         "generator.tensor_parallel_degree must divide the model's 12 attention heads ([model]); "
         "got 8. Set 4; possible are 1, 2, 4."),
        (6, {"generator": 6},
         "generator.tensor_parallel_degree must divide the model's 4 key and value heads "
         "([model]), or be a multiple; got 6. Set 2; possible are 1, 2."),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_work_is_found_with_the_nearest_that_does(world_size, options, message):
    assert message in find(world_size, **options)


def test_all_contradictions_are_found_at_once():
    found = find(6, architecture=TIED, seq_len=1023, generator=5, **{TP: 4, PP: 2, EP: 2})
    keys = [message.split(" must ")[0] for message in found]
    assert keys == [
        "parallelism.tensor_parallel_degree",
        "training.seq_len",
        "parallelism.pipeline_parallel_degree",
        "parallelism.expert_parallel_degree",
        "generator.tensor_parallel_degree",
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {TP: 2}, {PP: 4, TP: 2}, {CP: 2, EP: 8}, {SHARD: 4, "data_parallel_replicate_degree": 4}],
)
def test_degrees_are_those_of_torchtitan(options):
    parallelism = ParallelismConfig(**options)
    ours, theirs = Degrees.of(parallelism, 16), ParallelDims.from_config(parallelism, 16)
    assert (ours.replicate, ours.shard, ours.context, ours.tensor, ours.pipeline, ours.expert) == (
        theirs.dp_replicate, theirs.dp_shard, theirs.cp, theirs.tp, theirs.pp, theirs.ep
    )  # fmt: skip
    assert ours.world_size == 16


@pytest.mark.parametrize("layers", [7, 8, 28, 80])
@pytest.mark.parametrize(("first", "last"), [(1, 1), (0, 0), (0, 2)])
@pytest.mark.parametrize(("degree", "schedule"), [(2, "1F1B"), (2, "Interleaved1F1B"), (3, "1F1B")])
def test_layers_are_spread_over_stages_as_torchtitan_does(layers, first, last, degree, schedule):
    architecture = dataclasses.replace(SMALL, num_layers=layers)
    parallelism = ParallelismConfig(
        **{PP: degree, SCHEDULE: schedule},
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
    )
    stages = num_stages(parallelism, architecture)
    try:
        parts = _generate_llm_fqn_per_model_part(stages, layers, first, last)
    except ValueError:
        assert contradictions(
            parallelism,
            architecture=architecture,
            world_size=degree,
            seq_len=1024,
            local_batch_size=12,
        )
        return
    theirs = [sum(name.startswith("layers.") for name in part) for part in parts]
    assert layers_per_stage(parallelism, architecture) == theirs


def test_sequence_parallelism_off_frees_the_row_of_the_tensor_degree():
    on, off = (ParallelismConfig(**{TP: 4}, enable_sequence_parallel=enabled) for enabled in (True, False))
    assert row_multiple(on, is_flex=True) == 4
    assert row_multiple(off, is_flex=True) == 1


def test_expert_parallelism_cuts_rows_over_tensor_ranks_without_sequence_parallelism_too():
    parallelism = ParallelismConfig(**{TP: 4}, expert_parallel_degree=2, enable_sequence_parallel=False)
    assert row_multiple(parallelism, is_flex=True) == 4


@pytest.mark.parametrize(
    ("name", "flavor", "expected"),
    [
        ("llama3", "70B", {"dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8,
                           "qk_head_dim": 128, "is_tied": False, "vocab_size": 128256,
                           "is_complex_rope": True, "has_qk_norm": False}),
        ("qwen3", "0.6B", {"dim": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8,
                           "qk_head_dim": 128, "is_tied": True, "has_qk_norm": True,
                           "is_complex_rope": False, "has_fused_qkv": True}),
        ("qwen3", "30B-A3B", {"num_experts": 128, "num_kv_heads": 4, "qk_head_dim": 128, "v_head_dim": 128}),
        ("deepseek_v3", "16B", {"num_layers": 27, "latent_kv_dim": 576}),
    ],
)  # fmt: skip
def test_an_architecture_is_read_off_torchtitans_configuration(name, flavor, expected):
    architecture = architecture_of(build_spec(ModelSection(name=name, flavor=flavor)).model)
    assert {key: getattr(architecture, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        (TP, 0, 1),
        (PP, 0, 1),
        (CP, -1, 1),
        (EP, 0, 1),
        ("data_parallel_replicate_degree", -2, 1),
        ("pipeline_parallel_microbatch_size", 0, 1),
        ("pipeline_parallel_layers_per_stage", 0, 1),
        ("pipeline_parallel_first_stage_less_layers", -3, 0),
    ],
)
def test_what_is_no_count_is_refused_before_anything_is_computed_from_it(key, value, least):
    expected = f"parallelism.{key} must be at least {least}; got {value}. Leave it out."
    assert find(2, **{key: value}) == [expected]


@pytest.mark.parametrize("value", [0, -2])
def test_the_degree_of_sharding_is_a_count_or_minus_one(value):
    (message,) = find(2, **{SHARD: value})
    assert message.startswith("parallelism.data_parallel_shard_degree must be at least 1, or -1")


def test_what_the_losses_or_torchtitan_refuse_is_a_contradiction_too():
    (message,) = find(1, spmd_backend="full_dtensor")
    assert message.startswith("parallelism.spmd_backend must be spmd_types or partial_dtensor")
    (message,) = find(2, **{PP: 2}, cuda_graphs=True)
    assert message.startswith("training.disable_cuda_graphs must be true")
    assert find(2, **{TP: 2}, cuda_graphs=True) == []
