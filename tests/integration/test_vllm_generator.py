"""The real vLLM, on tiny random models, against transformers. Started by torchrun, once per file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.integration.tiny_models import (
    adapted,
    adapter,
    after_delta,
    delta,
    llama,
    moe,
    reference_logprobs,
    weights,
    write_model_dirs,
)
from tests.integration.vllm_scenarios import PREFIX, STOP, requests
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.types import FinishReason

TOLERANCE = 5e-4  # nats; DESIGN: generator against trainer, fp32
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def launch(what: str, ranks: int, directory: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "tests.integration.vllm_scenarios", what, str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (directory / f"{what}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Facts of a single rank, and of each of two ranks that form one generator group."""
    directory = tmp_path_factory.mktemp("vllm")
    write_model_dirs(directory)
    started = {"single": launch("single", 1, directory), "pair": launch("pair", 2, directory)}
    try:
        for what, process in started.items():
            code = process.wait(timeout=600)
            assert code == 0, (directory / f"{what}.log").read_text()[-6000:]
            assert "Traceback" not in (directory / f"{what}.log").read_text()
    finally:
        for process in started.values():
            process.kill()
    return {
        name: json.loads((directory / f"{name}.json").read_text()) for name in ("single0", "pair0", "pair1")
    }


@pytest.fixture(scope="module")
def single(runs: dict[str, Any]) -> dict[str, Any]:
    return runs["single0"]


def worst_difference(batch: list[dict[str, Any]], seed: int, *, is_tied: bool = True) -> float:
    """Largest difference of a log-probability from transformers', with the weights of this seed."""
    return worst_difference_from(llama(seed, is_tied=is_tied), batch)


def worst_difference_from(model: LlamaForCausalLM, batch: list[dict[str, Any]]) -> float:
    """Largest difference of a log-probability from this model's."""
    differences = []
    for request, completion in zip(requests(), batch, strict=True):
        ours = torch.tensor(completion["logprobs"])
        theirs = reference_logprobs(
            model,
            request.prompt_token_ids,
            completion["token_ids"],
            temperature=request.sampling.temperature or 1.0,
        )
        differences.append((ours - theirs).abs().max().item())
    return max(differences)


def by_id(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {c["id"]: c for c in batch}


def test_nothing_is_generated_before_the_first_load(single: dict[str, Any]) -> None:
    assert "complete set of weights" in single["before_first_load"]
    assert single["version_before_first_load"] is None


def test_the_receipt_holds_the_checksum_of_every_tensor_that_arrived(single: dict[str, Any]) -> None:
    version, checksums, unwritten = single["receipt"]
    assert (version, unwritten) == (0, [])
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in weights(1, is_tied=True)}


def test_logprobs_are_those_of_transformers_at_each_temperature(single: dict[str, Any]) -> None:
    assert worst_difference(single["batch"], seed=1) < TOLERANCE


def test_greedy_requests_take_the_most_likely_token(single: dict[str, Any]) -> None:
    for request, completion in zip(requests(), single["batch"], strict=True):
        if request.sampling.temperature == 0:
            token_ids = torch.tensor([[*request.prompt_token_ids, *completion["token_ids"]]])
            with torch.no_grad():
                best = llama(1, is_tied=True)(token_ids).logits[0].argmax(-1)
            assert best[len(request.prompt_token_ids) - 1 : -1].tolist() == completion["token_ids"]


def test_new_weights_are_served_tied_head_included(single: dict[str, Any]) -> None:
    # Not the first weights: with those, a stale packed head or stale cached keys would go unnoticed.
    assert worst_difference(single["batch_second_weights"], seed=2) < TOLERANCE
    assert worst_difference(single["batch_third_weights"], seed=3) < TOLERANCE
    assert worst_difference(single["batch_second_weights"], seed=1) > 0.1


def test_an_untied_head_is_served_too(single: dict[str, Any]) -> None:
    assert worst_difference(single["batch_untied"], seed=2, is_tied=False) < TOLERANCE


def test_new_experts_are_served(single: dict[str, Any]) -> None:
    # vLLM packs experts once on a CPU; see _forget_packed_experts.
    assert single["unwritten_moe"] == []
    scores = torch.tensor(single["probe_moe"][0])
    theirs = reference_logprobs(moe(2), PREFIX[:1], PREFIX[1:], temperature=1.0)
    assert (scores - theirs).abs().max() < TOLERANCE


def test_completions_do_not_depend_on_order_or_company(single: dict[str, Any]) -> None:
    in_company = by_id(single["in_company"])
    assert len(in_company) == 36
    assert [in_company[c["id"]] for c in single["batch"]] == single["batch"]  # logprobs bit for bit


def test_seeds_that_differ_in_the_high_bits_only_give_other_tokens(single: dict[str, Any]) -> None:
    siblings = {tuple(c["token_ids"]) for c in single["siblings"]}
    assert len(siblings) == 8


def test_stop_tokens_end_a_completion_and_stay_its_last_token(single: dict[str, Any]) -> None:
    reasons = set()
    for completion in single["batch"] + single["batch_second_weights"]:
        *body, last = completion["token_ids"]
        assert not set(body) & set(STOP)
        is_stopped = completion["finish_reason"] == FinishReason.STOP
        assert is_stopped == (last in STOP)
        assert is_stopped or (completion["finish_reason"] == FinishReason.LENGTH and len(body) == 23)
        reasons.add(completion["finish_reason"])
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_completions_carry_the_version_of_their_weights(single: dict[str, Any]) -> None:
    for name, version in (("batch", 0), ("batch_second_weights", 1), ("batch_third_weights", 3)):
        assert {str(c["policy_versions"]) for c in single[name]} == {str([[0, version]])}


def test_completions_arrive_in_finishing_order_and_requests_join_midway(single: dict[str, Any]) -> None:
    assert single["finishing_order"] == [["s0", 2], ["late0", 3], ["s1", 20]]


def test_a_missing_tensor_is_reported_and_nothing_is_served(single: dict[str, Any]) -> None:
    assert single["unwritten"] == {
        "lm_head.weight": ["lm_head.weight"],
        "embed_tokens.weight": ["model.embed_tokens.weight"],
        "0.self_attn.k_proj.weight": ["model.layers.0.self_attn.qkv_proj.weight"],
        "model.norm.weight": ["model.norm.weight"],
    }
    assert "complete set of weights" in single["after_incomplete"]


def test_a_name_that_arrives_twice_is_refused_and_the_next_load_is_whole(single: dict[str, Any]) -> None:
    assert "'model.embed_tokens.weight' twice" in single["name_twice"]
    assert single["version_after_failure"] is None
    assert single["unwritten_after_failure"] == []  # and test_new_weights_... compares what it serves


def test_a_delta_replaces_its_tensors_and_leaves_the_others(single: dict[str, Any]) -> None:
    version, names, unwritten = single["delta"]
    assert (version, unwritten) == (4, [])
    assert names == sorted(name for name, _ in delta(4))
    assert len(names) == 4
    assert worst_difference_from(after_delta(3, delta_seed=4), single["batch_after_delta"]) < TOLERANCE
    assert worst_difference(single["batch_after_delta"], seed=3) > 0.1
    assert worst_difference(single["batch_after_delta"], seed=4) > 0.1


def test_a_delta_to_another_version_or_of_a_part_of_a_layer_is_not_served(single: dict[str, Any]) -> None:
    assert "apply to the served version 4; got one to 5" in single["delta_to_another"]
    assert single["delta_in_part"] == ["model.layers.0.self_attn.qkv_proj.weight"]
    assert single["version_after_part"] is None


def test_every_push_of_an_adapter_is_served_and_changes_the_output(single: dict[str, Any]) -> None:
    facts = single["adapters"]
    assert facts["unwritten"][:3] == [[], [], []]
    assert facts["checksums"] == {name: tensor_checksum(tensor) for name, tensor in adapter(5)}
    first, second = adapted(1, adapter_seed=5), adapted(1, adapter_seed=6)
    assert worst_difference(facts["base"], seed=1) < TOLERANCE
    assert worst_difference_from(first, facts["first"]) < TOLERANCE
    assert worst_difference_from(second, facts["second"]) < TOLERANCE
    assert worst_difference_from(first, facts["second"]) > 0.1  # nor are cached keys and values the first's
    assert worst_difference_from(first, facts["base"]) > 0.1
    assert facts["altered"] == [[]]
    theirs = reference_logprobs(second, PREFIX[:1], PREFIX[1:], temperature=1.0)
    assert (torch.tensor(facts["probe"][0]) - theirs).abs().max() < TOLERANCE


def test_an_adapter_is_added_to_the_base_that_was_loaded_last(single: dict[str, Any]) -> None:
    facts = single["adapters"]
    assert worst_difference(facts["new_base_alone"], seed=2) < TOLERANCE
    assert worst_difference_from(adapted(2, adapter_seed=5), facts["new_base"]) < TOLERANCE


def test_an_adapter_under_a_known_id_or_of_too_high_a_rank_is_refused(single: dict[str, Any]) -> None:
    facts = single["adapters"]
    assert "must load adapter policy-6-" in facts["old_id"]
    assert facts["version_after_old_id"] is None
    assert "must load adapter policy-3-" in facts["rank_too_large"]
    assert facts["left"] == []


def test_probe_scores_given_tokens(single: dict[str, Any]) -> None:
    for token_ids, scores in zip((PREFIX, PREFIX[:2]), single["probe"], strict=True):
        theirs = reference_logprobs(llama(3, is_tied=True), token_ids[:1], token_ids[1:], temperature=1.0)
        assert (torch.tensor(scores) - theirs).abs().max() < TOLERANCE
    assert "temperature 1" in single["probe_temperature"]


def test_aborted_requests_yield_nothing(single: dict[str, Any]) -> None:
    assert single["after_abort"] == ["a0", "a2"]
    assert single["in_flight_at_the_end"] == 0


def test_a_deadline_names_the_unfinished_and_loses_nothing(single: dict[str, Any]) -> None:
    assert "'t0', 't1'" in single["deadline"]
    assert single["while_paused"] == [0, 2]
    assert single["after_deadline"] == [8, 9]


def test_what_would_mix_or_confuse_requests_is_refused(single: dict[str, Any]) -> None:
    assert "load_weights must find nothing in flight" in single["load_in_flight"]
    assert "prompt_logprobs must find nothing in flight" in single["probe_in_flight"]
    assert "'d0' twice" in single["same_id_twice"]
    assert "at most 128 together; got 40 and 128" in single["too_long"]


def test_the_process_keeps_its_random_state_threads_and_groups(single: dict[str, Any]) -> None:
    assert single["process_state_kept"] == [True, True, True, True]
    assert single["num_threads_can_be_set"] == 2
    assert single["groups_after_close"] is True


def test_two_tensor_parallel_ranks_sample_what_one_does(runs: dict[str, Any]) -> None:
    one, two = runs["single0"]["batch"], runs["pair0"]["batch"]
    assert runs["pair1"]["batch"] == two
    assert [c["token_ids"] for c in two] == [c["token_ids"] for c in one]
    assert worst_difference(two, seed=1) < TOLERANCE
    assert worst_difference(runs["pair0"]["second_clock_out"], seed=2) < TOLERANCE


def test_every_tensor_parallel_rank_accounts_for_its_shards(runs: dict[str, Any]) -> None:
    for rank in ("pair0", "pair1"):
        assert runs[rank]["unwritten"] == []
        assert runs[rank]["missing"] == ["model.layers.0.mlp.gate_up_proj.weight"]


def test_a_group_leaves_no_name_in_shared_memory_and_can_build_a_second_engine(runs: dict[str, Any]) -> None:
    for rank in ("pair0", "pair1"):
        assert runs[rank]["shared_memory"] == []
        assert runs[rank]["unwritten_by_second"] == []
        assert runs[rank]["batch_of_second"] == runs["pair0"]["batch"]


def test_the_first_rank_of_a_group_decides_the_deadline(runs: dict[str, Any]) -> None:
    assert len(runs["pair1"]["second_clock_out"]) == 12
    assert all("unfinished: 't0'" in runs[rank]["first_clock_out"] for rank in ("pair0", "pair1"))
