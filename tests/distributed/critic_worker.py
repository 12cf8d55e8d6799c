"""What test_critic_two_ranks.py computes, on one rank or on two; see launching.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3

from tests.distributed import launching
from tests.distributed.fsdp_worker import (
    FSDP,
    HSDP,
    LENGTHS,
    LONGEST,
    build,
    full,
    lay_out,
    leaking,
    masked_gradient,
    whole_gradients,
    without_models,
)
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.reward_scorer import token_values
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.init import copy_full
from titan_rl.titan.sections import OptimizerSection
from titan_rl.titan.sharded_model import fsdp_modules
from titan_rl.titan.value_model import build_value_model
from titan_rl.titan.weights import load_hf
from titan_rl.trainers.optimization import StepBatch, align_ranks

LAYOUTS = ("eight_of_one", "one_of_eight", "packed")


class Setup:
    """A policy, its critic with a head that is not zero, and batches whose targets belong to the token."""

    def __init__(
        self, directory: Path, name: str = "llama", *, ac_config: Any = None, **parallel: Any
    ) -> None:
        self.rank = build(directory / name, **(parallel or FSDP))
        load_hf(self.rank.policy, self.rank.adapter, str(directory / name))
        self.rank.config.activation_checkpoint = ac_config
        self.rank.policy.skip_head()
        self.collectives = Collectives(self.rank.parallel_dims, torch.device("cpu"))
        self.critic = self.new_critic()
        generator = torch.Generator().manual_seed(4)
        self.noise = 0.3 * torch.randn(len(LENGTHS), LONGEST, generator=generator)
        self.targets = torch.randn(len(LENGTHS), LONGEST, generator=generator)

    def new_critic(self, *, seed: int = 11) -> Critic:
        config = Critic.Config(head_init_std=0.3, optimizer=OptimizerSection(lr=1e-3), max_norm=0.5)
        config.lr_scheduler.warmup_steps = 3
        return build_critic(
            config,
            self.rank,
            policy=self.rank.policy,
            collectives=self.collectives,
            seed=seed,
            total_steps=10,
        )

    def batch(self, layout: str, ids: list[int] | None = None) -> StepBatch:
        """This rank's micro-batches; old values are the critic's plus noise that belongs to the token."""
        if ids is None:
            ids = list(range(len(LENGTHS)))[self.collectives.data_rank :: self.collectives.data_size]
        batch = align_ranks(
            lay_out(ids, layout), num_samples=len(ids), collectives=self.collectives, device=self.rank.device
        )
        for micro_batch, values in zip(batch.micro_batches, self.critic(batch.micro_batches), strict=True):
            place = micro_batch.sample_index.clamp(min=0), micro_batch.positions.clamp(max=LONGEST - 1)
            noise, target = (
                torch.where(micro_batch.loss_mask, table[place], 0.0) for table in (self.noise, self.targets)
            )
            batch.values.append(values + noise)
            batch.returns.append(target)
        return batch

    def accumulate(self, batch: StepBatch) -> list[dict[str, torch.Tensor]]:
        return self.critic.accumulate(
            batch.micro_batches,
            returns=batch.returns,
            old_values=batch.values,
            num_loss_tokens=batch.num_loss_tokens,
        )

    def gradients(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        self.accumulate(batch)
        return whole_gradients(self.critic.model)

    def train(self, critic: Critic, steps: int) -> list[float]:
        """Gradient norms of some steps on the same batch."""
        batch, norms = self.batch("packed"), []
        for _ in range(steps):
            result = critic.train_step(
                batch.micro_batches,
                returns=batch.returns,
                old_values=batch.values,
                num_loss_tokens=batch.num_loss_tokens,
            )
            norms.append(result.grad_norm)
        return norms

    def table(self, layout: str) -> torch.Tensor:
        """Values by sample and position, of all ranks."""
        table = torch.zeros(len(LENGTHS), LONGEST)
        micro_batches = self.batch(layout).micro_batches
        for micro_batch, values in zip(micro_batches, self.critic(micro_batches), strict=True):
            real = micro_batch.sample_index >= 0
            if values[~real].any() or values.requires_grad:
                raise ValueError("values of the padding must be 0, and there must be no graph")
            table[micro_batch.sample_index[real], micro_batch.positions[real]] = values[real]
        dist.all_reduce(table)
        return table


def check_gradients(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    setup = Setup(directory)
    tensors["head"] = full(setup.critic.model.head.weight)
    tensors |= {f"values/{layout}": setup.table(layout) for layout in LAYOUTS}
    batches = {layout: setup.batch(layout) for layout in LAYOUTS}
    gradients = {layout: setup.gradients(batch) for layout, batch in batches.items()}
    gradients["fault/mean_per_micro_batch"] = _mean_per_micro_batch(setup, batches["packed"])
    with leaking(setup.critic.model):
        gradients["fault/leaking"] = setup.gradients(batches["packed"])
    result: dict[str, Any] = {
        "micro_batches": {layout: len(batch.micro_batches) for layout, batch in batches.items()},
        "shard_rows": setup.critic.model.head.weight.to_local().shape[0],
        "masked": masked_gradient(setup.critic.model, batches["packed"], setup.accumulate),
    }
    if dist.get_world_size() == 2:
        everything = list(range(len(LENGTHS)))
        gradients["one_rank_empty"] = setup.gradients(
            setup.batch("packed", ids=everything if dist.get_rank() == 0 else [])
        )
        for module in fsdp_modules(setup.critic.model.parts[0]):
            module.set_gradient_divide_factor(2.0)
        gradients["fault/averaged_over_ranks"] = setup.gradients(batches["packed"])
        for name, parallel in (
            ("resharded", FSDP | {"fsdp_reshard_after_forward": "always"}),
            ("replicated", HSDP),
        ):
            other = Setup(directory, **parallel)
            gradients[name] = other.gradients(other.batch("packed"))
    recomputed = Setup(directory, ac_config=FullAC.Config())
    gradients["recomputed"] = recomputed.gradients(recomputed.batch("packed"))
    tied = Setup(directory, "qwen3_tied")
    gradients["tied"] = tied.gradients(tied.batch("packed"))
    tensors |= {f"gradient/{c}/{name}": g for c, named in gradients.items() for name, g in named.items()}
    return result


def _mean_per_micro_batch(setup: Setup, batch: StepBatch) -> dict[str, torch.Tensor]:
    """Planted fault: every micro-batch is a mean of its own, and the step is the mean of those."""
    count, total = len(batch.micro_batches), dict[str, torch.Tensor]()
    for index, micro_batch in enumerate(batch.micro_batches):
        part = StepBatch([micro_batch], num_loss_tokens=0, num_samples=1)
        part.values, part.returns = [batch.values[index]], [batch.returns[index]]
        tokens = setup.collectives.reduce_scalar(micro_batch.num_loss_tokens, "sum")
        part.num_loss_tokens = int(tokens) * count
        for name, gradient in setup.gradients(part).items():
            total[name] = total.get(name, 0) + gradient
    return total


def shards(critic: Critic) -> dict[str, int]:
    """Checksums of this rank's weights and moments, and the rest of the state."""
    found = {}
    for part in ("model", "optimizer"):
        for name, value in critic.state_dict()[part].items():
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                found[f"{part}/{name}"] = tensor_checksum(local)
    rates = [scheduler.get_last_lr() for scheduler in critic.lr_schedulers]
    return found | {"rates": rates, "steps": [critic.applied_steps, critic.skipped_steps]}


def check_state(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps; and the same from the checkpoint by another critic."""
    setup = Setup(directory)
    world_size = dist.get_world_size()
    path = str(directory / f"world{world_size}" / "step-2")
    other = setup.new_critic(seed=12)
    start = shards(other)
    norms = setup.train(setup.critic, 2)
    dcp.save({"critic": setup.critic}, checkpoint_id=path)
    saved = shards(setup.critic)
    tensors["saved/head"] = full(setup.critic.model.head.weight)
    dcp.load({"critic": other}, checkpoint_id=path)
    result = {"start": start, "saved": saved, "loaded": shards(other)}
    batch_of_saved = setup.batch("packed")  # of the critic at the checkpoint, for both
    setup.batch = lambda layout: batch_of_saved
    norms += setup.train(setup.critic, 2)
    resumed = setup.train(other, 2)
    result |= {
        "norms": norms,
        "resumed_norms": resumed,
        "end": shards(setup.critic),
        "resumed": shards(other),
    }
    tensors |= {f"trained/{name}": full(p) for name, p in setup.critic.model.parts[0].named_parameters()}
    if world_size == 1:
        wider = setup.new_critic(seed=13)
        dcp.load({"critic": wider}, checkpoint_id=str(directory / "world2" / "step-2"))
        tensors["from_two_ranks/head"] = full(wider.model.head.weight)
        result["from_two_ranks"] = [wider.applied_steps, wider.skipped_steps]
    return result


def check_not_finite(directory: Path) -> dict[str, Any]:
    """The last rank's targets hold an infinity; then a sound step follows."""
    setup = Setup(directory)
    batch, before = setup.batch("packed"), shards(setup.critic)
    sound = list(batch.returns)
    if dist.get_rank() == dist.get_world_size() - 1:
        batch.returns[0] = torch.where(batch.micro_batches[0].loss_mask, torch.inf, 0.0)

    def step() -> Any:
        return setup.critic.train_step(
            batch.micro_batches,
            returns=batch.returns,
            old_values=batch.values,
            num_loss_tokens=batch.num_loss_tokens,
        )

    skipped, after = step(), shards(setup.critic)
    batch.returns = sound
    applied, end = step(), shards(setup.critic)
    return {
        "applied": [skipped.is_applied, applied.is_applied],
        "norm": [str(skipped.grad_norm), str(applied.grad_norm)],
        "unchanged": [
            {key: value for key, value in now.items() if key != "steps" and before[key] != value}
            for now in (after, end)
        ],
        "steps": [after["steps"], end["steps"]],
    }


def check_tensor_parallel(tensors: dict[str, torch.Tensor]) -> list[int]:
    """Values and gradients of a value model; every rank holds a part of each matrix, and the whole head."""
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    rank = without_models(spec, tensor_parallel_degree=dist.get_world_size(), data_parallel_shard_degree=1)
    model = build_value_model(rank, spec, spec.model, head_bias=True)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.parts[0].named_parameters():
        drawn = 0.05 * torch.randn(tuple(parameter.shape), generator=generator)
        copy_full(parameter, drawn + ("norm" in name))
    ids = torch.randint(2048, (2, 16), generator=generator)
    rows = SimpleNamespace(input_ids=ids, positions=torch.arange(16).repeat(2, 1))
    with rank.train_context():
        values = token_values(model, model.forward(rows))
        (values * torch.arange(32).view(2, 16)).sum().backward()
    tensors["tensor_parallel/values"] = values.detach()
    tensors |= {f"gradient/tensor_parallel/{name}": g for name, g in whole_gradients(model).items()}
    return list(model.head.weight.to_local().shape)


def run(directory: Path) -> None:
    """Compute everything on this rank and write it."""
    tensors: dict[str, torch.Tensor] = {}
    result = {
        "step": check_gradients(directory, tensors),
        "state": check_state(directory, tensors),
        "not_finite": check_not_finite(directory),
        "tensor_parallel": check_tensor_parallel(tensors),
    }
    launching.write(directory, result, tensors)
