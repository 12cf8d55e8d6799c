"""Steps with mixtures of experts in every layout of some ranks; see launching.py.

test_experts_layouts.py computes the same on one rank in its own process.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torchtitan.models.common import Linear, RMSNorm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.distributed.algorithms_worker import LONGEST, Setup, preset_of
from tests.distributed.comparing import uneven_norms
from tests.distributed.fsdp_worker import TEMPERATURE, VOCAB, Rank, build
from tests.distributed.steps import Step
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.functional.expert_load import expert_load
from titan_rl.titan.experts import GlooTokenDispatcher
from titan_rl.titan.init import copy_full
from titan_rl.titan.models import ModelSection, build_spec
from titan_rl.titan.sections import OptimizerSection, optimizer_from_section
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.weights import WeightStream, load_hf
from titan_rl.trainers.optimization import forward_backward

NAMES = ("grpo", "ppo")
MODELS = ("qwen3_moe", "deepseek_v3")
ONE = {"rows": 2, "seq_len": 64}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp2": ONE,
        "ep2": ONE | {"expert_parallel_degree": 2},
        "tp2": ONE | {"tensor_parallel_degree": 2},
        "tp2_ep2": ONE | {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
        "tp2_ep2_without_sp": ONE
        | {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "enable_sequence_parallel": False},
        "pp2": ONE | {"pipeline_parallel_degree": 2},
    },
    4: {
        "fsdp2_ep2": ONE | {"expert_parallel_degree": 2},
        "fsdp4_ep4": ONE | {"expert_parallel_degree": 4},
        "hsdp2_ep2": ONE | {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
        "tp2_ep4": ONE | {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
        "pp2_ep2": ONE | {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2},
        "cp2_ep2": {"rows": 1, "seq_len": 256, "context_parallel_degree": 2, "expert_parallel_degree": 2},
    },
}
LEARNING_RATE = 1e-3
BIAS = "expert_bias_E"


def write_model(directory: Path) -> None:
    """A random Qwen3-MoE: experts, a dense layer, experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    uneven_norms(model)
    model.save_pretrained(directory / "model")


def deepseek() -> Any:
    """TorchTitan's debug flavor of DeepSeek-V3, by name, made smaller through its configuration tree."""
    spec = build_spec(ModelSection(name="deepseek_v3", flavor="debugmodel"))
    model: Any = spec.model
    model.layers = model.layers[:3]
    smaller = {model.dim: 48, 1024: 64, 512: 24, 512 + 64: 24 + 8}  # widths, by what they were
    smaller |= {16 * (128 + 64): 4 * (16 + 8), 16 * (128 + 128): 4 * (16 + 16), 16 * 128: 4 * 16}
    for layer in model.layers[1:]:
        shared = layer.moe.shared_experts
        shared.w1.out_features = shared.w3.out_features = shared.w2.in_features = 1024
        layer.moe.routed_experts.inner_experts.dim = 48
        layer.moe.routed_experts.inner_experts.hidden_dim = 32
    for kind in (Linear.Config, RMSNorm.Config):
        for _, config, _, _ in list(model.traverse(kind)):
            for name in ("in_features", "out_features") if kind is Linear.Config else ("normalized_shape",):
                setattr(config, name, smaller.get(getattr(config, name), getattr(config, name)))
    model.tok_embeddings = dataclasses.replace(model.tok_embeddings, num_embeddings=VOCAB, embedding_dim=48)
    for layer in model.layers:
        attention = layer.attention
        attention.dim, attention.n_heads, attention.kv_lora_rank = 48, 4, 24
        attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim = 16, 8, 16
        attention.rope = dataclasses.replace(attention.rope, dim=8)
    model.dim, model.vocab_size, model.lm_head.out_features = 48, VOCAB, VOCAB
    return spec


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    """Random values that belong to a name: a stage of a pipeline cannot draw those of the whole model."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if "norm" in name:
        return 0.5 + torch.rand(shape, generator=generator)
    return 0.05 * torch.randn(shape, generator=generator)


class ExpertsSetup(Setup):
    """A policy with experts, a reference, a critic, and steps of any algorithm."""

    def __init__(self, directory: Path, model: str, **options: Any) -> None:
        self.name = model
        super().__init__(directory, **options)

    def load(self, directory: Path, options: dict[str, Any]) -> Rank:
        """Qwen3 from its directory; DeepSeek random, alike in every layout, with biases."""
        if self.name == "qwen3_moe":
            rank = build(directory / "model", **options)
            load_hf(rank.policy, rank.adapter, str(directory / "model"))
        else:
            rank = build(deepseek(), **options)
            for part in rank.policy.parts:
                for name, parameter in part.named_parameters():
                    copy_full(parameter, _drawn(name, parameter.shape))
                for name, bias in part.named_buffers():
                    if name.endswith(BIAS):
                        bias.copy_(_drawn(name, bias.shape))
        rank.policy.watch_routers()
        return rank

    def balance(self, layout: str) -> dict[str, Any]:
        """A whole step of policy and critic: the routers' load, and their biases before and after."""
        batch = self.batch("ppo", layout)
        models = {"policy": self.rank.policy, "critic": self.critic.model}
        before = {name: biases(model) for name, model in models.items()}
        optimizers = self.optimizers()
        forward_backward(
            self.rank.policy,
            preset_of("ppo").loss.build(),
            batch,
            temperature=TEMPERATURE,
            max_tokens=LONGEST,
        )
        load = {"policy": expert_load(self.rank.policy.take_router_load())}
        optimizers.step()
        optimizers.zero_grad(set_to_none=True)
        metrics = self.critic.train_step(
            batch.micro_batches,
            returns=batch.returns,
            old_values=batch.values,
            num_loss_tokens=batch.num_loss_tokens,
        ).metrics
        load["critic"] = {
            name.removeprefix("critic/moe_"): value for name, value in metrics.items() if "/moe_" in name
        }
        after = {name: biases(model) for name, model in models.items()}
        return {"load": load, "before": before, "after": after}

    def optimizers(self) -> Any:
        """TorchTitan's, with its load-balancing hook, as its trainer makes them."""
        optimizer = optimizer_from_section(OptimizerSection(lr=LEARNING_RATE))
        optimizers = optimizer.build(model_parts=self.rank.policy.parts)
        after_build = self.rank.config.model_spec.post_optimizer_build_fn
        after_build(optimizers, self.rank.policy.parts, self.rank.parallel_dims)
        return optimizers


def biases(model: ShardedModel) -> dict[str, list[float]]:
    """The routers' load-balancing biases of all stages. Collective."""
    return {name: value.tolist() for name, value in model.full_state() if name.endswith(BIAS)}


@contextmanager
def tokens_lost() -> Iterator[None]:
    """Planted fault: what the experts of other ranks computed does not come back."""
    original = GlooTokenDispatcher._combine_token_exchange

    def combine(self: Any, rows: Any, group: Any, received: list[int], sent: list[int]) -> torch.Tensor:
        out, rank = original(self, rows, group, received, sent), dist.get_rank(group)
        keep = torch.zeros(len(out), 1)
        keep[sum(received[:rank]) : sum(received[: rank + 1])] = 1.0
        return out * keep

    GlooTokenDispatcher._combine_token_exchange = combine
    try:
        yield
    finally:
        GlooTokenDispatcher._combine_token_exchange = original


def compute(setup: ExpertsSetup, layout: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Steps and their gradients; checksums of the stream; what a whole step does to the routers' biases.

    Args:
        setup: A model in a parallel layout.
        layout: Of the micro-batches, one of ``algorithms_worker.LAYOUTS``.
    """
    tensors, rest = dict[str, torch.Tensor](), dict[str, Any]()
    # Several buckets: one is on its way while another is read.
    stream = WeightStream(setup.rank.policy, setup.rank.adapter, bucket_bytes=20_000)
    rest["stream"] = {name: tensor_checksum(tensor) for name, tensor in stream}
    for name in NAMES:
        step = setup.step(name, setup.batch(name, layout))
        tensors |= {f"{name}/{key}": value for key, value in step.gradients.items()}
        rest[name] = {"loss": step.loss, "metrics": step.metrics, "sizes": step.sizes}
    setup.rank.policy.take_router_load()
    setup.critic.model.take_router_load()
    rest["balance"] = setup.balance(layout)
    return tensors, rest


def step_of(tensors: dict[str, torch.Tensor], rest: dict[str, Any], name: str) -> Step:
    """The step of an algorithm in what :func:`compute` gave."""
    prefix = f"{name}/"
    gradients = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    return Step(**rest[name], gradients=gradients)


def run(directory: Path) -> None:
    """Every model in every layout of this many ranks; rank 0 writes."""
    world_size = dist.get_world_size()
    for layout, options in LAYOUTS[world_size].items():
        for model in MODELS:
            setup = ExpertsSetup(directory, model, **options)
            tensors, rest = compute(setup, "packed")
            if layout == "ep2":
                with tokens_lost():
                    step = setup.step("grpo", setup.batch("grpo", "packed"))
                tensors |= {f"tokens_lost/{key}": value for key, value in step.gradients.items()}
                rest["tokens_lost"] = {"loss": step.loss, "metrics": step.metrics}
            if dist.get_rank() == 0:
                stem = directory / f"{model}.{layout}"
                save_file({key: value.contiguous() for key, value in tensors.items()}, f"{stem}.safetensors")
                Path(f"{stem}.json").write_text(json.dumps(rest))
            del setup
