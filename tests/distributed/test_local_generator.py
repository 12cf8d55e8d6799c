"""The local generator beside a policy sharded over two gloo ranks, under TorchTitan's SPMD backend."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed import launching, local_generator_worker
from tests.distributed.local_generator_worker import make_generator, make_requests
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.generation.protocol import generate
from titan_rl.titan import device
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.types import WeightUpdate

device.install()


@pytest.mark.slow
def test_each_rank_serves_the_whole_sharded_policy_and_its_own_requests(tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
    )
    peer.save_pretrained(tmp_path)
    launching.on_ranks(local_generator_worker, tmp_path, 2)
    spec = spec_from_hf(tmp_path)
    alone = make_generator(spec.model, spec.state_dict_adapter(spec.model, str(tmp_path)))
    alone.load_weights(WeightUpdate("full", 3, None, peer.state_dict().items()))
    expected = {c.request_id: c for c in generate(alone, make_requests(), 60)}
    checksums = {name: tensor_checksum(tensor) for name, tensor in peer.state_dict().items()}
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(results) == 2  # FSDP over both ranks, then tensor parallelism over both
        for result in results:
            assert (result["backend"], result["is_sharded"], result["unwritten"]) == ("spmd_types", True, [])
            assert result["checksums"] == checksums
            assert len(result["completions"]) == 4 - rank
            for name, (token_ids, logprobs) in result["completions"].items():
                assert tuple(token_ids) == expected[name].token_ids
                assert logprobs == pytest.approx(expected[name].logprobs, abs=1e-5)
