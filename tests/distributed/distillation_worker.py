"""What test_distillation_two_ranks.py computes: ``torchrun ... distillation_worker.py DIRECTORY``.

Rank 0 writes whole gradients to ``world<N>.safetensors`` and metrics to ``world<N>.json``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed.fsdp_worker import FSDP, HSDP, LENGTHS, TEMPERATURE, build, full, lay_out
from titan_rl.algorithms.penalties import Distillation
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.policy.teacher import Teacher, build_teacher
from titan_rl.policy.token_scores import fsdp_modules
from titan_rl.titan import device
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import ModelSection
from titan_rl.titan.weights import load_hf
from titan_rl.trainers.optimization import StepBatch, align_ranks, forward_backward, reduce_metrics

LAYOUTS = ("eight_of_one", "one_of_eight", "packed")
CASES = {"reverse": {}, "forward": {"divergence": "forward"}, "top_k": {"top_k": 5}}


class Step:
    """A policy, a teacher of another architecture, and the gradient of a step that only distils."""

    def __init__(self, directory: Path, *, parallel: dict[str, Any] = FSDP, **options: Any) -> None:
        self.rank = build(directory / "policy", **parallel)
        load_hf(self.rank.policy, self.rank.adapter, str(directory / "policy"))
        self.rank.policy._skip_lm_head = True
        self.rank.config.model = ModelSection(hf_assets_path=str(directory / "policy"))
        self.rank.config.sampling = SimpleNamespace(temperature=TEMPERATURE)
        self.collectives = Collectives(self.rank.parallel_dims, torch.device("cpu"))
        self.prepare: Callable[[MicroBatch], Any] = self.rank.prepare_inputs
        config = Teacher.Config(hf_assets_path=str(directory / "teacher"), **options)
        self.teacher = build_teacher(config, self.rank, prepare=lambda batch: self.prepare(batch))
        # With advantages of 0 (below) nothing else has a gradient.
        self.loss_fn = PolicyLoss.Config(distillation=Distillation.Config(coefficient=0.7)).build()

    def batch(self, layout: str, ids: list[int] | None = None) -> StepBatch:
        if ids is None:
            ids = list(range(len(LENGTHS)))[self.collectives.data_rank :: self.collectives.data_size]
        batches = lay_out(ids, layout)
        for batch in batches:
            batch.advantages.zero_()
        return align_ranks(
            batches, num_samples=len(ids), collectives=self.collectives, device=self.rank.device
        )

    def backward(self, batch: StepBatch) -> dict[str, float]:
        parts = forward_backward(
            self.rank.policy,
            self.loss_fn,
            batch,
            temperature=TEMPERATURE,
            prepare=self.prepare,
            context=self.rank.train_context,
            max_tokens=8,
            teacher=self.teacher,
        )
        return reduce_metrics(parts, batch, self.collectives)

    def gradients(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        self.rank.policy.zero_grad()
        self.metrics = self.backward(batch)
        return self.take_gradients()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        gradients = {name: full(p.grad) for name, p in self.rank.policy.named_parameters()}
        self.rank.policy.zero_grad()
        return gradients

    def leaking(self, micro_batch: MicroBatch) -> Any:
        """Planted fault: the policy's attention sees one document a row; the teacher's masks are its own."""
        inputs, kwargs = self.rank.prepare_inputs(micro_batch)
        return inputs, kwargs | {"attention_masks": self.rank.policy.get_attention_masks(_row(micro_batch))}


def _row(micro_batch: MicroBatch) -> torch.Tensor:
    return torch.arange(micro_batch.positions.shape[1]).expand_as(micro_batch.positions)


def _mean_per_micro_batch(step: Step, batch: StepBatch) -> dict[str, torch.Tensor]:
    """Planted fault: every micro-batch is a mean of its own, and the step is the mean of those."""
    count = len(batch.micro_batches)
    for micro_batch in batch.micro_batches:
        tokens = int(step.collectives.reduce_scalar(micro_batch.num_loss_tokens, "sum")) * count
        step.backward(StepBatch([micro_batch], num_loss_tokens=tokens, num_samples=1))
    return step.take_gradients()


def run(directory: Path) -> None:
    metrics, gradients = {}, {}
    for case, options in CASES.items():
        step = Step(directory, **options)
        for layout in LAYOUTS if case == "reverse" else ("packed",):
            gradients[f"{case}/{layout}"] = step.gradients(step.batch(layout))
            metrics[f"{case}/{layout}"] = step.metrics
    step = Step(directory)
    packed = step.batch("packed")
    gradients["fault/mean_per_micro_batch"] = _mean_per_micro_batch(step, packed)
    step.prepare = step.leaking
    gradients["fault/leaking"] = step.gradients(packed)
    step.prepare = step.rank.prepare_inputs
    masks = step.teacher.model.get_attention_masks
    # Planted fault: the teacher's attention sees one document a row.
    step.teacher.model.get_attention_masks = lambda positions: masks(
        torch.arange(positions.shape[1]).expand_as(positions)
    )
    gradients["fault/teacher_leaking"] = step.gradients(packed)
    step.teacher.model.get_attention_masks = masks
    gradients["again"] = step.gradients(packed)
    if dist.get_world_size() == 2:
        ids = list(range(len(LENGTHS))) if dist.get_rank() == 0 else []
        gradients["one_rank_empty"] = step.gradients(step.batch("packed", ids=ids))
        for module in fsdp_modules(step.rank.policy):
            module.set_gradient_divide_factor(2.0)
        gradients["fault/averaged_over_ranks"] = step.gradients(packed)
        for name, parallel in (
            ("resharded", FSDP | {"fsdp_reshard_after_forward": "always"}),
            ("never_resharded", FSDP | {"fsdp_reshard_after_forward": "never"}),
            ("replicated", HSDP),
        ):
            other = Step(directory, parallel=parallel)
            gradients[name] = other.gradients(other.batch("packed"))
    touched = any(p.grad is not None or p.requires_grad for p in step.teacher.model.parameters())
    if dist.get_rank() == 0:
        stem = directory / f"world{dist.get_world_size()}"
        tensors = {
            f"{c}/{name}": g.contiguous() for c, named in gradients.items() for name, g in named.items()
        }
        save_file(tensors, stem.with_suffix(".safetensors"))
        stem.with_suffix(".json").write_text(json.dumps({"metrics": metrics, "teacher_touched": touched}))


if __name__ == "__main__":
    device.install()
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]))
    dist.destroy_process_group()
