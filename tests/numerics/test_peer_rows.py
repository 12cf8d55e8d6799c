"""The pure functions against what the released functions of other frameworks give on one published fixture.

``peer_rows.py`` says for every row which functions it is compared with, and with which arguments.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.numerics import peer_rows
from tests.numerics.composition import Batch, correct, evaluate, part
from tests.numerics.peer_rows import ROWS, Function, LeftOut, LossRow
from titan_rl.functional import advantages, kl, preference, returns
from titan_rl.functional.segments import is_last_trained
from titan_rl.functional.value import clipped_value_loss
from titan_rl.functional.whitening import whiten, whitening_sums

TOLERANCE = 1e-5
DATA = json.loads((Path(__file__).parent / "data" / "fixture_a.json").read_text())
RAW = {
    name: torch.tensor(values) for name, values in DATA["fixture"].items() if name not in ("uid", "logits")
}
MASK = RAW["mask"].bool()
INDEX = torch.arange(4)[:, None].expand(4, 6)
SEGMENTS = {"loss_mask": MASK, "sample_index": INDEX}
BATCH = Batch(RAW["logp"], RAW["old"], RAW["roll"], RAW["ref"], RAW["adv"], MASK, INDEX, num_samples=4)
GROUPS = (slice(0, 2), slice(2, 4))
# Pairs and differences of rewards of the preference rows, which the file does not hold itself.
CHOSEN, REJECTED = torch.tensor([0.5, -0.5]), torch.tensor([-0.2, 0.4])
DIFFERENCES = torch.tensor([-0.4, 0.8, 1.3])


def rows(kind):
    return [name for name, row in ROWS.items() if isinstance(row, Function) and row.kind == kind]


def close(actual, expected, tolerance=TOLERANCE):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance


def test_the_table_has_every_row_of_the_fixture_and_no_other():
    assert sorted(ROWS) == sorted(peer_rows.names(DATA))


def test_every_row_without_a_counterpart_says_why():
    left_out = {name: row.reason for name, row in ROWS.items() if isinstance(row, LeftOut)}
    assert len(left_out) == 3
    assert all(len(reason) > 20 for reason in left_out.values())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, LossRow)])
def test_loss_and_gradient_equal_the_peer_s(name):
    expected = peer_rows.find(DATA, name)
    outcome = evaluate(ROWS[name].loss, BATCH)
    assert outcome.loss.item() == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert torch.equal(outcome.gradient[~MASK], torch.zeros_like(outcome.gradient[~MASK]))
    if "grad_l2" in expected:
        assert outcome.gradient.norm().item() == pytest.approx(expected["grad_l2"], abs=TOLERANCE)
    if "grad_row0" in expected:
        close(outcome.gradient[0], expected["grad_row0"])


def test_all_loss_rows_but_one_have_a_gradient():
    losses = [peer_rows.find(DATA, name) for name, row in ROWS.items() if isinstance(row, LossRow)]
    assert len(losses) == 35
    assert [row for row in losses if "grad_l2" not in row] == [DATA["others"]["titanrl"]["dapo .2/.28"]]


def _of_groups(row):
    function = getattr(advantages, row.name)
    arguments = dict(row.arguments)
    found = []
    for group in GROUPS:
        extra = [arguments.pop("baseline")] if "baseline" in arguments else []
        if row.name == "length_weighted":
            extra = [MASK[group].sum(1)]
        found.append(function(RAW["scores"][group], *extra, **arguments))
        arguments = dict(row.arguments)
    return torch.cat(found)[:, None] * RAW["mask"]


@pytest.mark.parametrize("name", rows("group"))
def test_advantages_of_groups_equal_the_peer_s(name):
    close(_of_groups(ROWS[name]), peer_rows.find(DATA, name)["adv"])


@pytest.mark.parametrize("name", rows("whitened group"))
def test_whitened_advantages_of_groups_equal_the_peer_s(name):
    values = _of_groups(ROWS[name])
    close(whiten(values, MASK, *whitening_sums(values, MASK)), peer_rows.find(DATA, name)["adv"])


@pytest.mark.parametrize("name", rows("whitened returns"))
def test_whitened_returns_equal_the_peer_s(name):
    expected = peer_rows.find(DATA, name)
    values = returns.discounted_returns(RAW["tok_rew"], **SEGMENTS, **ROWS[name].arguments)
    close(values, expected["ret"])
    close(whiten(values, MASK, *whitening_sums(values, MASK)), expected["adv"])


def test_the_reward_of_a_rollout_is_put_where_the_fixture_has_it():
    rewards = torch.where(is_last_trained(MASK, INDEX), RAW["scores"][:, None], 0.0)
    assert torch.equal(rewards, RAW["tok_rew"])


@pytest.mark.parametrize("name", rows("whitened gae"))
def test_advantages_and_returns_of_a_critic_equal_the_peer_s(name):
    expected = peer_rows.find(DATA, name)
    found = returns.gae(RAW["tok_rew"], RAW["values"], **SEGMENTS, **ROWS[name].arguments)
    close(
        whiten(found.advantages, MASK, *whitening_sums(found.advantages, MASK)) * RAW["mask"],
        torch.tensor(expected["adv"]) * RAW["mask"],
    )
    close(found.returns, expected["ret"])


@pytest.mark.parametrize("name", rows("gae row 0"))
def test_advantages_of_a_critic_before_whitening_equal_the_peer_s(name):
    expected = peer_rows.find(DATA, name)
    found = returns.gae(RAW["tok_rew"], RAW["values"], **SEGMENTS, **ROWS[name].arguments)
    close(found.advantages[0], expected["adv"])
    close(found.returns[0], expected["ret"])


@pytest.mark.parametrize("name", rows("value loss"))
def test_the_critic_s_loss_equals_the_peer_s(name):
    expected = peer_rows.find(DATA, name)
    found = clipped_value_loss(
        torch.tensor(expected["vpreds"]),
        RAW["values"],
        torch.tensor(expected["returns"]),
        **ROWS[name].arguments,
    )
    close(found.loss[MASK].mean(), expected["loss"])
    close(found.is_clipped[MASK].float().mean(), expected["clipfrac"])


@pytest.mark.parametrize("name", rows("kl"))
def test_kl_estimates_equal_the_peer_s(name):
    close(getattr(kl, ROWS[name].name)(RAW["logp"], RAW["ref"]) * RAW["mask"], peer_rows.find(DATA, name))


@pytest.mark.parametrize("name", rows("kl sum"))
def test_the_sum_of_kl_estimates_equals_the_peer_s(name):
    estimates = getattr(kl, ROWS[name].name)(RAW["logp"], RAW["ref"])
    close(estimates[MASK].sum(), peer_rows.find(DATA, name))


@pytest.mark.parametrize("name", rows("correction"))
def test_weights_and_masks_equal_the_peer_s(name):
    row, expected = ROWS[name], peer_rows.find(DATA, name)
    found = correct(part(row.name, **row.arguments), BATCH)
    close(found.weights, expected.get("weights", expected.get("mask")))


@pytest.mark.parametrize("name", rows("preference"))
def test_losses_on_preferences_equal_the_peer_s(name):
    row, expected = ROWS[name], peer_rows.find(DATA, name)
    function, arguments = getattr(preference, row.name), dict(row.arguments)
    if row.name == "bradley_terry_loss":
        arguments = {key: torch.full((3,), value) for key, value in arguments.items()}
        close(function(DIFFERENCES, torch.zeros(3), **arguments).mean(), expected)
        return
    close(row.arguments["beta"] * CHOSEN, expected["chosen_rewards"])
    close(row.arguments["beta"] * REJECTED, expected["rejected_rewards"])
    close(
        function(CHOSEN, REJECTED, **arguments).mean(), expected["loss"], TOLERANCE * max(1, expected["loss"])
    )


FAULTS = {
    "verl_0.9.1/policy_loss(clip .2/.28,c=3)/vanilla|token-mean": part(
        "clipped_surrogate", clip_low=0.2, clip_high=0.2
    ),
    "verl_0.9.1/policy_loss(clip .2/.28,c=3)/cispo|token-mean": part(
        "clipped_weight_surrogate", clip_high=0.28
    ),
    "verl_0.9.1/policy_loss(clip .2/.28,c=3)/sapo|seq-mean-token-mean": part(
        "soft_gated_surrogate", tau_negative=1.0
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_another_surrogate_would_be_noticed(name):
    row = ROWS[name]
    faulty = type(row.loss)(**{**vars(row.loss), "surrogate": FAULTS[name]})
    assert evaluate(faulty, BATCH).loss.item() != pytest.approx(
        peer_rows.find(DATA, name)["loss"], abs=TOLERANCE
    )
