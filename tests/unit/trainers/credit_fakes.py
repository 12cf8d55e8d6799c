"""Scored groups, packed batches of them, and ranks that are threads."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from threading import Barrier, Thread
from typing import Any

import torch

from tests.unit.rollout.rollout_fakes import make_prompts, make_rollout
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.batching.steps import split_into_steps
from titan_rl.rollout.samples import to_samples
from titan_rl.trainers.optimization import StepBatch, align_ranks
from titan_rl.types import Group


class Alone:
    """Collectives of a single rank."""

    rank, world_size, data_rank, data_size = 0, 1, 0, 1

    def reduce(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def reduce_scalar(self, value: float, how: str) -> float:
        return self.reduce({"": value}, how)[""]

    def gather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    def send(self, parts: Sequence[bytes]) -> list[bytes]:
        return list(parts)


class _Rank(Alone):
    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        self.meeting, self.rank, self.data_rank = meeting, rank, rank
        self.world_size = self.data_size = len(meeting.slots)

    def _meet(self, mine: Any) -> list[Any]:
        self.meeting.slots[self.rank] = mine
        self.meeting.barrier.wait()
        everyone = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return everyone

    def gather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._meet(list(numbers))

    def send(self, parts: Sequence[bytes]) -> list[bytes]:
        return [others[self.rank] for others in self._meet(list(parts))]

    def reduce(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        everyone = self._meet(dict(values))
        assert all(other.keys() == values.keys() for other in everyone), "ranks must reduce the same names"
        combine = {"sum": sum, "max": max, "min": min}[how]
        return {name: float(combine([other[name] for other in everyone])) for name in values}


class _Meeting:
    def __init__(self, world: int) -> None:
        self.slots: list[Any] = [None] * world
        self.barrier = Barrier(world, timeout=60)


def on_ranks(world: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """``work(rank, collectives)`` on every rank; an exception of one is raised."""
    meeting, found, failed = _Meeting(world), [None] * world, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, _Rank(meeting, rank))
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def make_groups(
    rewards: Mapping[int, Sequence[float | None]], *, metadata: Mapping[int, Mapping[str, Any]] | None = None
) -> list[Group]:
    """Groups by their index; prompts and completions of uneven lengths that index and sample decide."""
    groups = []
    for index, of_group in rewards.items():
        prompt = make_prompts(1, start=index)[0][1]
        if metadata and index in metadata:
            prompt = type(prompt)(prompt.id, prompt.messages, prompt.answer, metadata[index])
        rollouts = [
            make_rollout(
                prompt=prompt,
                sample_index=i,
                prompt_tokens=tuple(range(1, 2 + index % 3)),
                tokens=tuple(10 + (index + i + t) % 7 for t in range(1 + (3 * index + 2 * i + 4) % 5)),
                reward=reward,
            )
            for i, reward in enumerate(of_group)
        ]
        groups.append(Group(prompt=prompt, index=index, rollouts=rollouts))
    return groups


def value_of(name: str, key: tuple[int, int], position: int) -> float:
    """A number that belongs to a token of a rollout, whatever the layout; -1 to 1."""
    return zlib.crc32(f"{name} {key} {position}".encode()) / 2**31 - 1.0


def table(name: str, batch: StepBatch, micro_batch: MicroBatch) -> torch.Tensor:
    """``[B, T]`` of :func:`value_of`; NaN where nothing is trained."""
    values = torch.full(micro_batch.loss_mask.shape, float("nan"))
    for row, column in micro_batch.loss_mask.nonzero().tolist():
        sample = batch.samples[micro_batch.sample_index[row, column]]
        key = (sample.group_index, sample.sample_index)
        values[row, column] = value_of(name, key, int(micro_batch.positions[row, column]))
    return values


def make_batches(
    groups: Sequence[Group],
    *,
    steps: int = 1,
    token_budget: int = 16,
    rows: int = 2,
    collectives: Any = None,
    mask_truncated: bool = False,
) -> list[StepBatch]:
    """Packed and scored, as the trainer does it."""
    samples = to_samples(groups, mask_truncated=mask_truncated)
    batches = []
    for chosen in split_into_steps(samples, steps):
        own = [samples[i] for i in chosen if any(samples[i].loss_mask)]
        batch = align_ranks(
            pack(own, [0.0] * len(own), token_budget=token_budget, rows_per_micro_batch=rows),
            num_samples=len(own),
            collectives=collectives or Alone(),
            device=torch.device("cpu"),
        )
        batch.samples = own
        for name in ("old", "ref"):
            values = [table(name, batch, m) for m in batch.micro_batches]
            setattr(batch, f"{name}_logprobs", values)
        batch.values = [table("value", batch, m) for m in batch.micro_batches]
        batches.append(batch)
    return batches


def by_rollout(
    batches: Sequence[StepBatch], tensors: Callable[[StepBatch], Sequence[torch.Tensor]]
) -> dict[tuple[int, int], list[float]]:
    """What stands at the trained tokens of every rollout, in their order."""
    found: dict[tuple[int, int], list[float]] = {}
    for batch in batches:
        for micro_batch, values in zip(batch.micro_batches, tensors(batch), strict=True):
            assert (values[~micro_batch.loss_mask] == 0).all(), "what is not trained must be 0"
            for row, column in micro_batch.loss_mask.nonzero().tolist():
                sample = batch.samples[micro_batch.sample_index[row, column]]
                key = (sample.group_index, sample.sample_index)
                found.setdefault(key, []).append(values[row, column].item())
    return found


def advantages_of(batches: Sequence[StepBatch]) -> dict[tuple[int, int], list[float]]:
    return by_rollout(batches, lambda batch: [m.advantages for m in batch.micro_batches])


def tokens_of(groups: Sequence[Group], name: str) -> dict[tuple[int, int], list[float]]:
    """:func:`value_of` at the trained tokens of every scored rollout."""
    found = {}
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward is not None:
                turn, key = rollout.turns[-1], (group.index, rollout.sample_index)
                start = len(turn.prompt_token_ids) - 1  # aligned with the prediction
                count = len(turn.completion.token_ids)
                found[key] = [value_of(name, key, start + t) for t in range(count)]
    return found
