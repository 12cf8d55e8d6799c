"""``titan-rl conformance``: agreement with the rows of the peers' file."""

import json

import pytest

from tests.numerics import conformance_rows, peer_rows
from tests.numerics.peer_rows import ROWS, Function, LeftOut, LossRow
from tests.unit.tools.conformance_runs import TOLERANCE, A, assert_close, changed, run


def together(places):
    """Tables of all these rows in as few dicts as agree, so that one run serves many rows."""
    found, by_name = {}, {}
    for name, place in places.items():
        merged_ones = found.setdefault(json.dumps(place.fields), [])
        for merged in merged_ones:
            if all(merged.get(key, table) == table for key, table in place.hyperparameters.items()):
                break
        else:
            merged_ones.append(merged := {})
        merged.update(place.hyperparameters)
        by_name[name] = merged
    return by_name


PLACES = {name: place for name in ROWS if (place := conformance_rows.place(name)) is not None}
TABLES = together(PLACES)


def of_peer(folder, name):
    """The command's row for a row of the peers' file."""
    place = PLACES[name]
    expected = peer_rows.find(A, name)
    fields = dict(place.fields)
    if "vpreds" in fields:
        fields = {"vpreds": expected["vpreds"], "returns": expected["returns"]}
    fixture = A["fixture"]
    if place.row.startswith(("preference/", "reward_model/")):
        fixture, fields = pairs_of_one_token(fields), {}
    return run(folder, changed(fixture, fields), TABLES[name])[place.row]


def pairs_of_one_token(fields):
    """Rollouts of one token, the first of each two the better one; the reference says 0."""
    size = len(next(iter(fields.values())))
    logp = [[x] for x in fields.pop("logp", [0.0] * size)]
    return {
        "mask": [[1.0]] * size,
        "logp": logp,
        "old": logp,
        "ref": [[0.0]] * size,
        "scores": [1.0, 0.0] * (size // 2),
        "uid": [i // 2 for i in range(size)],
        **fields,
    }


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, LossRow)])
def test_a_loss_agrees_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    assert row["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    if "grad_l2" in expected:
        assert row["grad_l2"] == pytest.approx(expected["grad_l2"], abs=TOLERANCE)


def functions(*kinds):
    return [name for name, row in ROWS.items() if isinstance(row, Function) and row.kind in kinds]


@pytest.mark.parametrize("name", functions("group", "whitened group", "whitened returns", "whitened gae"))
def test_advantages_agree_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    mask = A["fixture"]["mask"]
    masked = [[a * m for a, m in zip(*pair, strict=True)] for pair in zip(expected["adv"], mask, strict=True)]
    assert_close(row["advantages"], masked)
    if "gae" in name:
        assert_close(row["returns"], expected["ret"])


@pytest.mark.parametrize("name", functions("gae row 0"))
def test_advantages_of_one_row_agree_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    assert_close(row["advantages"][0], expected["adv"])
    assert_close(row["returns"][0], expected["ret"])


@pytest.mark.parametrize("name", functions("value loss"))
def test_the_critic_s_loss_agrees_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    assert row["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert row["clip_fraction"] == pytest.approx(expected["clipfrac"], abs=TOLERANCE)


@pytest.mark.parametrize("name", functions("kl", "kl sum"))
def test_kl_estimates_agree_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    values = row["values"]
    assert_close(sum(map(sum, values)) if isinstance(expected, float) else values, expected)


@pytest.mark.parametrize("name", functions("correction"))
def test_weights_agree_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    assert_close(row["weights"], expected.get("weights", expected.get("mask")))


@pytest.mark.parametrize("name", functions("preference"))
def test_losses_on_pairs_agree_with_the_peer_s(tmp_path, name):
    expected, row = peer_rows.find(A, name), of_peer(tmp_path, name)
    expected = expected if isinstance(expected, float) else expected["loss"]
    assert row["loss"] == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)


def test_every_row_of_the_peers_is_compared_or_left_out():
    compared = functions(
        "group", "whitened group", "whitened returns", "whitened gae", "gae row 0",
        "value loss", "kl", "kl sum", "correction", "preference",
    )  # fmt: skip
    losses = [name for name, row in ROWS.items() if isinstance(row, LossRow)]
    left_out = [name for name, row in ROWS.items() if isinstance(row, LeftOut)]
    assert sorted([*compared, *losses, *left_out]) == sorted(ROWS)


VERL = "verl_0.9.1/advantages/"
WHOLE = {
    "grpo": (f"{VERL}grpo", {}),
    "dapo": (f"{VERL}grpo", {}),
    "gspo": (f"{VERL}grpo", {}),
    "cispo": (f"{VERL}grpo", {}),
    "dr_grpo": (f"{VERL}grpo_no_std(dr_grpo)", {}),
    "rloo": (f"{VERL}rloo", {}),
    "reinforce_pp": (f"{VERL}rpp(g=1)", {}),
    "reinforce_pp_baseline": (f"{VERL}rpp_baseline", {}),
    "remax": (f"{VERL}remax", {}),
    "ppo": (f"{VERL}gae(g=0.99,l=0.95)", {"advantage": {"gamma": 0.99, "lambda_policy": 0.95}}),
}


@pytest.mark.parametrize("algorithm", WHOLE)
def test_advantages_of_a_named_algorithm_agree_with_verl_s(tmp_path, algorithm):
    peer, table = WHOLE[algorithm]
    tables = {f"algorithm/{algorithm}": table} if table else {}
    row = run(tmp_path, changed(A["fixture"], {"greedy": [0.5] * 4}), tables)[f"algorithm/{algorithm}"]
    expected, mask = peer_rows.find(A, peer)["adv"], A["fixture"]["mask"]
    for found, values, kept in zip(row["advantages"], expected, mask, strict=True):
        assert found == pytest.approx([v * k for v, k in zip(values, kept, strict=True)], abs=TOLERANCE)
