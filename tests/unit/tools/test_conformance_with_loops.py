"""``titan-rl conformance``: agreement with the float64 loops that are written from the papers."""

import math

import pytest

from tests.numerics import conformance_rows
from tests.unit.tools.conformance_runs import EXACT, B, assert_close, changed, run

FIRST = {
    "clipped": "surrogate/clipped",
    "dual_clipped": "surrogate/dual_clipped",
    "sequence_ratio clipped": "ratio/sequence_whole_gradient",
    "sequence_token_ratio clipped": "ratio/sequence",
    "product_ratio clipped": "ratio/sequence_product",
    "reinforce": "surrogate/reinforce",
    "clipped_weight": "surrogate/clipped_weight",
    "clipped_weight above": "surrogate/clipped_weight",
    "soft_gated": "surrogate/soft_gated",
    "geometric_mean": "surrogate/geometric_mean",
    "gamma_weighted": "surrogate/gamma_weighted",
    "total_variation": "surrogate/total_variation",
    "binary_kl": "surrogate/binary_kl_masked",
    "quadratic": "surrogate/quadratic",
}


def row_of_b(name):
    first, *rest = name.split("|")
    if rest[-1] in ("k2", "k3"):
        return f"kl/reference|{rest[-1]}"
    if len(rest) == 2:
        return f"correction/{conformance_rows.CORRECTIONS[rest[0]]}"
    return FIRST[first] + ("" if rest == ["token_mean"] else f"|{rest[0]}")


@pytest.mark.parametrize("name", B["expected"]["losses"])
def test_losses_and_gradients_agree_with_the_loops(tmp_path, of_b, name):
    rows, expected = of_b, B["expected"]["losses"][name]
    if name.startswith("clipped_weight above"):
        tables = {**B["hyperparameters"], "clipped_weight_surrogate": {"clip_low": 1.0, "clip_high": 0.28}}
        rows = run(tmp_path, B["fixture"], tables, flags=("--float64",))
    if "reject_negative" in name:  # the loops compare with the old policy
        rows = run(
            tmp_path, changed(B["fixture"], {"roll": "old"}), B["hyperparameters"], flags=("--float64",)
        )
    row = rows[row_of_b(name)]
    assert row["loss"] == pytest.approx(expected["loss"], abs=EXACT, rel=EXACT)
    assert row["grad_l2"] == pytest.approx(expected["grad_l2"], abs=EXACT, rel=EXACT)


def per_rollout(row, fixture):
    found = []
    for values, mask in zip(row["advantages"], fixture["mask"], strict=True):
        trained = [v for v, m in zip(values, mask, strict=True) if m]
        assert len(set(trained)) == 1
        assert not any(v for v, m in zip(values, mask, strict=True) if not m)
        found.append(trained[0])
    return found


def test_advantages_of_groups_agree_with_the_loops(of_b):
    names = {
        "group_normalized": "group_normalized",
        "group_centred": "group_normalized|centred",
        "leave_one_out": "leave_one_out",
        "length_weighted": "length_weighted",
        "best_of_group": "best_of_group",
        "against_baseline": "greedy_baseline",
    }
    assert names.keys() == B["expected"]["advantages"].keys()
    for name, row in names.items():
        found = per_rollout(of_b[f"advantage/{row}"], B["fixture"])
        assert_close(found, B["expected"]["advantages"][name], EXACT)


def test_the_punishment_of_length_is_in_the_reward(of_b):
    scores = [s + p for s, p in zip(B["fixture"]["scores"], B["expected"]["soft_overlong"], strict=True)]
    expected = []
    for group in (slice(0, 4), slice(4, 12), slice(12, 16)):
        mean = math.fsum(scores[group]) / len(scores[group])
        expected += [s - mean for s in scores[group]]
    found = per_rollout(of_b["advantage/group_normalized|centred|soft_overlong"], B["fixture"])
    assert_close(found, expected, EXACT)
    assert found != per_rollout(of_b["advantage/group_normalized|centred"], B["fixture"])


def test_advantages_per_token_and_the_critic_s_loss_agree_with_the_loops(tmp_path):
    expected = B["expected"]["token advantages"]
    fixture = changed(B["fixture"], {"tok_rew": expected["rewards"]})
    rows = run(tmp_path, fixture, B["hyperparameters"], flags=("--float64",))
    for row, name in {
        "returns": "discounted_returns",
        "returns|whitened": "discounted_returns, whitened",
        "group_normalized|centred|whitened": "group_centred, whitened",
        "gae": "gae",
        "gae|whitened": "gae, whitened",
        "gae|length_adaptive": "gae, length-adaptive",
    }.items():
        assert_close(rows[f"advantage/{row}"]["advantages"], expected[name], EXACT)
    assert_close(rows["advantage/gae"]["returns"], expected["gae returns"], EXACT)
    value, gradient = rows["value_loss/clipped"], B["expected"]["value loss"]["grad"]
    assert value["loss"] == pytest.approx(B["expected"]["value loss"]["loss"], abs=EXACT)
    assert value["grad_l2"] == pytest.approx(
        math.sqrt(math.fsum(g * g for r in gradient for g in r)), abs=EXACT
    )
    assert rows["value_loss/squared"]["loss"] < value["loss"]


def test_a_penalty_in_the_reward_is_subtracted_from_an_algorithm_s_rewards(tmp_path):
    # The loops take the policy's own log-probabilities, a run those of the old policy.
    fixture = changed(B["fixture"], {"old": "logp"})
    table = {"advantage": {"gamma": 0.9}, "loss": {"kl": {"coefficient": 0.05}}}
    rows = run(tmp_path, fixture, {"algorithm/reinforce_pp": table}, flags=("--float64",))
    expected = B["expected"]["token advantages"]["discounted_returns, whitened"]
    assert_close(rows["algorithm/reinforce_pp"]["advantages"], expected, EXACT)


def test_kl_estimates_weights_and_entropy_agree_with_the_loops(of_b):
    for name, values in B["expected"]["kl"].items():
        assert_close(of_b[f"kl/{name}"]["values"], values, EXACT)
    for name, expected in B["expected"]["corrections"].items():
        if not name.startswith("reject_negative"):
            row = of_b[f"correction/{conformance_rows.CORRECTIONS[name]}"]
            assert_close(row["weights"], expected["weights"], EXACT)
    count = sum(map(sum, B["fixture"]["mask"]))
    assert of_b["entropy/mean"]["loss"] == pytest.approx(
        math.fsum(map(sum, B["expected"]["entropy"])) / count, abs=EXACT
    )
    assert of_b["entropy/mean"]["with_respect_to"] == "logits"
