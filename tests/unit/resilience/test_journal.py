"""The journal: merged over ranks and starts it says once what a run did, however that was interrupted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from titan_rl.resilience import journal
from titan_rl.types import Completion, FinishReason, Group, Prompt, Reward, Rollout, Turn


class Ranks:
    """Stands for the collectives of one rank; the text of rank 0 is what all have."""

    def __init__(self, rank: int, size: int, told: list[str]) -> None:
        self.rank, self.world_size, self.data_size, self.is_first_of_its_rows = rank, size, size, True
        self._told = told

    def first(self, text):
        if text is not None:
            self._told[:] = [text]
        return 0, self._told[0]


def start(folder: Path, size: int, resumed: int) -> list[journal.Journal]:
    """A start on some ranks."""
    told: list[str] = []
    return [
        journal.Journal(folder, collectives=Ranks(rank, size, told), resumed_step=resumed)
        for rank in range(size)
    ]


def group(index: int, *, tokens: tuple[int, ...] = (5, 6), reward: float | None = 0.1) -> Group:
    prompt = Prompt(id=f"p{index}", messages=())
    rollouts = []
    for sample in range(2):
        completion = Completion(
            "", (*tokens, sample), (0.0,) * (len(tokens) + 1), FinishReason.STOP, ((0, 0),)
        )
        turn = Turn(prompt_token_ids=(1, 2), completion=completion, text="")
        scored = None if reward is None else Reward(total=reward)
        rollouts.append(Rollout(prompt=prompt, sample_index=sample, seed=3, turns=[turn], reward=scored))
    return Group(prompt=prompt, index=index, rollouts=rollouts)


def write(ranks: list[journal.Journal], step: int, *, loss: float = 0.5, count: int = 3, **of_group) -> None:
    """One iteration; its groups are dealt out to the ranks."""
    groups = [group(3 * step + i, **of_group) for i in range(3)]
    for rank, one in enumerate(ranks[:count]):
        one.iteration(
            step=step,
            policy_version=step,
            groups=groups[rank :: len(ranks)],
            losses=[loss],
            grad_norms=[1.5],
            parameters="abc",
        )


def test_ranks_are_merged_and_floats_are_exact(tmp_path):
    write(start(tmp_path, 2, 0), 1, loss=0.1)
    (entry,) = journal.read(tmp_path)
    assert entry.prompts == ((3, "p3"), (4, "p4"), (5, "p5"))
    assert entry.rewards == ((0.1).hex(),) * 6
    assert (entry.losses, entry.grad_norms) == (((0.1).hex(),), ("0x1.8000000000000p+0",))
    assert (entry.step, entry.policy_version, entry.parameters) == (1, 1, "abc")


def test_the_number_of_ranks_changes_nothing(tmp_path):
    for size in (1, 2, 3):
        write(start(tmp_path / str(size), size, 0), 1)
    first, second, third = (journal.read(tmp_path / str(size)) for size in (1, 2, 3))
    assert first == second == third


def test_what_differs_in_one_bit_is_another_entry(tmp_path):
    variants = [{}, {"tokens": (5, 7)}, {"reward": 0.1 + 2**-56}, {"reward": None}, {"loss": 0.5 + 2**-53}]
    for number, variant in enumerate(variants):
        write(start(tmp_path / str(number), 1, 0), 1, **variant)
    assert len({repr(journal.read(tmp_path / str(n))) for n in range(len(variants))}) == len(variants)


def test_steps_that_are_executed_again_count_once(tmp_path):
    ranks = start(tmp_path, 2, 0)
    for step in (1, 2, 3, 4):
        write(ranks, step)
    ranks = start(tmp_path, 2, 2)  # the checkpoint of step 2 was the last
    for step in (3, 4, 5):
        write(ranks, step)
    assert [entry.step for entry in journal.read(tmp_path)] == [1, 2, 3, 4, 5]
    assert journal.differing_repeats(tmp_path) == []


def test_a_repeat_that_differs_is_found_and_the_later_one_counts(tmp_path):
    write(start(tmp_path, 1, 0), 1, loss=0.5)
    write(start(tmp_path, 1, 0), 1, loss=0.25)
    ((before, after),) = journal.differing_repeats(tmp_path)
    assert (before.losses, after.losses) == (((0.5).hex(),), ((0.25).hex(),))
    assert journal.read(tmp_path) == [after]
    assert dataclasses.replace(after, losses=before.losses) == before


def test_executed_again_on_fewer_ranks_no_group_counts_twice(tmp_path):
    write(start(tmp_path, 3, 0), 1)
    write(start(tmp_path, 1, 0), 1)
    (entry,) = journal.read(tmp_path)
    assert len(entry.prompts) == 3


def test_a_step_that_not_all_ranks_have_entered_does_not_count(tmp_path):
    ranks = start(tmp_path, 2, 0)
    write(ranks, 1)
    write(ranks, 2, count=1)
    assert [entry.step for entry in journal.read(tmp_path)] == [1]


def test_after_a_rollback_the_steps_that_were_left_do_not_count(tmp_path):
    ranks = start(tmp_path, 1, 0)
    for step in (1, 2, 3):
        write(ranks, step)
    start(tmp_path, 1, 1)
    assert [entry.step for entry in journal.read(tmp_path)] == [1]


def test_half_a_line_does_not_spoil_the_next(tmp_path):
    write(start(tmp_path, 1, 0), 1)
    with (tmp_path / "journal" / "rank-0.jsonl").open("a") as stream:
        stream.write('{"start": 0, "step": 2, "gro')
    write(start(tmp_path, 1, 1), 2)
    assert [entry.step for entry in journal.read(tmp_path)] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_digest_sees_every_bit_name_shape_and_dtype_and_no_order(dtype):
    def digest(**tensors):
        return journal.parameters_digest(iter(tensors.items()))

    one, two = torch.arange(4).to(dtype), torch.tensor(3).to(dtype)
    expected = digest(a=one, b=two)
    assert expected == digest(b=two, a=one)
    changed = one.clone()
    changed.view(torch.uint8)[1] ^= 1
    others = [digest(a=changed, b=two), digest(a=one, c=two), digest(a=one.view(2, 2), b=two), digest(a=one)]
    others.append(digest(a=one.view(torch.uint8), b=two))
    assert len({expected, *others}) == 6


def test_a_rank_that_only_helps_to_gather_consumes_everything():
    tensors = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    assert journal.parameters_digest(tensors, is_computed=False) is None
    assert next(tensors, None) is None
