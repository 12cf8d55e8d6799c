"""Preference losses against numbers by hand, loops in float64 written from the papers, and a peer's values.

Tolerance: 1e-5 against the peer, who prints six decimals; 1e-12 against the loops, in float64.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from titan_rl.functional.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    log_ratio,
    orpo_loss,
    simpo_loss,
)

PEER, EXACT = 1e-5, 1e-12
_FIXTURE = Path(__file__).parents[2] / "numerics" / "data" / "fixture_a.json"
OPENRLHF = json.loads(_FIXTURE.read_text())["others"]["openrlhf"]

# Two pairs whose rewards beta * log-ratio are those that the peer reports: 0.05, -0.05 and -0.02, 0.04.
CHOSEN, REJECTED = torch.tensor([0.5, -0.5]), torch.tensor([-0.2, 0.4])
# The peer's rewards are not in the fixture, but three differences with one decimal give both of its values.
DIFFERENCES = torch.tensor([-0.4, 0.8, 1.3])

floats = st.floats(-8, 8)
pairs = st.lists(st.tuples(floats, floats), min_size=1, max_size=6)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


# ------------------------------------------------------------------------------------------ the peer's values


def test_bradley_terry_equals_the_peer():
    loss = bradley_terry_loss(DIFFERENCES, torch.zeros(3)).mean()
    assert loss.item() == pytest.approx(OPENRLHF["bradley_terry"], abs=PEER)


def test_bradley_terry_with_a_margin_equals_the_peer():
    loss = bradley_terry_loss(DIFFERENCES, torch.zeros(3), margins=torch.full((3,), 0.5)).mean()
    assert loss.item() == pytest.approx(OPENRLHF["bt_margin.5"], abs=PEER)


def test_dpo_equals_the_peer():
    peer = OPENRLHF["dpo b.1"]
    assert (0.1 * CHOSEN).tolist() == pytest.approx(peer["chosen_rewards"])
    assert (0.1 * REJECTED).tolist() == pytest.approx(peer["rejected_rewards"])
    assert dpo_loss(CHOSEN, REJECTED, beta=0.1).mean().item() == pytest.approx(peer["loss"], abs=PEER)


def test_dpo_with_smoothed_labels_equals_the_peer():
    loss = dpo_loss(CHOSEN, REJECTED, beta=0.1, label_smoothing=0.1).mean()
    assert loss.item() == pytest.approx(OPENRLHF["dpo b.1 ls.1 (cDPO)"]["loss"], abs=PEER)


def test_ipo_on_sums_equals_the_peer():
    loss = ipo_loss(CHOSEN, REJECTED, beta=0.1).mean()
    assert loss.item() == pytest.approx(OPENRLHF["ipo b.1"]["loss"], abs=2 * PEER)  # fp32 of 26.65


# -------------------------------------------------------------------------------------------------- by hand


def test_bradley_terry_by_hand_with_margin_and_centring():
    # log(1 + e^-(1 - 0 - 0.5)) = 0.474077, plus 0.01 * (1 + 0)^2
    loss = bradley_terry_loss(
        torch.tensor([1.0]), torch.tensor([0.0]), margins=torch.tensor([0.5]), centring=0.01
    )
    assert loss.item() == pytest.approx(0.474077 + 0.01, abs=1e-6)


def test_length_normalised_log_ratios_by_hand():
    ratios = log_ratio(torch.tensor([-3.0, -8.0]), torch.tensor([-5.0, -4.0]), torch.tensor([4, 2]))
    assert ratios.tolist() == [0.5, -2.0]


def test_simpo_by_hand():
    # 2 (-0.3 - -0.5) - 0.3 = 0.1; log(1 + e^-0.1) = 0.644397
    loss = simpo_loss(
        torch.tensor([-1.2]), torch.tensor([-1.0]), torch.tensor([4]), torch.tensor([2]), beta=2.0, gamma=0.3
    )
    assert loss.item() == pytest.approx(0.644397, abs=1e-6)


def test_orpo_by_hand():
    # odds 0.4/0.6 against 0.2/0.8: their logarithms differ by 0.980829; log(1 + e^-0.980829) = 0.318454
    chosen, rejected = torch.tensor([2 * math.log(0.4)]), torch.tensor([3 * math.log(0.2)])
    loss, ratio = orpo_loss(chosen, rejected, torch.tensor([2]), torch.tensor([3]), odds_weight=0.1)
    assert ratio.item() == pytest.approx(0.980829, abs=1e-6)
    assert loss.item() == pytest.approx(-math.log(0.4) + 0.1 * 0.318454, abs=1e-6)


def test_kto_by_hand():
    # 0.1 (3 - 1) = 0.2: sigmoid(-0.2) = 0.450166 when desirable, sigmoid(0.2) = 0.549834 when not
    good, bad = (
        kto_loss(torch.tensor([3.0]), is_desirable=d, kl_baseline=1.0, beta=0.1, weight=w).item()
        for d, w in ((True, 1.0), (False, 1.5))
    )
    assert good == pytest.approx(0.450166, abs=1e-6)
    assert bad == pytest.approx(1.5 * 0.549834, abs=1e-6)


# -------------------------------------------------------------------------- loops in float64 from the papers


@given(pairs, st.floats(0.01, 2), st.floats(0, 0.49))
def test_dpo_equals_a_loop(values, beta, smoothing):
    chosen, rejected = tensors(*zip(*values, strict=True))
    logits = [beta * (c - r) for c, r in values]
    expected = [
        (1 - smoothing) * math.log1p(math.exp(-x)) + smoothing * math.log1p(math.exp(x)) for x in logits
    ]
    got = dpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing).tolist()
    assert got == pytest.approx(expected, rel=EXACT, abs=EXACT)


@given(pairs, st.floats(0.05, 2))
def test_ipo_equals_a_loop(values, beta):
    chosen, rejected = tensors(*zip(*values, strict=True))
    expected = [((c - r) - 1 / (2 * beta)) ** 2 for c, r in values]
    assert ipo_loss(chosen, rejected, beta=beta).tolist() == pytest.approx(expected, rel=EXACT, abs=EXACT)


@given(pairs, st.floats(0, 1))
def test_bradley_terry_equals_a_loop(values, centring):
    chosen, rejected = tensors(*zip(*values, strict=True))
    expected = [math.log1p(math.exp(r - c)) + centring * (c + r) ** 2 for c, r in values]
    got = bradley_terry_loss(chosen, rejected, centring=centring).tolist()
    assert got == pytest.approx(expected, rel=EXACT, abs=EXACT)


@given(st.lists(st.tuples(st.floats(-40, -0.1), st.integers(1, 9)), min_size=2, max_size=2))
def test_orpo_and_simpo_equal_a_loop(sides):
    (chosen, n_c), (rejected, n_r) = sides
    p_c, p_r = math.exp(chosen / n_c), math.exp(rejected / n_r)
    ratio = math.log(p_c / (1 - p_c)) - math.log(p_r / (1 - p_r))
    args = [*tensors([chosen], [rejected]), torch.tensor([n_c]), torch.tensor([n_r])]
    loss, got = orpo_loss(*args, odds_weight=0.5)
    assert got.item() == pytest.approx(ratio, rel=1e-9, abs=1e-9)
    assert loss.item() == pytest.approx(
        -chosen / n_c + 0.5 * math.log1p(math.exp(-ratio)), rel=1e-9, abs=1e-9
    )
    expected = math.log1p(math.exp(-(2.5 * (chosen / n_c - rejected / n_r) - 0.5)))
    assert simpo_loss(*args, beta=2.5, gamma=0.5).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(floats, min_size=1, max_size=5), st.floats(0, 5))
def test_kto_equals_one_minus_the_value_function(values, baseline):
    (ratios,) = tensors(values)
    for desirable in (True, False):
        got = kto_loss(ratios, is_desirable=desirable, kl_baseline=baseline, beta=0.3, weight=1.2)
        value = [1.2 * sigmoid(0.3 * ((r - baseline) if desirable else (baseline - r))) for r in values]
        assert got.tolist() == pytest.approx([1.2 - v for v in value], abs=EXACT)


# ----------------------------------------------------------------------------------------------- properties


def test_all_losses_have_the_gradient_of_their_value():
    torch.manual_seed(0)
    chosen, rejected = (-torch.rand(4, dtype=torch.float64) * 5 - 0.5 for _ in range(2))
    inputs = chosen.requires_grad_(), rejected.requires_grad_()
    n_c, n_r = torch.tensor([3, 1, 4, 2]), torch.tensor([2, 5, 1, 3])
    margins = torch.rand(4, dtype=torch.float64)
    assert gradcheck(lambda c, r: bradley_terry_loss(c, r, margins=margins, centring=0.1), inputs)
    assert gradcheck(lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1), inputs)
    assert gradcheck(lambda c, r: ipo_loss(c, r, beta=0.3), inputs)
    assert gradcheck(lambda c, r: simpo_loss(c, r, n_c, n_r, beta=2.0, gamma=0.5), inputs)
    assert gradcheck(lambda c, r: orpo_loss(c, r, n_c, n_r, odds_weight=0.3), inputs)
    for desirable in (True, False):
        assert gradcheck(
            lambda c, d=desirable: kto_loss(c, is_desirable=d, kl_baseline=0.5, beta=0.3, weight=1.5),
            inputs[:1],
        )


def test_dpo_without_smoothing_is_bradley_terry_on_implicit_rewards():
    expected = bradley_terry_loss(0.1 * CHOSEN, 0.1 * REJECTED)
    torch.testing.assert_close(dpo_loss(CHOSEN, REJECTED, beta=0.1), expected)


def test_label_smoothing_stops_the_margin_where_the_label_noise_says():
    # The gradient in h vanishes where sigmoid(beta h) = 1 - epsilon.
    best = torch.tensor([math.log(0.8 / 0.2) / 0.1], requires_grad=True)
    dpo_loss(best, torch.zeros(1), beta=0.1, label_smoothing=0.2).sum().backward()
    assert best.grad.item() == pytest.approx(0.0, abs=1e-7)


def test_losses_and_gradients_stay_finite_at_extreme_values():
    far = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    zero, ones = torch.zeros(3), torch.ones(3)
    total = (
        dpo_loss(far, -far, beta=1.0).sum()
        + bradley_terry_loss(far, -far).sum()
        + simpo_loss(far, -far, ones, ones, beta=1.0, gamma=0.5).sum()
        + kto_loss(far, is_desirable=True, kl_baseline=0.0, beta=1.0, weight=1.0).sum()
        + orpo_loss(far.clamp(max=0), zero, ones, ones, odds_weight=1.0)[0].sum()
    )
    total.backward()
    assert total.isfinite()
    assert far.grad.isfinite().all()


def test_the_log_odds_of_certainty_are_bounded_and_have_no_gradient():
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).sum().backward()
    assert log_odds(certain).item() == pytest.approx(13.8155, abs=1e-3)
    assert certain.grad.item() == 0.0


def test_a_pair_without_its_partner_is_refused():
    with pytest.raises(ValueError, match="rejected_log_ratios must have the shape of chosen_log_ratios"):
        dpo_loss(torch.zeros(2), torch.zeros(1), beta=0.1)
    with pytest.raises(ValueError, match="margins"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), margins=torch.zeros(1))
