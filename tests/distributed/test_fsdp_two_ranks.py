"""Two gloo ranks of FSDP against one rank and against transformers: start, loading, and a step of GRPO.

The computation is in fsdp_worker.py: once on two forked ranks, once in this process with one.
"Equal" for gradients: per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32. Logits of small random models
are compared within 1e-5; those of SmolLM2-135M are in test_smollm2_logits.py.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from tests.distributed import comparing, fsdp_worker, launching
from tests.distributed.comparing import random_peer, unequal, uneven_norms

pytestmark = pytest.mark.slow

LOGITS = 1e-5
MODELS = ("llama", "llama_tied", "qwen3", "qwen3_tied")
PROMPT = [[1, 2, 3, 4, 5, 6, 7], [90, 8, 7, 6, 5, 4, 3]]
LAYOUTS = ("eight_of_one", "one_of_eight", "packed")


def _peers() -> dict[str, LlamaForCausalLM | Qwen3ForCausalLM]:
    peers = {}
    for seed, name in enumerate(MODELS):
        model = random_peer(name, seed=seed).eval()
        uneven_norms(model)
        peers[name] = model
    return peers


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("fsdp")
    peers = _peers()
    for name, peer in peers.items():
        peer.save_pretrained(directory / name)
    (directory / "prompt.json").write_text(json.dumps(PROMPT))
    launching.compute(fsdp_worker, directory)
    found = launching.results(directory)
    found.peers = peers
    return found


def gradients(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    return comparing.gradients(tensors, f"gradient/{case}", at_least=20)


# ------------------------------------------------------------------------------- random initialisation


@pytest.mark.parametrize("model", ["llama", "qwen3_tied"])
def test_a_random_model_starts_from_the_same_bits_on_one_rank_and_on_two(launch, model):
    names = [name for name in launch.alone if name.startswith(f"init/{model}/")]
    assert len(names) >= 20
    assert all(torch.equal(launch.alone[name], launch.sharded[name]) for name in names)
    assert not any(launch.alone[name].isnan().any() for name in names)


def test_shards_of_a_random_model_differ_and_without_our_initialisation_they_would_not(launch):
    first, second = (rank["init"] for rank in launch.two)
    drawn = [name for name in first["llama"] if "norm" not in name]
    assert len(drawn) == 16
    assert all(first["llama"][name] != second["llama"][name] for name in drawn)
    assert all(first["without"][name] == second["without"][name] for name in drawn)  # the fault of 0.3.0


# --------------------------------------------------------------------------------- loading and the stream


@pytest.mark.parametrize("model", MODELS)
def test_logits_after_loading_equal_those_of_transformers(launch, model):
    with torch.no_grad():
        expected = launch.peers[model](torch.tensor(PROMPT)).logits
    assert expected.std() > 0.3
    for tensors in (launch.alone, launch.sharded):
        torch.testing.assert_close(tensors[f"logits/{model}"], expected, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("model", MODELS)
def test_the_stream_of_a_sharded_model_is_the_file_bit_for_bit_in_one_order(launch, model):
    ranks = [rank["weights"][model] for rank in [launch.one, *launch.two]]
    assert [(rank["same_names"], rank["bit_exact"]) for rank in ranks] == [(True, True)] * 3
    assert ranks[0]["order"] == ranks[1]["order"] == ranks[2]["order"]
    assert len(set(ranks[0]["order"])) == len(ranks[0]["order"])
    assert [rank["cuts_a_head"] for rank in ranks] == [False, True, True]


@pytest.mark.parametrize("model", MODELS)
def test_buckets_of_any_size_give_the_same_stream_and_bound_what_is_held(launch, model):
    for rank in [launch.one, *launch.two]:
        for size, read in zip(fsdp_worker.BUCKETS, rank["weights"][model]["buckets"], strict=True):
            assert read["is_same"]
            assert read["largest"] <= read["peak"] <= max(size, read["largest"])
        one_by_one, some, everything = (read["peak"] for read in rank["weights"][model]["buckets"])
        assert one_by_one < some < everything == read["all"]


# ---------------------------------------------------------------------------------------- a step of GRPO


def test_the_layouts_differ_as_the_comparisons_below_assume(launch):
    one, two = launch.one["step"], [rank["step"] for rank in launch.two]
    assert one["micro_batches"] == {"eight_of_one": 8, "one_of_eight": 1, "packed": 3}
    assert two[0]["micro_batches"] == {"eight_of_one": 4, "one_of_eight": 1, "packed": 3}
    assert one["num_documents"]["packed"] == [2, 3, 3]
    assert two[1]["num_documents"]["packed"] == [4, 0, 0]  # two are empty, to stay in step
    assert one["num_documents"]["one_of_eight"] == [1] * 8
    assert one["counts"] == two[0]["counts"] == two[1]["counts"]
    assert one["counts"][1] == len(fsdp_worker.LENGTHS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_of_a_step_depends_on_neither_layout_nor_ranks(launch, layout, world_size):
    expected = gradients(launch.alone, "one_of_eight")
    got = gradients(launch.alone if world_size == 1 else launch.sharded, layout)
    assert unequal(got, expected) == []


def test_a_rank_without_samples_stays_in_step(launch):
    trained = [rank["step"]["empty"] for rank in launch.two]
    assert all(count > 0 for count in trained[0])
    assert trained[1] == [0] * len(trained[0])
    got = gradients(launch.sharded, "one_rank_empty")
    assert unequal(got, gradients(launch.alone, "one_of_eight")) == []


@pytest.mark.parametrize("case", ["resharded", "replicated"])
def test_gradients_are_equal_when_weights_are_resharded_after_forward_or_replicated(launch, case):
    assert unequal(gradients(launch.sharded, case), gradients(launch.alone, "one_of_eight")) == []


WHEN = ("every_micro_batch", "last_micro_batch")


@pytest.mark.parametrize("axis", ["sharded", "replicated"])
@pytest.mark.parametrize("when", WHEN)
def test_gradients_are_equal_whenever_they_are_reduced(launch, axis, when):
    got = gradients(launch.sharded, f"reduced_{when}/{axis}")
    assert unequal(got, gradients(launch.alone, "one_of_eight")) == []


def test_gradients_travel_once_per_step_or_once_per_micro_batch(launch):
    micro_batches = launch.two[0]["step"]["micro_batches"]["eight_of_one"]
    assert micro_batches == 4
    counts = launch.two[0]["step"]["reductions"]

    def reductions(axis: str, operation: str) -> list[int]:
        found = [counts[f"reduced_{when}/{axis}"] for when in WHEN]
        return [sum(n for name, n in of.items() if operation in name) for of in found]

    every, last = reductions("sharded", "reduce_scatter")
    assert every == micro_batches * last > 0
    every, last = reductions("sharded", "_allgather_base_")
    assert 0 < last < every  # a micro-batch finds the weights that the one before it gathered
    every, last = reductions("replicated", "allreduce")
    assert every == last > 0  # the sum over replicas waits in any case


def test_gradients_of_tied_weights_with_normed_heads_are_equal_on_one_rank_and_two(launch):
    assert unequal(gradients(launch.sharded, "tied"), gradients(launch.alone, "tied")) == []


def test_no_gradient_is_left_over_from_the_planted_faults(launch):
    for tensors in (launch.alone, launch.sharded):
        assert unequal(gradients(tensors, "again"), gradients(tensors, "packed")) == []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fault", ["mean_per_micro_batch", "leaking"])
def test_planted_faults_are_noticed(launch, fault, world_size):
    tensors = launch.alone if world_size == 1 else launch.sharded
    expected = gradients(launch.alone, "one_of_eight")
    assert len(unequal(gradients(tensors, f"fault/{fault}"), expected)) == len(expected)


def test_planted_fault_a_mean_over_ranks_is_noticed(launch):
    expected = gradients(launch.alone, "one_of_eight")
    got = gradients(launch.sharded, "fault/averaged_over_ranks")
    assert len(unequal(got, expected)) == len(expected)


def test_masked_tokens_get_no_gradient_at_all(launch):
    for rank in [launch.one, *launch.two]:
        assert rank["step"]["masked"]["masked"] == 0.0
        assert rank["step"]["masked"]["trained"] > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_embedding_of_padding_gets_no_gradient_at_all(launch, layout):
    for tensors in (launch.alone, launch.sharded):
        embedding = gradients(tensors, layout)["tok_embeddings.weight"]
        assert embedding[fsdp_worker.PADDING_TOKEN].abs().max() == 0.0
        assert embedding[: fsdp_worker.PADDING_TOKEN].abs().max() > 1e-4


def test_planted_fault_attention_leaking_from_one_document_to_the_next_reaches_other_embeddings(launch):
    leaking = gradients(launch.alone, "fault/leaking")["tok_embeddings.weight"]
    right = gradients(launch.alone, "packed")["tok_embeddings.weight"]
    assert (leaking - right).norm() > 1e-2 * right.norm()


# -------------------------------------------------------------------------------- collectives, handshake


def test_a_push_is_refused_on_all_ranks_when_one_generator_is_at_fault(launch):
    alone, healthy, faulty = (rank["handshake"] for rank in [launch.one, *launch.two])
    assert alone["sound"] == healthy["sound"] == faulty["sound"] == "version 7"
    causes = {
        "forgets": "1 tensors did not arrive, lm_head.weight among them",
        "fails": "loading them raised GeneratorError: No room for model.layers.0.self_attn",
        "other": "its log-probabilities of the probe differ from the policy's by inf",
    }
    for case, cause in causes.items():
        assert faulty[case].startswith(f"Weight push refused: {cause}")
        assert healthy[case] == faulty[case].replace("refused", "refused by the generator of rank 1")
        assert alone[case] == faulty[case]


def test_scalars_are_reduced_by_name_in_float64(launch):
    first, second = (rank["collectives"] for rank in launch.two)
    assert [first["place"], second["place"]] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    big = 2**40
    assert first["integers"] == second["integers"] == [[[big], [big + 1, big + 1]], [[], [7]], [[], []]]
    assert first["sent"] == [["", "from 1 to 0"], ["", ""]]
    assert second["sent"] == [["from 0 to 1", "from 1 to 1"], ["", ""]]
    for rank in (first, second):
        assert rank["sum"] == {"a": 2.0, "b": 2.0**54 + 2}
        assert rank["max"] == {"a": 1.5, "b": 2.0**53 + 2}
        assert rank["min"] == {"a": 0.5, "b": 2.0**53}
        assert rank["nothing"] == {}
        assert rank["scalar"] == 3.0
        assert rank["any"] == [False, True, True]
        assert rank["first"] == [None, [0, "é0"], [1, "late"], [0, "x" * 2000]]
    alone = launch.one["collectives"]
    assert alone["place"] == [0, 1, 0, 1]
    assert alone["sum"] == alone["max"] == {"a": 0.5, "b": 2.0**53}
    assert alone["any"] == [False, True, True]
    assert alone["first"] == [None, [0, "é0"], None, [0, "x" * 2000]]
