"""The local generator against ``transformers`` in fp32 on a CPU; log-probabilities agree within TOLERANCE."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torchtitan.models.deepseek_v3 import model_registry as deepseek_registry
from torchtitan.models.gpt_oss import model_registry as gpt_oss_registry
from torchtitan.models.llama3 import model_registry as llama3_registry
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from titan_rl.errors import ConfigError, GeneratorError
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.generation.local import LocalGenerator
from titan_rl.generation.protocol import GeneratorContext, generate
from titan_rl.titan import device
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.experts import use_cpu_experts
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.models import build_unsharded
from titan_rl.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightUpdate

device.install()

TOLERANCE = 1e-5
VOCAB = 97
MAX_MODEL_LEN = 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # large, so that the distributions are far from uniform
}
PROMPTS = [(5, 6, 7, 8, 9), (11,), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8), (90, 12), (11, 12, 13)]


def make_peer(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def stream(peer: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name; a tied head comes beside the embedding, as in the policy's stream."""
    yield from peer.state_dict().items()


def update(tensors: Iterable[tuple[str, torch.Tensor]], version: int = 0) -> WeightUpdate:
    return WeightUpdate("full", version=version, base_version=None, tensors=tensors)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def peer(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_peer(request.param, seed=1)


@pytest.fixture(scope="module")
def context(peer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> GeneratorContext:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(
        json.dumps(peer.config.to_dict() | {"architectures": [type(peer).__name__]})
    )
    spec = spec_from_hf(directory)
    return GeneratorContext(
        model_dir=str(directory),
        model_config=spec.model,
        adapter=spec.state_dict_adapter(spec.model, str(directory)),
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        seed=0,
        device_type="cpu",
        run_threads=1,
    )


@pytest.fixture
def generator(context: GeneratorContext, peer: PreTrainedModel) -> LocalGenerator:
    generator = LocalGenerator(LocalGenerator.Config(max_num_seqs=3), context)
    generator.load_weights(update(stream(peer)))
    return generator


def make_requests(
    prompts: list[tuple[int, ...]] = PROMPTS, *, base_seed: int = 1000, **sampling: object
) -> list[GenerationRequest]:
    params = SamplingParams(**({"max_tokens": 12} | sampling))
    return [GenerationRequest(f"p{i}/0/0", p, params, seed=base_seed + i) for i, p in enumerate(prompts)]


def peer_logits(peer: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return peer(torch.tensor([tokens])).logits[0]


def peer_logprobs(
    peer: PreTrainedModel, request: GenerationRequest, completion: Completion, temperature: float
) -> torch.Tensor:
    tokens = request.prompt_token_ids + completion.token_ids
    logprobs = torch.log_softmax(peer_logits(peer, tokens) / temperature, -1)
    start = len(request.prompt_token_ids) - 1
    return logprobs[range(start, len(tokens) - 1), list(completion.token_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_of_sampled_tokens_are_those_of_transformers(
    generator: LocalGenerator, peer: PreTrainedModel, temperature: float
) -> None:
    requests = make_requests(temperature=temperature)
    for request, completion in zip(requests, generate(generator, requests, 60), strict=True):
        expected = peer_logprobs(peer, request, completion, temperature)
        assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE)
        assert len(completion.token_ids) == 12
        assert completion.policy_versions == ((0, 0),)


def test_greedy_tokens_are_those_of_transformers_with_logprobs_at_temperature_one(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    requests = make_requests(temperature=0.0, top_p=0.5)
    for request, completion in zip(requests, generate(generator, requests, 60), strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        peer.generation_config.eos_token_id = None
        expected = peer.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert completion.token_ids == tuple(expected[0, prompt.shape[1] :].tolist())
        logprobs = peer_logprobs(peer, request, completion, 1.0)
        assert torch.tensor(completion.logprobs) == pytest.approx(logprobs, abs=TOLERANCE)


def test_tokens_depend_neither_on_order_nor_on_other_requests_nor_on_the_batch_size(
    context: GeneratorContext, generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    requests = make_requests()
    together = {c.request_id: c for c in generate(generator, requests, 60)}
    wide = LocalGenerator(LocalGenerator.Config(max_num_seqs=16, max_num_batched_tokens=20), context)
    wide.load_weights(update(stream(peer)))
    others = [
        GenerationRequest(f"other{i}", (i, 2 * i), SamplingParams(max_tokens=3 + i), seed=i)
        for i in range(1, 8)
    ]
    reordered = generate(wide, [*others, *reversed(requests)], 60)[len(others) :]
    alone = [generate(generator, [request], 60)[0] for request in requests]
    for completion in [*reordered, *alone]:
        expected = together[completion.request_id]
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_siblings_with_other_seeds_differ_and_equal_seeds_agree(generator: LocalGenerator) -> None:
    prompt = PROMPTS[2]
    params = SamplingParams(max_tokens=12)
    seeds = [7, 7 + 2**32, 8, 7]  # the second differs from the first in its upper bits alone
    requests = [GenerationRequest(f"g/{i}/0", prompt, params, seed=seed) for i, seed in enumerate(seeds)]
    tokens = [completion.token_ids for completion in generate(generator, requests, 60)]
    assert tokens[0] == tokens[3]
    assert len(set(tokens)) == 3


def test_sampled_tokens_follow_the_distribution_of_transformers(
    context: GeneratorContext, peer: PreTrainedModel
) -> None:
    num_draws = 4000
    generator = LocalGenerator(LocalGenerator.Config(max_num_seqs=num_draws), context)
    generator.load_weights(update(stream(peer)))
    tokens = [
        c.token_ids[0] for c in generate(generator, make_requests([(5, 6)] * num_draws, max_tokens=1), 60)
    ]
    fractions = torch.tensor(tokens).bincount(minlength=VOCAB) / num_draws
    expected = torch.softmax(peer_logits(peer, (5, 6))[-1], -1)
    # Five standard deviations of each token's count.
    assert ((fractions - expected).abs() <= 5 * (expected / num_draws).sqrt() + 2 / num_draws).all()


def test_truncated_sampling_stays_in_the_nucleus_and_renormalises_its_logprobs(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    requests = make_requests([(5, 6)] * 40, max_tokens=1, top_k=2)
    best = torch.softmax(peer_logits(peer, (5, 6))[-1], -1).topk(2)
    kept = dict(zip(best.indices.tolist(), (best.values / best.values.sum()).log().tolist(), strict=True))
    completions = generate(generator, requests, 60)
    assert {c.token_ids[0] for c in completions} == set(kept)
    for completion in completions:
        assert completion.logprobs[0] == pytest.approx(kept[completion.token_ids[0]], abs=TOLERANCE)


def test_a_stop_token_ends_the_completion_and_is_kept_as_its_last_token(generator: LocalGenerator) -> None:
    free = generate(generator, make_requests(), 60)
    stops = (free[0].token_ids[4], free[2].token_ids[7])
    for before, after in zip(free, generate(generator, make_requests(stop_token_ids=stops), 60), strict=True):
        cut = next((i + 1 for i, token in enumerate(before.token_ids) if token in stops), None)
        assert after.token_ids == before.token_ids[:cut]
        assert after.finish_reason is (FinishReason.LENGTH if cut is None else FinishReason.STOP)
    assert free[0].finish_reason is FinishReason.LENGTH


def test_completions_come_in_finishing_order_and_refill_the_batch(generator: LocalGenerator) -> None:
    limits = [9, 2, 5, 1, 3]
    requests = [GenerationRequest(f"r{n}", PROMPTS[0], SamplingParams(max_tokens=n), seed=n) for n in limits]
    generator.submit(requests)
    # Three rows: r2 leaves first, r1 takes its row and is done at once, then r3, while r5 has had two tokens.
    order = [completion.request_id for completion in generator.completions(60)]
    assert order == ["r2", "r1", "r3", "r5", "r9"]


def test_a_model_fills_its_whole_length_and_longer_requests_are_refused(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    prompt = tuple(range(1, 41))
    request = GenerationRequest("full", prompt, SamplingParams(max_tokens=MAX_MODEL_LEN - 40), seed=3)
    completion = generate(generator, [request], 60)[0]
    assert len(completion.token_ids) == MAX_MODEL_LEN - 40
    expected = peer_logprobs(peer, request, completion, 1.0)
    assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    too_long = GenerationRequest("long", prompt, SamplingParams(max_tokens=MAX_MODEL_LEN - 39), seed=3)
    with pytest.raises(GeneratorError, match=r"'long' must have .* at most 64 together; got 40 and 25"):
        generator.submit([request, too_long])
    assert generator.status().num_in_flight == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "at least one prompt token"),
        ((1, VOCAB), {}, "below 97; got 97"),
        ((1,), {"temperature": -1.0}, "temperature in its range"),
        ((1,), {"top_p": 0.0}, "top_p in its range"),
        ((1,), {"top_k": -1}, "top_k in its range"),
        ((1,), {"min_p": 1.5}, "min_p in its range"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    generator: LocalGenerator, prompt: tuple[int, ...], sampling: dict[str, float], message: str
) -> None:
    with pytest.raises(GeneratorError, match=message):
        generator.submit(make_requests([prompt], **sampling))


def test_an_id_in_flight_is_refused_a_second_time(generator: LocalGenerator) -> None:
    requests = make_requests()
    generator.submit(requests)
    with pytest.raises(GeneratorError, match="'p1/0/0' twice"):
        generator.submit(make_requests(PROMPTS[:2])[1:])
    generator.abort([request.id for request in requests])
    with pytest.raises(GeneratorError, match="'p0/0/0' twice"):
        generator.submit([requests[0], requests[0]])


def test_a_deadline_names_the_unfinished_requests_and_loses_nothing(generator: LocalGenerator) -> None:
    requests = [
        GenerationRequest(f"r{n}", PROMPTS[n % 5], SamplingParams(max_tokens=n), seed=n) for n in (3, 7, 9, 8)
    ]
    expected = {c.request_id: c.token_ids for c in generate(generator, requests, 60)}
    generator.submit(requests)
    first = next(generator.completions(60))
    with pytest.raises(GeneratorError, match=r"got 3 unfinished: 'r7', 'r9', 'r8'"):
        next(generator.completions(0))
    assert generator.status().num_in_flight == 3
    rest = [first, *generator.completions(60)]
    assert {c.request_id: c.token_ids for c in rest} == expected


def test_aborted_requests_yield_nothing_and_do_not_disturb_the_others(generator: LocalGenerator) -> None:
    expected = {c.request_id: c.token_ids for c in generate(generator, make_requests(), 60)}
    generator.submit(make_requests())
    for _ in range(4):
        generator._step()
    generator.abort(["p0/0/0", "p4/0/0", "unknown"])  # one in the batch, one waiting
    got = {c.request_id: c.token_ids for c in generator.completions(60)}
    assert got == {name: expected[name] for name in ("p1/0/0", "p2/0/0", "p3/0/0")}


def test_pausing_ends_the_iterator_and_resuming_goes_on(generator: LocalGenerator) -> None:
    expected = {c.request_id: c.token_ids for c in generate(generator, make_requests(), 60)}
    generator.submit(make_requests())
    got = {}
    for completion in generator.completions(60):
        got[completion.request_id] = completion.token_ids
        generator.pause()
    assert len(got) == 1
    assert generator.status().num_in_flight == 4
    assert list(generator.completions(60)) == []
    generator.resume()
    got |= {c.request_id: c.token_ids for c in generator.completions(60)}
    assert got == expected


def test_nothing_is_generated_before_weights_are_loaded(context: GeneratorContext) -> None:
    generator = LocalGenerator(LocalGenerator.Config(), context)
    assert generator.status().policy_version is None
    with pytest.raises(GeneratorError, match="complete set of weights"):
        generator.submit(make_requests())
    with pytest.raises(GeneratorError, match="complete set of weights"):
        generator.prompt_logprobs([(1, 2)])


def test_a_second_load_serves_the_new_weights(generator: LocalGenerator, peer: PreTrainedModel) -> None:
    old = generate(generator, make_requests(), 60)
    newer = make_peer("llama" if peer.config.model_type == "llama" else "qwen3", seed=2)
    receipt = generator.load_weights(update(stream(newer), version=5))
    assert (receipt.version, receipt.unwritten) == (5, ())
    assert receipt.checksums == {name: tensor_checksum(t) for name, t in newer.state_dict().items()}
    assert generator.status().policy_version == 5
    requests = make_requests()
    completions = generate(generator, requests, 60)
    assert [c.token_ids for c in completions] != [c.token_ids for c in old]
    for request, completion in zip(requests, completions, strict=True):
        expected = peer_logprobs(newer, request, completion, 1.0)
        assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE)
        assert completion.policy_versions == ((0, 5),)


def test_weights_that_did_not_arrive_are_named_and_nothing_is_served(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    missing = ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")
    receipt = generator.load_weights(update((n, t) for n, t in stream(peer) if n not in missing))
    assert receipt.unwritten == ("layers.1.attention.qkv_linear.wk.weight", "norm.weight")
    assert generator.status().policy_version is None
    with pytest.raises(GeneratorError, match="complete set of weights"):
        generator.submit(make_requests())


def test_weights_arrive_in_any_order(generator: LocalGenerator, peer: PreTrainedModel) -> None:
    before = generate(generator, make_requests(), 60)
    tensors = sorted(stream(peer), key=lambda pair: pair[0].split(".")[-2:])
    assert generator.load_weights(update(tensors)).unwritten == ()
    assert generate(generator, make_requests(), 60) == before


CHANGED = ("layers.0.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight")


def test_a_delta_changes_what_it_holds_and_leaves_the_rest(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    newer = copy.deepcopy(peer)
    with torch.no_grad():
        for name, parameter in newer.named_parameters():
            if name.endswith(CHANGED):
                parameter.mul_(1.5)
    some = [(name, tensor) for name, tensor in stream(newer) if name.endswith(CHANGED)]
    receipt = generator.load_weights(WeightUpdate("delta", version=3, base_version=0, tensors=some))
    assert (receipt.version, receipt.unwritten) == (3, ())
    assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in some}
    assert len(some) == 3
    (request,) = make_requests(PROMPTS[:1])
    (completion,) = generate(generator, [request], 60)
    expected = peer_logprobs(newer, request, completion, 1.0)
    assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    assert (peer_logprobs(peer, request, completion, 1.0) - expected).abs().max() > 100 * TOLERANCE


def test_a_delta_to_another_version_than_the_served_one_is_refused(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    with pytest.raises(GeneratorError, match=r"apply to the served version 0; got one to 7"):
        generator.load_weights(WeightUpdate("delta", version=8, base_version=7, tensors=[]))
    assert generator.status().policy_version == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("model.norm.weight", torch.ones(48)), r"arrive once; got model\.norm\.weight twice"),
        (("model.layers.9.input_layernorm.weight", torch.ones(48)), r"belong to .*got model\.layers\.9\."),
        (("model.unknown.weight", torch.ones(1)), r"belong to .*got model\.unknown\.weight"),
    ],
)
def test_a_stream_with_one_tensor_too_many_is_read_to_its_end_and_refused(
    generator: LocalGenerator, peer: PreTrainedModel, extra: tuple[str, torch.Tensor], message: str
) -> None:
    tensors = iter([extra, *stream(peer)])
    with pytest.raises(GeneratorError, match=message):
        generator.load_weights(update(tensors))
    assert next(tensors, None) is None
    assert generator.status().policy_version is None


def test_a_weight_of_another_shape_is_refused(generator: LocalGenerator, peer: PreTrainedModel) -> None:
    tensors = [(n, t[:-1] if n == "model.norm.weight" else t) for n, t in stream(peer)]
    with pytest.raises(GeneratorError, match=r"norm\.weight must have shape \[48\]; got \[47\]"):
        generator.load_weights(update(tensors))


def test_weights_are_refused_while_requests_are_in_flight(
    generator: LocalGenerator, peer: PreTrainedModel
) -> None:
    generator.submit(make_requests())
    with pytest.raises(GeneratorError, match="load_weights must find nothing in flight"):
        generator.load_weights(update(stream(peer)))


def test_probe_logprobs_are_those_of_transformers(generator: LocalGenerator, peer: PreTrainedModel) -> None:
    probes = [PROMPTS[2], (4, 5), tuple(range(1, MAX_MODEL_LEN + 1))]
    for temperature in (1.0, 0.5):
        scores = generator.prompt_logprobs(probes, temperature)
        for probe, got in zip(probes, scores, strict=True):
            logprobs = torch.log_softmax(peer_logits(peer, probe) / temperature, -1)
            expected = logprobs[range(len(probe) - 1), list(probe[1:])]
            assert torch.tensor(got) == pytest.approx(expected, abs=TOLERANCE)
    with pytest.raises(GeneratorError, match="2 to 64 tokens"):
        generator.prompt_logprobs([(1,)])


def test_sleeping_between_iterations_changes_nothing(generator: LocalGenerator) -> None:
    before = generate(generator, make_requests(), 60)
    generator.sleep()
    generator.wake_up()
    assert generate(generator, make_requests(), 60) == before


def test_building_leaves_the_random_numbers_of_the_run_alone(context: GeneratorContext) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    LocalGenerator(LocalGenerator.Config(), context)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("registry", [llama3_registry, deepseek_registry])
def test_a_model_without_an_adapter_takes_the_weights_under_torchtitans_names(
    context: GeneratorContext, registry: Callable[..., Any]
) -> None:
    """Llama's projections of q, k and v are fused; DeepSeek-V3 has latent attention, experts and biases."""
    model_config = registry("debugmodel").model
    use_cpu_experts(model_config)
    uncached_config = copy.deepcopy(model_config)
    use_cpu_attention(uncached_config)
    uncached = build_unsharded(uncached_config, max_seq_len=MAX_MODEL_LEN)
    for name, bias in uncached.named_buffers():
        if name.endswith("expert_bias_E"):
            bias.copy_(0.1 * torch.randn(bias.shape))
    generator = LocalGenerator(
        LocalGenerator.Config(), dataclasses.replace(context, model_config=model_config, adapter=None)
    )
    assert generator.load_weights(update(uncached.state_dict().items())).unwritten == ()
    requests = make_requests()
    for request, completion in zip(requests, generate(generator, requests, 60), strict=True):
        tokens = torch.tensor([request.prompt_token_ids + completion.token_ids])
        positions = torch.arange(tokens.shape[1])[None]
        logprobs = uncached(tokens, positions, uncached.get_attention_masks(positions))[0].log_softmax(-1)
        start = len(request.prompt_token_ids) - 1
        expected = logprobs[range(start, tokens.shape[1] - 1), list(completion.token_ids)]
        assert torch.tensor(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE)


def test_a_model_with_other_masks_than_causal_ones_is_refused(context: GeneratorContext) -> None:
    config = gpt_oss_registry("debugmodel").model
    with pytest.raises(ConfigError, match=r"plain causal attention; got GptOssModel, which has its own"):
        LocalGenerator(LocalGenerator.Config(), dataclasses.replace(context, model_config=config))
