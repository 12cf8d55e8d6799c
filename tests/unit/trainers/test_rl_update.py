"""What the trainer does around a step: the critic first, its warm-up, the controller of the KL penalty."""

import math
from types import SimpleNamespace

import pytest

from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.errors import NonFiniteError
from titan_rl.observability.stages import StageTimer
from titan_rl.observability.summary import RunSummary, write_json
from titan_rl.policy.critic import CriticResult
from titan_rl.resilience.skip_limit import SkipLimit
from titan_rl.trainers.optimization import StepBatch, StepResult
from titan_rl.trainers.reporting import Reporter
from titan_rl.trainers.rl import RLTrainer


class Rank(SimpleNamespace):
    """The attributes of a trainer that these methods read, with the trainer's own methods."""

    update = RLTrainer.update
    _adapt_kl_coefficient = RLTrainer._adapt_kl_coefficient

    def optimizer_step(self, batch):
        self.steps.append("policy")
        return StepResult(is_applied=True, grad_norm=2.0, metrics={"loss/loss": 0.5})


class Critic:
    def __init__(self, steps, *, warmup=0, norms=()):
        self.steps, self.warmup, self.norms = steps, warmup, list(norms)

    def train_step(self, micro_batches, *, returns, old_values, num_loss_tokens):
        self.steps.append(("critic", returns, old_values, num_loss_tokens))
        norm = self.norms.pop(0) if self.norms else 1.0
        return CriticResult(math.isfinite(norm), norm, {"critic/loss": 0.25})

    def is_warming_up(self, iteration):
        return iteration < self.warmup


def make_rank(*, warmup=None, iteration=0, kl=None, norms=()):
    steps = []
    return Rank(
        steps=steps,
        step=4,
        timer=StageTimer(),
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        critic=None if warmup is None else Critic(steps, warmup=warmup, norms=norms),
        critic_skip_limit=SkipLimit(2, of="the critic", look_at="the rewards"),
        state=SimpleNamespace(iteration=iteration, kl_coefficient=math.nan),
        loss_fn=SimpleNamespace(kl=kl),
        bad_steps=SimpleNamespace(act=lambda cause: None),
    )


def make_batch(num_loss_tokens=7):
    return StepBatch([], num_loss_tokens=num_loss_tokens, num_samples=3, values=["v"], returns=["r"])


def test_without_a_critic_the_policy_alone_is_trained():
    rank = make_rank()
    result = rank.update(make_batch())
    assert (rank.steps, rank.step, result.metrics) == (["policy"], 5, {"loss/loss": 0.5})


def test_the_critic_is_trained_on_its_returns_before_the_policy():
    rank = make_rank(warmup=0)
    result = rank.update(make_batch())
    assert rank.steps == [("critic", ["r"], ["v"], 7), "policy"]
    assert result == StepResult(True, 2.0, {"loss/loss": 0.5, "critic/loss": 0.25})


@pytest.mark.parametrize(("iteration", "trained"), [(0, False), (1, False), (2, True)])
def test_while_the_critic_warms_up_steps_are_counted_and_the_policy_waits(iteration, trained):
    rank = make_rank(warmup=2, iteration=iteration)
    result = rank.update(make_batch())
    assert rank.step == 5
    assert ("policy" in rank.steps, result.is_applied) == (trained, trained)
    assert result.metrics["critic/loss"] == 0.25


def test_a_step_without_a_token_trains_no_critic():
    rank = make_rank(warmup=2)
    rank.update(make_batch(num_loss_tokens=0))
    assert rank.steps == ["policy"]  # which skips it and counts it


def test_a_critic_that_skips_one_step_after_another_ends_the_run():
    rank = make_rank(warmup=0, norms=[math.inf, math.nan, 1.0, math.nan, math.nan, math.inf])
    for _ in range(5):
        rank.update(make_batch())  # never more than two in a row
    with pytest.raises(NonFiniteError, match=r"^3 steps of the critic in a row were skipped, .* is inf\."):
        rank.update(make_batch())
    assert rank.steps.count("policy") == 5


def test_a_critic_that_warms_up_and_skips_ends_the_run_too():
    rank = make_rank(warmup=9, norms=[math.nan] * 3)
    rank.update(make_batch())
    rank.update(make_batch())
    with pytest.raises(NonFiniteError, match="steps of the critic"):
        rank.update(make_batch())


def adapt(kl, results, *, in_reward=None):
    rank = make_rank(kl=kl)
    rank.report = SimpleNamespace(_measured={} if in_reward is None else {"reward/kl_mean": in_reward})
    rank.report.mean_kl = lambda found: Reporter.mean_kl(rank.report, found)
    rank._adapt_kl_coefficient(results, [make_batch(), make_batch()])
    return rank


def measured(*values):
    return [StepResult(True, 1.0, {"loss/reference_kl": value}) for value in values]


def adaptive():
    return KLPenalty(KLPenalty.Config(coefficient=0.1, target=0.5, horizon_samples=60))


def test_the_controller_sees_the_mean_over_the_steps_and_all_their_samples():
    kl = adaptive()
    rank = adapt(kl, [*measured(0.5, 0.6), StepResult(False, math.nan, {})])
    expected = 0.1 * (1 + 0.1 * 6 / 60)
    assert kl.coefficient == pytest.approx(expected)
    assert rank.state.kl_coefficient == kl.coefficient  # it is in the checkpoint


def test_a_penalty_in_the_reward_is_measured_there():
    kl = adaptive()
    adapt(kl, measured(9.0), in_reward=0.45)
    assert kl.coefficient == pytest.approx(0.1 * (1 - 0.1 * 6 / 60))


def test_a_fixed_coefficient_is_not_kept_so_that_a_resumed_run_follows_its_file():
    kl = KLPenalty(KLPenalty.Config(coefficient=0.1))
    rank = adapt(kl, measured(9.0))
    assert kl.coefficient == 0.1
    assert math.isnan(rank.state.kl_coefficient)


def test_an_iteration_that_measured_nothing_changes_nothing():
    kl = adaptive()
    rank = adapt(kl, [StepResult(False, math.nan, {})])
    assert kl.coefficient == 0.1
    assert math.isnan(rank.state.kl_coefficient)


# ------------------------------------------------------------------------------------------- what is reported


class Report(SimpleNamespace):
    """A reporter of one of two ranks in the middle of a run, with the reporter's own methods."""

    start, forget_later_steps = Reporter.start, Reporter.forget_later_steps

    def __init__(self, folder, *, rank):
        super().__init__(
            _trainer=SimpleNamespace(step=2, state=SimpleNamespace(iteration=2)),
            _collectives=SimpleNamespace(
                rank=rank, is_first_of_its_rows=False, barrier=lambda: None, first=lambda text: (0, "3")
            ),
            _folder=folder,
            _recorder=SimpleNamespace(drop_after=lambda *_: None),
            _summary=RunSummary(scores={0: 0.1, 2: 0.2, 4: 0.4}),
            _packed={"rows": 5},
            _measured={"reward/kl_mean": 7.0},
        )


def test_after_a_roll_back_nothing_is_reported_of_the_iteration_that_was_undone(tmp_path):
    report = Report(tmp_path, rank=1)
    report.forget_later_steps()
    assert (report._packed, report._measured) == ({}, {})
    assert report._summary.scores == {0: 0.1, 2: 0.2}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_of_a_resumed_run_knows_the_score_before_the_first_step(rank, tmp_path):
    write_json(tmp_path / "summary.json", {"scores": {"0": 0.25, "2": 0.5}, "num_evaluated": 8})
    report = Report(tmp_path, rank=rank)
    report.start()
    assert (report._summary.scores, report._summary.num_evaluated) == ({0: 0.25, 2: 0.5}, 8)
