"""Steps of some algorithms under every parallel layout of a world size; see launching.py.

test_parallel_layouts.py compares what it finds with one rank.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed import launching
from tests.distributed.algorithms_worker import Setup
from tests.distributed.fsdp_worker import TEMPERATURE, full
from tests.distributed.steps import Step
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.policy.teacher import Teacher
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.rollout.samples import to_samples
from titan_rl.titan.sharded_model import Hidden, ShardedModel
from titan_rl.trainers.optimization import StepBatch

DISTILLATION = "on_policy_distillation"
NAMES = ("grpo", "gspo", "ppo", DISTILLATION)
TOP_K = {"divergence": "forward", "top_k": 5}
SHARED = ("ppo",)
"""Also computed with rows that share prompts; it has a critic and a reference."""
TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
# Context parallelism cuts rows at blocks of 128 tokens. A schedule of two micro-batches of one row is run
# several times for a step, filled up with an empty row.
LONG, PIPELINE = {"seq_len": 256}, {"seq_len": 32, "rows": 2}
INTERLEAVED = PIPELINE | {"pipeline_parallel_schedule": "Interleaved1F1B"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp2": {SHARD: 2},
        "hsdp2": {REPLICATE: 2},
        "tp2": {TP: 2},
        "tp2_without_sequence_parallel": {TP: 2, "enable_sequence_parallel": False},
        "cp2": {CP: 2} | LONG,
        "cp2_unbalanced": {CP: 2, "context_parallel_load_balancer": None} | LONG,
        "cp2_ptrr": {CP: 2, "context_parallel_load_balancer": "ptrr"} | LONG,
        "pp2": {PP: 2} | PIPELINE,
        "pp2_interleaved": {PP: 2} | INTERLEAVED,
    },
    4: {
        "fsdp4": {SHARD: 4},
        "hsdp2_fsdp2": {REPLICATE: 2, SHARD: 2},
        "tp2_fsdp2": {TP: 2, SHARD: 2},
        "pp2_fsdp2": {PP: 2, SHARD: 2} | PIPELINE,
        "tp2_cp2": {TP: 2, CP: 2} | LONG,
        "pp2_tp2": {PP: 2, TP: 2} | PIPELINE,
        "pp2_cp2": {PP: 2, CP: 2, "rows": 2} | LONG,
    },
    8: {
        "pp2_tp2_fsdp2": {PP: 2, TP: 2, SHARD: 2} | PIPELINE,
        "tp2_cp2_fsdp2": {TP: 2, CP: 2, SHARD: 2} | LONG,
        "tp2_hsdp2_fsdp2": {TP: 2, REPLICATE: 2, SHARD: 2},
    },
}
SAVED_UNDER = "tp2"
"""Whose checkpoint all layouts after it restore, those of more ranks too."""
FAULTS = {
    "fsdp2": "mean_per_micro_batch",
    "tp2": "no_vocabulary_reduction",
    "cp2": "count_of_the_slice",
    "pp2": "mean_over_micro_batches",
}


@contextmanager
def no_vocabulary_reduction(setup: Setup) -> Iterator[None]:
    """Planted fault: every tensor-parallel rank takes its part of the vocabulary for the whole."""
    vocabulary: Any = setup.rank.policy.vocabulary
    vocabulary.sum = lambda values: values
    try:
        yield
    finally:
        del vocabulary.sum


@contextmanager
def mean_over_micro_batches(setup: Setup) -> Iterator[None]:
    """Planted fault: the schedule divides gradients by its number of micro-batches."""
    schedule: Any = setup.rank.policy._pipeline._schedule
    schedule.scale_grads = True
    try:
        yield
    finally:
        schedule.scale_grads = False


def count_of_the_slice(setup: Setup, batch: StepBatch) -> StepBatch:
    """Planted fault: a context-parallel rank divides by the tokens of its own slice of the rows."""
    model = setup.rank.policy
    counts: list[int] = []

    def count(number: int, hidden: Hidden) -> torch.Tensor:
        counts.append(int(hidden.local(batch.micro_batches[number].loss_mask).sum()))
        return torch.zeros(1)

    model.scores(batch.micro_batches, count)
    return dataclasses.replace(batch, num_loss_tokens=sum(counts))


def faulty(setup: Setup, fault: str, batch: StepBatch) -> Step:
    """A step of GRPO under a planted fault."""
    if fault == "mean_per_micro_batch":
        return setup.mean_per_micro_batch("grpo", batch)
    if fault == "count_of_the_slice":
        return setup.step("grpo", count_of_the_slice(setup, batch))
    plant = no_vocabulary_reduction if fault == "no_vocabulary_reduction" else mean_over_micro_batches
    with plant(setup):
        return setup.step("grpo", batch)


def leaking_step(setup: Setup, batch: StepBatch) -> Step:
    """A step of GRPO in which attention does not keep to its document."""
    model = setup.rank.policy
    if setup.rank.config.parallelism.context_parallel_degree == 1:
        return setup.leaking("grpo", batch)

    def prepare(rows: MicroBatch) -> Any:
        row = torch.arange(rows.positions.shape[1]).repeat(rows.positions.shape[0], 1)
        _, kwargs, _ = ShardedModel.prepare(model, dataclasses.replace(rows, positions=row))
        inputs, right, index = ShardedModel.prepare(model, rows)
        return inputs, right | {"attention_masks": kwargs["attention_masks"]}, index

    model.prepare = prepare
    try:
        return setup.step("grpo", batch)
    finally:
        del model.prepare


def distilling(setup: Setup) -> Step:
    """A step of on-policy distillation from the teacher's likeliest tokens."""
    whole = setup.teacher
    setup.teacher = Teacher(Teacher.Config(**TOP_K), model=whole._model, temperature=TEMPERATURE)
    try:
        return setup.step(DISTILLATION, setup.batch(DISTILLATION, "packed"))
    finally:
        setup.teacher = whole


def alternating(setup: Setup, batch: StepBatch) -> list[Step]:
    """Score and train in turns."""
    scorer = LogprobScorer(setup.rank.policy, temperature=1.0)
    steps = []
    for _ in range(5):
        scorer(batch.micro_batches[:1])  # less than a schedule's worth
        scorer(batch.micro_batches)
        steps.append(setup.step("grpo", batch))
    return steps


def state_of(setup: Setup) -> dict[str, Any]:
    """What a checkpoint holds of models and optimisers."""
    return {"policy": setup.rank.policy.state_dict(), "critic": setup.critic.state_dict()}


def save(setup: Setup, batch: StepBatch, path: Path) -> None:
    """Train the critic once, so that its optimiser has moments, and write a checkpoint."""
    setup.critic.train_step(
        batch.micro_batches,
        returns=batch.returns,
        old_values=batch.values,
        num_loss_tokens=batch.num_loss_tokens,
    )
    dcp.save(state_of(setup), checkpoint_id=path)


def restore(setup: Setup, path: Path) -> None:
    """Load a checkpoint of another layout over other weights."""
    with torch.no_grad():
        for model in (setup.rank.policy, setup.critic.model):
            for parameter in model.parameters():
                parameter.zero_()
    state = state_of(setup)
    dcp.load(state, checkpoint_id=path)
    setup.rank.policy.load_state_dict(state["policy"])
    setup.critic.load_state_dict(state["critic"])


def restored(setup: Setup) -> dict[str, torch.Tensor]:
    """Log-probabilities, values and the optimiser's moments. Collective."""
    micro_batches = setup.laid_out(to_samples(setup.groups), "packed")
    values = {
        (sample, position): float(value)
        for m, row in zip(micro_batches, setup.critic(micro_batches), strict=True)
        for sample, position, value in zip(
            m.sample_index[m.loss_mask].tolist(),
            m.positions[m.loss_mask].tolist(),
            row[m.loss_mask],
            strict=True,
        )
    }
    result = {
        "logprobs": setup.scores_of(setup.rank.policy),
        "values": torch.tensor([values[key] for key in sorted(values)]),
    }
    moments = setup.critic.optimizers.state_dict()
    mine = {k: full(v) for k, v in moments.items() if isinstance(v, torch.Tensor) and ".exp_avg" in k}
    return result | mine


def run(directory: Path) -> None:
    """All layouts of this world size; rank 0 writes."""
    world_size = dist.get_world_size()
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}

    def keep(case: str, step: Step) -> None:
        tensors.update({f"{case}/{key}": value for key, value in step.gradients.items()})
        rest[case] = {"loss": step.loss, "metrics": step.metrics}

    for layout, options in LAYOUTS[world_size].items():
        setup = Setup(directory, **options)
        batches = {name: setup.batch(name, "packed") for name in NAMES}
        for name, batch in batches.items():
            keep(f"{layout}/{name}", setup.step(name, batch))
        for name in SHARED:
            keep(f"{layout}/shared/{name}", setup.step(name, setup.batch(name, "shared")))
        keep(f"{layout}/top_k", distilling(setup))
        rest[f"{layout}/micro_batches"] = len(batches["grpo"].micro_batches)
        if layout in FAULTS:
            keep(f"{layout}/fault", faulty(setup, FAULTS[layout], batches["grpo"]))
            keep(f"{layout}/leaking", leaking_step(setup, batches["grpo"]))
            keep(f"{layout}/again", setup.step("grpo", batches["grpo"]))
        checkpoint = directory / "checkpoint"
        if layout == SAVED_UNDER:
            save(setup, batches["ppo"], checkpoint)
        if checkpoint.is_dir():
            if layout != SAVED_UNDER:
                restore(setup, checkpoint)
            tensors.update({f"{layout}/restored/{k}": v for k, v in restored(setup).items()})
        if layout.startswith("pp2") and world_size == 2:
            for number, step in enumerate(alternating(setup, batches["grpo"])):
                keep(f"{layout}/alternating{number}", step)
    launching.write(directory, rest, tensors)
