"""The stages of one rank: steps are filled up with empty rows, which count for nothing; what stages exchange.

Two ranks with stages of one model are in tests/distributed.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from titan_rl.titan.buckets import full_buckets, one_by_one
from titan_rl.titan.models import no_loss
from titan_rl.titan.pipeline import Pipeline

CPU = torch.device("cpu")


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, tokens, positions):
        return self.norm(self.embedding(tokens) + 0.5 * positions[..., None])


@pytest.fixture(autouse=True)
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pipeline(stage, schedule=None):
    return Pipeline([stage], schedule, group=dist.group.WORLD, device=CPU)


def with_schedule(stage, micro_batches, kind=ScheduleGPipe):
    """A pipeline of one stage on torch's schedule, with the loss that models are built with."""
    staged = PipelineStage(stage, 0, 1, CPU, group=dist.group.WORLD)
    # As TorchTitan builds schedules: gradients are added up and not divided.
    schedule = kind(staged, n_microbatches=micro_batches, loss_fn=no_loss, scale_grads=False)
    return pipeline(stage, schedule)


def rows(*ids):
    ids = torch.tensor(ids)
    return SimpleNamespace(input_ids=ids, positions=torch.arange(ids.shape[1]).repeat(ids.shape[0], 1))


BATCHES = [rows([1, 2, 3], [4, 5, 6]), rows([6, 6, 1], [2, 2, 2]), rows([3, 1, 2], [5, 1, 5])]


# ------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(("count", "micro_batches", "total"), [(1, 4, 4), (3, 2, 4), (4, 2, 4), (5, 4, 8)])
def test_batches_are_filled_up_to_a_multiple_of_the_schedules(count, micro_batches, total):
    batches = [rows([number, 2, 3], [4, 5, 6]) for number in range(count)]
    filled = with_schedule(Stage(), micro_batches).padded(batches)
    assert len(filled) == total
    assert all(a is b for a, b in zip(filled, batches, strict=False))
    for empty in filled[count:]:
        assert torch.equal(empty.input_ids, torch.zeros(2, 3, dtype=torch.int64))
        assert empty.positions.tolist() == [[0, 1, 2]] * 2


def test_micro_batches_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"one shape; got \[\(1, 2\), \(2, 3\)\]"):
        with_schedule(Stage(), 2).padded([BATCHES[0], rows([1, 2])])


# ------------------------------------------------------------------------------------------------ training


def expected_gradients(stage):
    """Of the sum of the micro-batches' losses, each with a factor of its own."""
    stage.zero_grad()
    for number, batch in enumerate(BATCHES):
        ((number + 1) * stage(batch.input_ids, batch.positions).pow(3).sum()).backward()
    found = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    return found


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_gradients_and_metrics_are_those_of_the_real_micro_batches(kind, micro_batches):
    stage = Stage()
    run, places = with_schedule(stage, micro_batches, kind), torch.arange(3).repeat(2, 1)
    prepared = [
        (b.input_ids, {"positions": b.positions}, places + 10 * n) for n, b in enumerate(run.padded(BATCHES))
    ]
    seen = []

    def loss(number, states, index):
        seen.append(number)
        assert torch.equal(index, places + 10 * number)
        value = (number + 1) * states.pow(3).sum()
        return value, {"loss": value.detach(), "bad": torch.tensor(float("nan"))}

    metrics = run.forward_backward(prepared, 3, loss)
    assert set(seen) == {0, 1, 2}
    for number, (batch, found) in enumerate(zip(BATCHES, metrics, strict=True)):
        value = (number + 1) * stage(batch.input_ids, batch.positions).pow(3).sum()
        assert found["loss"].item() == pytest.approx(value.item(), rel=1e-6)
        assert found["bad"].isnan()
    got = [parameter.grad.clone() for parameter in stage.parameters()]
    for a, b in zip(got, expected_gradients(stage), strict=True):
        assert b.norm() > 0.1
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_schedule_that_is_run_by_anyone_else_has_no_loss():
    run = with_schedule(Stage(), 1)
    with pytest.raises(NotImplementedError, match="outside"):
        run._schedule.step(
            arg_mbs=[(BATCHES[0].input_ids,)],
            kwarg_mbs=[{"positions": BATCHES[0].positions}],
            target_mbs=[torch.tensor(0)],
            losses=[],
        )


# ----------------------------------------------------------------------------------- scores, names, tensors


def test_one_stage_gives_its_states_and_scores_come_back_in_order():
    stage, batch = Stage(), BATCHES[0]
    run = pipeline(stage)
    with torch.no_grad():
        states = run.forward(
            batch.input_ids, {"positions": batch.positions}, shape=(2, 3, 3), dtype=torch.float32
        )
        assert torch.equal(states, stage(batch.input_ids, batch.positions))
    found = run.from_last_stage({1: torch.ones(1, 2), 0: torch.zeros(2, 3).double()}, [(2, 3), (1, 2)])
    assert [value.tolist() for value in found] == [[[0.0] * 3] * 2, [[1.0] * 2]]
    assert found[0].dtype == torch.float32


def test_what_one_stage_holds_is_what_all_hold():
    stage = Stage()
    run = pipeline(stage)
    buckets = list(run.shared(lambda part: full_buckets(part, bucket_bytes=1)))
    assert len(buckets) == len(dict(stage.named_parameters()))
    found = dict(one_by_one(buckets))
    assert found.keys() == dict(stage.named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in stage.named_parameters())
    assert run.union({"b", "ä"}) == {"b", "ä"}
    assert run.union(set()) == set()
    assert run.text_of(0, "Grüße") == run.text_of_last_stage("Grüße") == "Grüße"


def test_a_rank_keeps_few_activations_that_it_sent_even_if_nobody_asks_for_scores(monkeypatch):
    """A teacher's hidden states are not asked back; over gloo a send is complete only to who waits for it."""
    waiting = []

    def isend(states, *, group, group_dst):
        work = SimpleNamespace(is_completed=lambda: False, wait=lambda: waiting.remove(work))
        waiting.append(work)
        return work

    monkeypatch.setattr(dist, "isend", isend)
    stages = pipeline(Stage())
    for number in range(20):
        stages._send(torch.zeros(2), 1)
        assert len(waiting) == len(stages._sends) == min(number + 1, 4)
    stages.wait_for_sends()
    assert waiting == []
