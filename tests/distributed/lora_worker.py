"""What test_lora_two_ranks.py computes, on one rank or on two: called by launching.py.

Every rank writes ``world<N>.rank<R>.json``; rank 0 also writes whole tensors to ``world<N>.safetensors``.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed import fsdp_worker
from tests.distributed.fsdp_worker import LENGTHS, TEMPERATURE, build, whole_gradients
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.init import copy_full
from titan_rl.titan.lora import LoraSection, adapted_layers, adapted_spec, is_adapter
from titan_rl.titan.sharded_model import fsdp_modules
from titan_rl.titan.weights import WeightStream, load_hf
from titan_rl.trainers.optimization import reduce_metrics

LAYOUTS = ("eight_of_one", "one_of_eight", "packed")
SECTION = LoraSection(rank=6, alpha=9.0)


class LoraStep(fsdp_worker.Step):
    """A policy whose adapters do something; its reference is the policy without them."""

    def __init__(self, directory: Path, **parallel: Any) -> None:
        self.rank = build(adapted_spec(spec_from_hf(directory), SECTION), **parallel)
        load_hf(self.rank.policy, self.rank.adapter, str(directory))
        generator = torch.Generator().manual_seed(6)
        for layer in adapted_layers(self.rank.module).values():
            for half in (layer.lora_a, layer.lora_b):
                copy_full(half.weight, 0.2 * torch.randn(half.weight.shape, generator=generator))
        policy = self.rank.policy
        self.scorers = [
            LogprobScorer(policy, temperature=TEMPERATURE, without_adapters=off) for off in (False, True)
        ]
        self.loss_fn = PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.1)).build()
        self._prepare()

    def gradients(self, batch: Any) -> dict[str, torch.Tensor]:
        """Whole gradients of the adapters."""
        return {name: grad for name, grad in super().gradients(batch).items() if is_adapter(name)}

    def losses(self, batch: Any) -> dict[str, float]:
        parts = self.backward(batch)
        whole_gradients(self.rank.policy)
        return reduce_metrics(parts, batch, self.collectives)


def run(directory: Path) -> None:
    """Compute everything on this rank and write it."""
    step = LoraStep(directory / "llama")
    plain = build(directory / "llama")
    load_hf(plain.policy, plain.adapter, str(directory / "llama"))
    plain.policy.skip_head()
    batches = {layout: step.batch(layout) for layout in LAYOUTS}
    gradients = {layout: step.gradients(batch) for layout, batch in batches.items()}
    packed = batches["packed"]
    base = LogprobScorer(plain.policy, temperature=TEMPERATURE)(packed.micro_batches)
    step.backward(packed)
    result = {
        "losses": {layout: step.losses(batch) for layout, batch in batches.items()},
        "reference_is_base": [torch.equal(a, b) for a, b in zip(packed.ref_logprobs, base, strict=True)],
        "policy_differs": [
            float((a - b).abs().max()) > 0.01
            for a, b in zip(step.scorers[0](packed.micro_batches), base, strict=True)
            if bool(b.any())
        ],
        "clipped_from": _norm(step, packed),
        "frozen_with_gradient": _frozen_with_gradient(step, packed),
        "stream": list(dict(WeightStream(step.rank.policy, step.rank.adapter))),
        "base_stream": list(dict(WeightStream(plain.policy, plain.adapter))),
    }
    with step.rank.policy.adapters_off():
        gradients["fault/off"] = step.gradients(packed)
    if dist.get_world_size() == 2:
        ids = list(range(len(LENGTHS))) if dist.get_rank() == 0 else []
        gradients["one_rank_empty"] = step.gradients(step.batch("packed", ids=ids))
        other = LoraStep(directory / "llama", data_parallel_replicate_degree=2)
        gradients["replicated"] = other.gradients(other.batch("packed"))
        for module in fsdp_modules(step.rank.module):
            module.set_gradient_divide_factor(2.0)
        gradients["fault/averaged_over_ranks"] = step.gradients(packed)
    tensors = {f"gradient/{c}/{name}": g for c, named in gradients.items() for name, g in named.items()}
    tensors |= {f"merged/{name}": t for name, t in WeightStream(step.rank.policy, step.rank.adapter)}
    stem = f"world{dist.get_world_size()}"
    (directory / f"{stem}.rank{dist.get_rank()}.json").write_text(json.dumps(result))
    if dist.get_rank() == 0:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / f"{stem}.safetensors"
        )


def _norm(step: LoraStep, batch: Any) -> float:
    step.rank.module.zero_grad()
    step.backward(batch)
    norm = step.rank.policy.clip_grad_norm(1e6)
    whole_gradients(step.rank.policy)
    return norm


def _frozen_with_gradient(step: LoraStep, batch: Any) -> list[str]:
    step.backward(batch)
    named = step.rank.module.named_parameters()
    found = [name for name, parameter in named if parameter.grad is not None and not is_adapter(name)]
    whole_gradients(step.rank.policy)
    return found
