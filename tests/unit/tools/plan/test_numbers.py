"""Plans' numbers, computed by hand."""

import dataclasses

import pytest
from torch.distributed.pipelining.schedules import _get_warmup_ops
from torchtitan.config.configs import ParallelismConfig

from titan_rl.titan.architecture import Architecture, Experts
from titan_rl.titan.meta_model import ShardSize, ShardSizes
from titan_rl.tools.plan.activations import layer_bytes, outside_layers
from titan_rl.tools.plan.arithmetic import batch_plan
from titan_rl.tools.plan.communication import sync_bytes, traffic, transit_bytes
from titan_rl.tools.plan.flops import forward_flops_per_token, work
from titan_rl.tools.plan.generation import generator_memory
from titan_rl.tools.plan.memory import (
    Models,
    activation_bytes,
    gathered_bytes,
    logit_bytes,
    rank_memory,
    recomputed_bytes,
    stages_of_rank,
)
from titan_rl.tools.plan.pipeline import bubble_fraction, chunks_in_flight
from titan_rl.tools.plan.run_facts import GIB, GeneratorFacts, RunFacts
from titan_rl.trainers.layout import Degrees

# D = 8, N = 4 heads of width 2, K = 2, F = 16, V = 10, two layers.
TINY = Architecture(
    dim=8,
    vocab_size=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    qk_head_dim=2,
    v_head_dim=2,
    hidden_dims=(16, 16),
    experts=(None, None),
    is_tied=False,
)


def run(architecture=TINY, *, world_size=1, **changes):
    parallelism = ParallelismConfig(**changes.pop("parallelism", {}))
    defaults = {
        "world_size": world_size,
        "degrees": Degrees.of(parallelism, world_size),
        "architecture": architecture,
        "parallelism": parallelism,
        "device_type": "cuda",
        "storage_bytes": 4,
        "compute_bytes": 2,
        "moment_bytes": 4,
        "seq_len": 100,
        "rows": 2,
        "recomputation": "none",
        "prompts": 6,
        "group_size": 4,
        "prompt_tokens": 10,
        "completion_tokens": 30,
        "steps": 20,
        "steps_per_iteration": 2,
        "generator": GeneratorFacts(),
    }
    return RunFacts(**(defaults | changes))


def model(world_size=1, *, layers=2, layer=1000, embedding=80, head=80):
    sizes = {"tok_embeddings.weight": embedding}
    sizes |= {f"layers.{index}.attention.wo.weight": layer for index in range(layers)}
    sizes |= {"norm.weight": 8, "lm_head.weight": head}
    parameters = tuple(ShardSize(name, size, -(-size // world_size)) for name, size in sizes.items())
    return ShardSizes(parameters, {"layers.0": 16, "layers.1": 16}, 0)


# ------------------------------------------------------------------------------------------------- pipeline


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "stages", "expected"),
    [
        ("1F1B", 4, 8, 1, 3 / 11),
        ("GPipe", 2, 2, 1, 1 / 3),
        ("1F1B", 8, 64, 1, 7 / 71),
        ("Interleaved1F1B", 4, 8, 2, 3 / 19),
        ("LoopedBFS", 4, 8, 3, 3 / 27),
        ("InterleavedZeroBubble", 4, 8, 2, 3 / 51),
    ],
)
def test_the_bubble_is_the_papers(schedule, ranks, micro_batches, stages, expected):
    found = bubble_fraction(
        ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages, schedule=schedule
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
@pytest.mark.parametrize(("schedule", "factor"), [("Interleaved1F1B", 2), ("InterleavedZeroBubble", 1)])
@pytest.mark.parametrize("rank", range(4))
def test_chunks_in_flight_are_torchs_warm_up_and_one(rank, schedule, factor, micro_batches):
    warm_up = _get_warmup_ops(rank, 2, 4, 4, micro_batches, multiply_factor=factor)
    pipeline = {"ranks": 4, "micro_batches": micro_batches, "stages_per_rank": 2, "schedule": schedule}
    assert chunks_in_flight(rank=rank, **pipeline) == min(warm_up + 1, 2 * micro_batches)


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_stages_follow():
    pipeline = {"ranks": 4, "micro_batches": 8, "stages_per_rank": 1}
    assert [chunks_in_flight(rank=i, schedule="GPipe", **pipeline) for i in range(4)] == [8, 8, 8, 8]
    assert [chunks_in_flight(rank=i, schedule="1F1B", **pipeline) for i in range(4)] == [4, 3, 2, 1]


# ---------------------------------------------------------------------------------------------------- batch


def test_prompts_become_rows_and_micro_batches():
    # 6 prompts: 3 for each of 2 generators, and for each of 2 steps; 3 x 4 = 12 samples of 40 tokens, 6 for
    # each of 2 ranks, 2 to a row of 100.
    plan = batch_plan(run(world_size=2))
    assert (plan.generators, plan.prompts_per_generator, plan.idle_generators) == (2, 3, 0)
    assert (plan.samples, plan.samples_per_step, plan.tokens_per_step) == (24, 12, 480)
    assert (plan.samples_per_rank, plan.rows_per_rank, plan.micro_batches_per_rank) == (6, 3, 2)
    assert (plan.rows, plan.micro_batches, plan.iterations) == (6, 4, 10)


def test_model_parallel_ranks_train_on_the_same_samples():
    facts = run(world_size=8, parallelism={"tensor_parallel_degree": 4}, generator=GeneratorFacts(degree=2))
    # 4 generators, 2 prompts each; 12 samples a step on 2 data-parallel ranks of 4 each.
    plan = batch_plan(facts)
    assert (plan.generators, plan.data_ranks) == (4, 2)
    assert (plan.samples_per_rank, plan.rows_per_rank, plan.micro_batches_per_rank) == (6, 3, 2)


def test_generators_without_a_prompt_are_counted():
    assert batch_plan(run(world_size=16)).idle_generators == 10


# ---------------------------------------------------------------------------------------------- activations


def test_a_layer_keeps_what_the_formula_says():
    # bf16: 2 x (4 D + (2 N + 2 K) H + 4 F) + 4 N + 4 H (rotary) + 2 norms of 4
    expected = 2 * (4 * 8 + (8 + 4) * 2 + 4 * 16) + 4 * 4 + 4 * 2 + 8
    assert layer_bytes(run(), 0).whole == expected == 272


def test_normalised_heads_and_cosines_add_theirs():
    qwen = dataclasses.replace(TINY, has_qk_norm=True, is_complex_rope=False)
    # queries and keys before their norm, one reciprocal per head, and twice the rotary rows
    assert layer_bytes(run(qwen), 0).whole == 272 + 2 * (4 + 2) * 2 + 4 * (4 + 2) + 4 * 2


def test_tensor_parallelism_divides_all_but_what_a_projection_takes_whole():
    halved = layer_bytes(run(world_size=2, parallelism={"tensor_parallel_degree": 2}), 0).whole
    # whole: the outputs of both norms and the rotary rows
    assert halved == (272 - 2 * 2 * 8 - 4 * 2) / 2 + 2 * 2 * 8 + 4 * 2
    without = run(world_size=2, parallelism={"tensor_parallel_degree": 2, "enable_sequence_parallel": False})
    assert layer_bytes(without, 0).whole == halved + (2 * 2 * 8 + 8) / 2


def test_full_recomputation_keeps_the_input_of_a_layer_and_computes_one_anew():
    facts = run(recomputation="full")
    assert layer_bytes(facts, 0).kept == 16
    stages = stages_of_rank(facts, 0)
    beside = outside_layers(facts, is_first=True, is_last=True)
    assert beside == 16 + (16 + 4) + 16
    assert activation_bytes(facts, stages) == 200 * (2 * 16 + beside)
    assert recomputed_bytes(facts, stages) == 200 * (272 - 16)


def test_selective_recomputation_keeps_every_second_product_and_the_attention():
    # products: qkv (kept, 16 wide), wo, w1 (kept, 16), w3, w2 (kept, 8); attention: 8 wide, 4 sums
    assert layer_bytes(run(recomputation="selective"), 0).kept == 16 + 2 * (16 + 16 + 8) + 2 * 8 + 4 * 4


def test_a_memory_budget_lies_between_full_recomputation_and_none():
    assert layer_bytes(run(recomputation="budget", memory_budget=0.25), 0).kept == 16 + 0.25 * (272 - 16)


def test_experts_keep_a_copy_of_a_token_each():
    sparse = Experts(num_experts=4, top_k=2, hidden_dim=6)
    moe = dataclasses.replace(TINY, hidden_dims=(0, 0), experts=(sparse, sparse))
    dense_feed_forward = 2 * 2 * 8 + 4 + 2 * 4 * 16
    routed = 2 * (2 * 8 + 4 * 2 * 6 + 4 * 8)  # input, hidden four times in bf16, output in fp32
    router = 4 * 4 + 4 * 8 + 2 * (3 * 8 + 2 * 4)
    assert layer_bytes(run(moe), 0).whole == 272 - dense_feed_forward + 2 * 2 * 8 + 4 + routed + router


def test_context_parallel_ranks_see_their_part_of_a_row():
    halved = run(world_size=2, parallelism={"context_parallel_degree": 2})
    assert 2 * activation_bytes(halved, stages_of_rank(halved, 0)) == activation_bytes(
        run(), stages_of_rank(run(), 0)
    )


# --------------------------------------------------------------------------------------------------- memory


def test_what_stays_is_counted_from_shards():
    facts = run(world_size=2, needs_reference=True, needs_critic=True, device_type="cpu")
    sizes = model(2)
    generator = generator_memory(facts, numel=sizes.numel, device_bytes=0)
    items = rank_memory(facts, Models(sizes), generator, transit_bytes=0).items
    numel = (80 + 2 * 1000 + 8 + 80) // 2
    assert items["parameters"] == items["gradients"] == items["reference"] == 4 * numel
    assert items["optimiser state"] == 8 * numel + 4 * 5
    # the critic: no output projection; one row of width 8 and a bias
    assert items["critic"] == items["critic gradients"] == 4 * (numel - 40 + 9)
    assert items["critic optimiser state"] == 8 * (numel - 40 + 9) + 4 * 6
    assert items["buffers"] == 3 * 32


def test_offloaded_models_take_no_device_memory():
    facts = run(needs_reference=True, offloads_reference=True, offloads_policy=True)
    generator = generator_memory(facts, numel=1, device_bytes=0)
    items = rank_memory(facts, Models(model()), generator, transit_bytes=0).items
    assert items["parameters"] == items["gradients"] == items["optimiser state"] == items["reference"] == 0


def test_moments_in_bf16_take_half():
    facts = run(moment_bytes=2)
    generator = generator_memory(facts, numel=1, device_bytes=0)
    items = rank_memory(facts, Models(model()), generator, transit_bytes=0).items
    assert items["optimiser state"] == 4 * model().numel + 4 * 5


def test_stages_hold_their_layers_and_the_rank_that_needs_most_is_found():
    facts = run(
        dataclasses.replace(TINY, num_layers=4, hidden_dims=(16,) * 4, experts=(None,) * 4),
        world_size=2,
        parallelism={
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    )
    sizes = model(layers=4, head=100_000)
    assert [(s.first, s.stop, s.is_first, s.is_last) for r in (0, 1) for s in stages_of_rank(facts, r)] == [
        (0, 2, True, False),
        (2, 4, False, True),
    ]
    generator = generator_memory(facts, numel=sizes.numel, device_bytes=0)
    memory = rank_memory(facts, Models(sizes), generator, transit_bytes=0)
    assert memory.pipeline_rank == 1
    assert memory.items["parameters"] == 4 * (2 * 1000 + 8 + 100_000)


def test_phases_add_up_what_is_there_at_the_same_time():
    facts = run(generator=GeneratorFacts(memory_fraction=0.5, sleeps=True), needs_reference=True)
    generator = generator_memory(facts, numel=model().numel, device_bytes=80 * GIB)
    memory = rank_memory(facts, Models(model()), generator, transit_bytes=77)
    i = memory.items
    resident = sum(
        i[n] for n in ("parameters", "gradients", "optimiser state", "reference", "buffers", "context")
    )
    cache = i["generator weights"] + i["KV cache"]
    assert memory.total("generation") == resident + cache + i["generator activations"]
    assert memory.total("weight sync") == resident + cache + 77
    assert memory.total("training") == resident + i["gathered weights"] + i["activations"] + i["logits"]
    awake = rank_memory(
        dataclasses.replace(facts, generator=GeneratorFacts(memory_fraction=0.5)),
        Models(model()),
        generator,
        transit_bytes=77,
    )
    assert awake.total("training") == memory.total("training") + cache


def test_two_layers_are_gathered_at_a_time_and_all_of_them_where_they_stay():
    sizes = model(2)
    two = run(world_size=2)
    head = 80 + 80 + 8
    assert gathered_bytes(two, sizes, stages_of_rank(two, 0)) == 2 * (2 * 1000 + head) + 6 * 1000
    kept = run(world_size=2, parallelism={"fsdp_reshard_after_forward": "never"})
    assert gathered_bytes(kept, model(2, layers=2), stages_of_rank(kept, 0)) == 2 * (2000 + head) + 6 * 1000


def test_logits_exist_in_chunks_and_the_heads_gradient_in_fp32():
    # 200 tokens are less than a chunk: of [200, 10] 4 + 4 + 2 bytes, of [10, 8] as many
    assert logit_bytes(run()) == 10 * 10 * (200 + 8)
    facts = run(seq_len=10_000)
    assert logit_bytes(facts) == 10 * 10 * (1024 + 8)
    large = dataclasses.replace(facts.architecture, vocab_size=151_936)  # 441 tokens make 256 MiB
    assert logit_bytes(dataclasses.replace(facts, architecture=large)) == 151_936 * 10 * (441 + 8)
    halved = run(world_size=2, parallelism={"tensor_parallel_degree": 2})
    assert logit_bytes(halved) == logit_bytes(run()) / 2


def test_the_kv_cache_is_what_weights_and_activations_leave():
    facts = run(generator=GeneratorFacts(memory_fraction=0.5, max_num_seqs=2, batched_tokens=16))
    memory = generator_memory(facts, numel=1000, device_bytes=100_000)
    # 16 tokens x 2 bytes x (2 x 8 + 2 x 16), and fp32 logits twice for 2 sequences
    assert memory.activations == 16 * 2 * (16 + 32) + 2 * 4 * 2 * 10
    assert memory.kv_cache == 50_000 - 2 * 1000 - memory.activations
    assert memory.bytes_per_token == 2 * (2 * (2 + 2)) * 2
    assert memory.sequences == memory.kv_cache // memory.bytes_per_token // 40


def test_generator_ranks_share_weights_and_heads_and_latents_are_whole():
    shared = run(generator=GeneratorFacts(degree=2, memory_fraction=0.5))
    memory = generator_memory(shared, numel=1000, device_bytes=GIB)
    assert (memory.weights, memory.bytes_per_token) == (1000, 16)
    latent = run(dataclasses.replace(TINY, latent_kv_dim=5), generator=shared.generator)
    assert generator_memory(latent, numel=1000, device_bytes=GIB).bytes_per_token == 2 * 5 * 2


# ------------------------------------------------------------------------------------- traffic and operations


def test_fsdp_gathers_twice_and_reduces_once_for_each_micro_batch():
    facts, sizes = run(world_size=2, needs_reference=True), model(2)
    sent = traffic(facts, sizes, batch_plan(facts)).per_step
    # 2 micro-batches, half of the model each time: three gathers in bf16, one of them for the reference
    assert sent == {"fsdp": 2168 // 2 * 2 * (3 * 2 + 4)}
    for when in ("last_micro_batch", "auto"):  # once, and not in each of the two micro-batches
        deferred = dataclasses.replace(facts, reduce_gradients=when)
        sent = traffic(deferred, sizes, batch_plan(facts)).per_step
        # the first forward pass gathers, both backward passes do, and the reference does in both
        assert sent == {"fsdp": 2168 // 2 * ((3 + 2) * 2 + 4)}


def test_whole_gradients_wait_for_the_last_micro_batch_up_to_one_gib():
    sizes, facts = model(2), run(world_size=2)
    stages = stages_of_rank(facts, 0)
    deferred = dataclasses.replace(facts, reduce_gradients="auto")
    more = gathered_bytes(deferred, sizes, stages) - gathered_bytes(facts, sizes, stages)
    # gradients: all in fp32 instead of a layer in bf16 and fp32; of the weights two layers are all
    assert more == 4 * 2168 - 6 * 1000
    assert deferred.defers_reduction(2**28)
    assert not deferred.defers_reduction(2**28 + 1)


def test_copies_of_the_model_reduce_their_shards_gradient():
    facts = run(
        world_size=4, parallelism={"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    )
    sent = traffic(facts, model(2), batch_plan(facts)).per_step["replicate"]
    assert sent == 2 * 0.5 * 1084 * 4  # once, however many micro-batches


def test_model_parallel_axes_send_hidden_states():
    facts = run(
        dataclasses.replace(TINY, num_layers=4, hidden_dims=(16,) * 4, experts=(None,) * 4),
        world_size=8,
        parallelism={
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "context_parallel_degree": 2,
        },
    )
    batch = batch_plan(facts)
    rows, sent = 2 * batch.micro_batches_per_rank, traffic(facts, model(layers=4), batch).per_step
    hidden = 2 * 8 * rows * 50  # bytes of the hidden states of this rank's half of its rows
    assert sent["tensor"] == hidden / 2 * 2 * 8  # half each time, 2 layers, four forward and four backward
    assert sent["pipeline"] == hidden / 2 * 2  # cut over tensor ranks; forward and back
    assert (
        sent["context"] == 2 * (2 * 4 / 2) * rows * 100 / 2 * 2 * 2
    )  # keys and values, gathered and reduced


def test_a_weight_sync_sends_every_tensor_once():
    facts = run(world_size=4, parallelism={"tensor_parallel_degree": 2})
    assert sync_bytes(facts, model()) == 2168 * 4 * 3 / 4


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        (2**20, 8672),  # all of the model: half of a bucket takes it
        (16000, 8672),  # 320 + 4000 and 4000 + 352 bytes, one while the other is read
        (6000, 4352),  # 320, 4000, 4000, 352: a layer and its neighbour
        (4000, 4000),  # a layer by itself
        (100, 4000),  # more than a bucket
    ],
)
def test_a_weight_sync_holds_a_bucket_or_one_larger_tensor(bucket_bytes, expected):
    facts = run(world_size=4, parallelism={"tensor_parallel_degree": 2}, bucket_bytes=bucket_bytes)
    assert transit_bytes(facts, model()) == expected
    assert transit_bytes(run(bucket_bytes=bucket_bytes), model()) == 4000  # not sharded


def test_operations_are_two_per_weight_and_token_and_attention():
    facts = run()
    per_token = forward_flops_per_token(TINY, model(), context=40)
    assert per_token == 2 * (2168 - 80) + 2 * 2 * 4 * 4 * 40
    tied = dataclasses.replace(TINY, is_tied=True)
    assert forward_flops_per_token(tied, model(), context=0) == 2 * 2168
    counted = work(
        dataclasses.replace(facts, needs_old=True, recomputation="full"), Models(model()), batch_plan(facts)
    )
    assert (counted.training, counted.recomputation, counted.scoring) == tuple(
        n * per_token * 480 for n in (3, 1, 1)
    )


def test_a_reward_model_and_a_teacher_are_passes_of_their_own_sizes():
    facts = run()  # 6 prompts of 4 samples of 40 tokens, in two steps
    batch, larger = batch_plan(facts), model(layer=3000)
    wider = dataclasses.replace(TINY, dim=16, num_heads=8)
    models = Models(model(), teacher=larger, reward_model=model(layer=500), teacher_architecture=wider)
    teacher = forward_flops_per_token(wider, larger, context=40)
    reward_model = forward_flops_per_token(TINY, model(layer=500), context=40)
    assert teacher == 2 * (6168 - 80) + 2 * 2 * 8 * 4 * 40
    assert work(facts, models, batch).scoring == 12 * 40 * (teacher + reward_model)
    assert work(facts, Models(model()), batch).scoring == 0


def test_greedy_baselines_are_generated_and_scored_by_the_reward_model_and_not_trained_on():
    facts, models = run(), Models(model(), reward_model=model())
    greedy = dataclasses.replace(facts, needs_baseline=True)
    assert (batch_plan(facts).baselines, batch_plan(greedy).baselines) == (0, 6)
    without, with_baselines = (work(f, models, batch_plan(f)) for f in (facts, greedy))
    completion = 30 * forward_flops_per_token(TINY, model(), context=10 + 15)
    assert with_baselines.generation - without.generation == 6 * completion
    scored = forward_flops_per_token(TINY, model(), context=40) * 40
    assert with_baselines.scoring - without.scoring == 3 * scored  # half of them in each of two steps
    assert with_baselines.training == without.training


def test_a_token_meets_as_many_experts_as_it_is_sent_to():
    sparse = Experts(num_experts=4, top_k=1, hidden_dim=6)
    moe = dataclasses.replace(TINY, hidden_dims=(0, 0), experts=(sparse, sparse))
    sizes = ShardSizes((ShardSize("layers.0.moe.routed_experts.inner_experts.w1_EFD", 400, 400),), {}, 0)
    assert forward_flops_per_token(moe, sizes, context=0) == 2 * 100


def test_a_critic_doubles_what_training_sends_and_not_what_scoring_sends():
    facts = run(world_size=8, parallelism={"tensor_parallel_degree": 2})
    batch, sizes = batch_plan(facts), model(2)

    def sent(**changes):
        return traffic(dataclasses.replace(facts, **changes), sizes, batch).per_step["tensor"]

    scoring = sent(needs_reference=True) - sent(needs_reference=False)
    with_critic = sent(needs_critic=True, needs_reference=True) - sent(
        needs_critic=True, needs_reference=False
    )
    assert scoring > 0
    assert with_critic == scoring
    training = sent(needs_old=False, needs_reference=False)
    assert sent(needs_critic=True, needs_old=False, needs_reference=False) == 2 * training + scoring
