"""What test_distillation_two_ranks.py computes, on one rank or on two; see launching.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import launching
from tests.distributed.fsdp_worker import (
    FSDP,
    HSDP,
    LENGTHS,
    TEMPERATURE,
    build,
    lay_out,
    leaking,
    whole_gradients,
)
from titan_rl.algorithms.penalties import Distillation
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.policy.teacher import Teacher, build_teacher
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import ModelSection
from titan_rl.titan.sharded_model import fsdp_modules
from titan_rl.titan.weights import load_hf
from titan_rl.trainers.optimization import StepBatch, align_ranks, forward_backward, reduce_metrics

LAYOUTS = ("eight_of_one", "one_of_eight", "packed")
CASES = {"reverse": {}, "forward": {"divergence": "forward"}, "top_k": {"top_k": 5}}


class Step:
    """A policy, a teacher of another architecture, and the gradient of a step that only distils."""

    def __init__(self, directory: Path, *, parallel: dict[str, Any] = FSDP, **options: Any) -> None:
        self.rank = build(directory / "policy", **parallel)
        load_hf(self.rank.policy, self.rank.adapter, str(directory / "policy"))
        self.rank.policy.skip_head()
        self.rank.config.model = ModelSection(hf_assets_path=str(directory / "policy"))
        self.rank.config.sampling = SimpleNamespace(temperature=TEMPERATURE)
        self.collectives = Collectives(self.rank.parallel_dims, torch.device("cpu"))
        config = Teacher.Config(hf_assets_path=str(directory / "teacher"), **options)
        self.teacher = build_teacher(config, self.rank)
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
            max_tokens=8,
            teacher=self.teacher,
        )
        return reduce_metrics(parts, batch, self.collectives)

    def gradients(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        self.rank.module.zero_grad()
        self.metrics = self.backward(batch)
        return whole_gradients(self.rank.policy)


def _mean_per_micro_batch(step: Step, batch: StepBatch) -> dict[str, torch.Tensor]:
    """Planted fault: every micro-batch is a mean of its own, and the step is the mean of those."""
    count = len(batch.micro_batches)
    for micro_batch in batch.micro_batches:
        tokens = int(step.collectives.reduce_scalar(micro_batch.num_loss_tokens, "sum")) * count
        step.backward(StepBatch([micro_batch], num_loss_tokens=tokens, num_samples=1))
    return whole_gradients(step.rank.policy)


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
    for case, model in (("leaking", step.rank.policy), ("teacher_leaking", step.teacher._model)):
        with leaking(model):  # of one of them alone
            gradients[f"fault/{case}"] = step.gradients(packed)
    gradients["again"] = step.gradients(packed)
    if dist.get_world_size() == 2:
        ids = list(range(len(LENGTHS))) if dist.get_rank() == 0 else []
        gradients["one_rank_empty"] = step.gradients(step.batch("packed", ids=ids))
        for module in fsdp_modules(step.rank.module):
            module.set_gradient_divide_factor(2.0)
        gradients["fault/averaged_over_ranks"] = step.gradients(packed)
        for name, parallel in (
            ("resharded", FSDP | {"fsdp_reshard_after_forward": "always"}),
            ("never_resharded", FSDP | {"fsdp_reshard_after_forward": "never"}),
            ("replicated", HSDP),
        ):
            other = Step(directory, parallel=parallel)
            gradients[name] = other.gradients(other.batch("packed"))
    touched = any(p.grad is not None or p.requires_grad for p in step.teacher._model.parameters())
    tensors = {f"{case}/{name}": g for case, named in gradients.items() for name, g in named.items()}
    launching.write(directory, {"metrics": metrics, "teacher_touched": touched}, tensors)
