"""The losses on preferences as the trainers call them: shares of the step's mean, needs and metrics."""

import math

import pytest
import torch

from titan_rl.algorithms.preference_interfaces import CompletionScores, PreferenceInputs, PreferenceNeeds
from titan_rl.algorithms.preference_registry import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from titan_rl.config.choice import build
from titan_rl.config.registry import resolve

ALL = PREFERENCE_LOSSES | REWARD_MODEL_LOSSES

CHOSEN = CompletionScores(
    values=torch.tensor([-3.0, -8.0, -5.0]),
    lengths=torch.tensor([3.0, 4.0, 5.0]),
    ref_logprobs=torch.tensor([-4.0, -7.0, -5.5]),
)
REJECTED = CompletionScores(
    values=torch.tensor([-6.0, -4.0, -9.0]),
    lengths=torch.tensor([2.0, 4.0, 6.0]),
    ref_logprobs=torch.tensor([-5.0, -6.0, -9.5]),
)


def loss_of(name, **options):
    owner = resolve(name, ALL, "loss.type")
    return build(owner.Config(**options))


def inputs(chosen=CHOSEN, rejected=REJECTED, **changes):
    counts = {"num_chosen": len(chosen.values), "num_rejected": len(rejected.values)}
    return PreferenceInputs(
        chosen=chosen,
        rejected=rejected,
        **(
            {"margins": torch.zeros(len(chosen.values)), "kl_baseline": torch.tensor(0.25)} | counts | changes
        ),
    )


def part(side, indices):
    return CompletionScores(
        values=side.values[indices], lengths=side.lengths[indices], ref_logprobs=side.ref_logprobs[indices]
    )


def softplus(x):
    return math.log1p(math.exp(x))


# Log-ratios: chosen 1, -1, 0.5; rejected -1, 2, 0.5.
EXPECTED = {
    "dpo": sum(softplus(-0.1 * h) for h in (2, -3, 0)) / 3,
    "cdpo": sum(0.9 * softplus(-0.1 * h) + 0.1 * softplus(0.1 * h) for h in (2, -3, 0)) / 3,
    "length_normalised_dpo": sum(softplus(-5 * h) for h in (1 / 3 + 1 / 2, -1 / 4 - 2 / 4, 0.5 / 5 - 0.5 / 6))
    / 3,
    "ipo": sum((h - 5) ** 2 for h in (2, -3, 0)) / 3,
    "simpo": sum(softplus(1 - 2 * d) for d in (-1 + 3, -2 + 1, -1 + 1.5)) / 3,
    "kto": sum(
        1 / (1 + math.exp(0.1 * x)) for x in (1 - 0.25, -1 - 0.25, 0.5 - 0.25, 0.25 + 1, 0.25 - 2, 0.25 - 0.5)
    )
    / 6,
    "bradley_terry": (softplus(-3) + softplus(4) + softplus(-4)) / 3,
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_default_of_each_loss_by_hand(name):
    output = loss_of(name)(inputs())
    assert output.loss.item() == pytest.approx(EXPECTED[name], rel=1e-6)
    assert output.metrics["loss/mean"].item() == pytest.approx(EXPECTED[name], rel=1e-6)


def test_orpo_is_sft_plus_the_odds():
    output = loss_of("orpo", odds_weight=0.0)(inputs())
    assert output.loss.item() == pytest.approx((1 + 2 + 1) / 3)
    with_odds = loss_of("orpo", odds_weight=0.5)(inputs())
    assert with_odds.metrics["sft_loss/mean"].item() == pytest.approx(4 / 3)
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in (-1, -2, -1, -3, -1, -1.5)]
    ratios = [odds[i] - odds[i + 3] for i in range(3)]
    assert with_odds.metrics["log_odds_ratio/mean"].item() == pytest.approx(sum(ratios) / 3, rel=1e-5)
    expected = 4 / 3 + 0.5 * sum(softplus(-r) for r in ratios) / 3
    assert with_odds.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", sorted(ALL))
def test_shares_of_micro_batches_add_up_to_the_step(name):
    loss = loss_of(name)
    whole = loss(inputs())
    shares = [
        loss(inputs(part(CHOSEN, i), part(REJECTED, i), num_chosen=3, num_rejected=3))
        for i in ([0, 2], [1], [])
    ]
    assert sum(s.loss.item() for s in shares) == pytest.approx(whole.loss.item(), rel=1e-6)
    for metric, value in whole.metrics.items():
        got = [s.metrics[metric].item() for s in shares]
        total = max(got) if metric.endswith("/max") else sum(got)
        assert total == pytest.approx(value.item(), rel=1e-5, abs=1e-7), metric


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_step_without_completions_has_a_loss_of_exactly_zero(name):
    empty = part(CHOSEN, [])
    output = loss_of(name)(inputs(empty, part(REJECTED, []), num_chosen=0, num_rejected=0))
    assert output.loss.item() == 0.0
    assert all(v.isfinite() for v in output.metrics.values())


def test_accuracy_counts_a_tie_as_half_and_margin_is_in_rewards():
    metrics = loss_of("dpo")(inputs()).metrics
    assert metrics["accuracy/mean"].item() == pytest.approx(0.5)  # right, wrong, tie
    assert metrics["margin/mean"].item() == pytest.approx(0.1 * (2 - 3 + 0) / 3)
    assert metrics["margin_square/mean"].item() == pytest.approx(0.01 * (4 + 9 + 0) / 3)
    assert metrics["chosen_reward/mean"].item() == pytest.approx(0.1 * 0.5 / 3)
    assert metrics["rejected_reward/mean"].item() == pytest.approx(0.1 * 1.5 / 3)
    assert metrics["chosen_logprob/mean"].item() == pytest.approx(-16 / 3)
    assert metrics["rejected_logprob/mean"].item() == pytest.approx(-19 / 3)


def test_single_completions_are_judged_against_the_baseline():
    # Desirable 1 is above 0.25; undesirable -1 is below it, 2 is not.
    output = loss_of("kto", undesirable_weight=2.0)(inputs(part(CHOSEN, [0]), part(REJECTED, [0, 1])))
    assert output.metrics["accuracy/mean"].item() == pytest.approx(2 / 3)
    assert output.metrics["margin/mean"].item() == pytest.approx(0.1 * (1 - (-1 + 2) / 2))
    assert output.metrics["kl_baseline/max"].item() == 0.25
    values = 1 / (1 + math.exp(0.075)), 2 / (1 + math.exp(0.125)), 2 / (1 + math.exp(-0.175))
    assert output.loss.item() == pytest.approx(sum(values) / 3, rel=1e-6)


def test_margins_of_the_data_are_used_by_the_reward_model_unless_switched_off():
    margins = torch.tensor([1.0, 0.0, 2.0])
    with_margins = loss_of("bradley_terry")(inputs(margins=margins)).loss.item()
    assert with_margins == pytest.approx((softplus(-2) + softplus(4) + softplus(-2)) / 3, rel=1e-6)
    without = loss_of("bradley_terry", use_margins=False)(inputs(margins=margins)).loss.item()
    assert without == pytest.approx(EXPECTED["bradley_terry"], rel=1e-6)


def test_each_loss_says_what_it_needs():
    needs = {name: loss_of(name).needs for name in ALL}
    assert {n for n, need in needs.items() if need.reference} == {
        "dpo", "cdpo", "length_normalised_dpo", "ipo", "kto"
    }  # fmt: skip
    assert {n for n, need in needs.items() if not need.pairs} == {"kto"}
    assert needs["kto"] == PreferenceNeeds(reference=True, pairs=False, kl_baseline=True)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_a_missing_reference_is_an_error_and_not_zero(name):
    bare = CompletionScores(values=torch.zeros(1), lengths=torch.ones(1))
    with pytest.raises(ValueError, match="ref_logprobs must be given"):
        loss_of(name)(inputs(bare, bare))


def test_the_gradient_of_the_reference_and_of_the_baseline_is_never_asked_for():
    chosen = CompletionScores(
        values=CHOSEN.values.clone().requires_grad_(),
        lengths=CHOSEN.lengths,
        ref_logprobs=CHOSEN.ref_logprobs,
    )
    output = loss_of("kto")(inputs(chosen))
    output.loss.backward()
    assert (chosen.values.grad < 0).all()
    assert not any(v.requires_grad for v in output.metrics.values())
