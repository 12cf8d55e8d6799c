"""``titan-rl conformance``: agreement with the peers' rows and with the float64 loops, and bad input."""

import copy
import json
import math
import runpy
from pathlib import Path

import pytest

from tests.numerics import conformance_rows, peer_rows
from tests.numerics.peer_rows import ROWS, Function, LeftOut, LossRow
from titan_rl import cli
from titan_rl.algorithms import registries
from titan_rl.algorithms.preference_registry import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "numerics" / "data"
A = json.loads((FOLDER / "fixture_a.json").read_text())
B = json.loads((FOLDER / "fixture_b.json").read_text())
TOLERANCE = 1e-5  # against the peers, who computed in fp32
EXACT = 1e-7  # against the loops in float64, rounded to nine decimals
CACHE = {}


def run(folder, fixture, hyperparameters=None, *, flags=()):
    """What the command writes for a fixture; each is computed once."""
    text = json.dumps({"fixture": fixture, "hyperparameters": hyperparameters or {}})
    if (text, flags) not in CACHE:
        source, target = folder / "fixture.json", folder / "rows.json"
        source.write_text(text)
        assert cli.main(["conformance", str(source), "--output", str(target), *flags]) == 0
        CACHE[text, flags] = json.loads(target.read_text())
    return copy.deepcopy(CACHE[text, flags])


def changed(fixture, fields):
    """A copy with other fields; a string names the field that is copied."""
    new = {name: fixture[value] if isinstance(value, str) else value for name, value in fields.items()}
    return {**fixture, **new}


@pytest.fixture(scope="module")
def of_a(tmp_path_factory):
    return run(tmp_path_factory.mktemp("a"), A["fixture"])


@pytest.fixture(scope="module")
def of_b(tmp_path_factory):
    """The file itself, as a user gives it, in float64."""
    target = tmp_path_factory.mktemp("b") / "rows.json"
    file = FOLDER / "fixture_b.json"
    assert cli.main(["conformance", str(file), "--float64", "--output", str(target)]) == 0
    return json.loads(target.read_text())


def assert_close(found, expected, tolerance=TOLERANCE):
    """Nested lists of one shape whose numbers are close."""
    if not isinstance(expected, list):
        assert found == pytest.approx(expected, abs=tolerance, rel=tolerance)
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance)


# --------------------------------------------------------------------------------------------- the output


def test_every_name_of_every_registry_has_a_row(of_a):
    kinds = {
        "algorithm": registries.ALGORITHMS,
        "advantage": registries.ADVANTAGES,
        "ratio": registries.RATIOS,
        "surrogate": registries.SURROGATES,
        "correction": registries.CORRECTIONS,
        "aggregation": registries.AGGREGATIONS,
        "kl": registries.KLS,
        "preference": PREFERENCE_LOSSES,
        "reward_model": REWARD_MODEL_LOSSES,
    }
    no_kinds = {"DEFAULT_ALGORITHM", "LOSSES"}  # of the latter every composition is a row
    registered = {name for name in vars(registries) if name.isupper()} - no_kinds
    assert len(registered) == len(kinds) - 2  # a new registry needs a kind here
    assert {f"{kind}/{name}" for kind, names in kinds.items() for name in names} - of_a.keys() == set()


def test_a_row_has_what_applies_to_it_and_what_it_was_computed_with(of_a):
    for name, row in of_a.items():
        kind = name.partition("/")[0]
        if "left_out" in row:
            assert row.keys() == {"left_out"}, name
            continue
        assert ("advantages" in row) == (kind in ("algorithm", "advantage")), name
        assert ("loss" in row) == ("grad_l2" in row) == (kind != "advantage"), name
        assert set(row.get("defaults", [])) <= row.get("hyperparameters", {}).keys(), name


def test_what_the_fixture_lacks_is_said_and_not_invented(of_a):
    left_out = {name: row["left_out"] for name, row in of_a.items() if "left_out" in row}
    fields = {name: text.partition(":")[0] for name, text in left_out.items()}
    assert fields == {
        "algorithm/remax": "needs fixture.greedy",
        "advantage/greedy_baseline": "needs fixture.greedy",
        "algorithm/on_policy_distillation": "needs fixture.teacher_logits",
        "distillation/reverse": "needs fixture.teacher_logits",
        "distillation/forward": "needs fixture.teacher_logits",
        "value_loss/clipped": "needs fixture.vpreds",
        "value_loss/squared": "needs fixture.vpreds",
    }


def test_equal_scores_make_no_pair(tmp_path):
    rows = run(tmp_path, changed(A["fixture"], {"scores": [1.0, 1.0, 0.5, 0.5]}))
    assert rows["preference/dpo"] == {
        "left_out": "needs a group with two different scores, to make a pair of"
    }
    assert rows["algorithm/grpo"]["advantages"] == [[0.0] * 6] * 4
    assert rows["algorithm/grpo"]["loss"] == rows["algorithm/grpo"]["grad_l2"] == 0.0


def test_the_output_tells_the_file_s_values_from_the_defaults(tmp_path, of_a):
    assert of_a["surrogate/clipped"]["hyperparameters"]["surrogate.clip_high"] == 0.2
    assert set(of_a["surrogate/clipped"]["defaults"]) == {
        "surrogate.clip_low",
        "surrogate.clip_high",
        "surrogate.clip_dual",
    }
    tables = {
        "clipped_surrogate": {"clip_high": 0.28},
        "algorithm/gspo": {"loss": {"surrogate": {"clip_low": 0.1}}},
    }
    rows = run(tmp_path, A["fixture"], tables)
    row = rows["surrogate/clipped"]
    assert row["hyperparameters"]["surrogate.clip_high"] == 0.28
    assert set(row["defaults"]) == {"surrogate.clip_low", "surrogate.clip_dual"}
    assert row["loss"] != of_a["surrogate/clipped"]["loss"]
    gspo = rows["algorithm/gspo"]
    assert gspo["hyperparameters"]["loss.surrogate.clip_low"] == 0.1
    assert gspo["hyperparameters"]["loss.surrogate.clip_high"] == 4e-4  # its own default, not the table's
    assert "loss.surrogate.clip_high" in gspo["defaults"]
    assert "loss.surrogate.clip_low" not in gspo["defaults"]


def test_a_row_s_table_wins_over_its_function_s(tmp_path):
    rows = run(
        tmp_path,
        A["fixture"],
        {"clipped_surrogate": {"clip_high": 0.3}, "surrogate/clipped": {"clip_high": 0.28}},
    )
    assert rows["surrogate/clipped"]["hyperparameters"]["surrogate.clip_high"] == 0.28


def test_without_output_the_json_goes_to_standard_output(capsys, of_a):
    assert cli.main(["conformance", str(FOLDER / "fixture_a.json")]) == 0
    assert json.loads(capsys.readouterr().out) == of_a


def test_float64_agrees_with_fp32_and_is_not_it(tmp_path, of_b):
    rows = run(tmp_path, B["fixture"], B["hyperparameters"])
    assert rows.keys() == of_b.keys()
    gaps = [
        abs(rows[name]["loss"] - row["loss"]) / max(1.0, abs(row["loss"]))
        for name, row in of_b.items()
        if "loss" in row
    ]
    assert max(gaps) < 1e-5
    assert sum(gap > 1e-9 for gap in gaps) > 40


# ----------------------------------------------------------------------------------------------- the peers


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


# ------------------------------------------------------------------------------------ the float64 loops

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


# ------------------------------------------------------------------------------------------- by hand


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -30 else x


def pair_losses(logp, ref, lengths):
    """Mean loss of each preference loss over pairs (0, 1), (2, 3), ... of sums of log-probabilities."""
    found = {}
    pairs = [(i, i + 1) for i in range(0, len(logp), 2)]
    ratio = [p - r for p, r in zip(logp, ref, strict=True)]
    mean = [p / n for p, n in zip(logp, lengths, strict=True)]
    odds = [m - math.log(1 - math.exp(m)) for m in mean]

    def over(function):
        return math.fsum(function(c, r) for c, r in pairs) / len(pairs)

    found["dpo"] = over(lambda c, r: -log_sigmoid(0.1 * (ratio[c] - ratio[r])))
    found["cdpo"] = over(
        lambda c, r: (
            -0.9 * log_sigmoid(0.1 * (ratio[c] - ratio[r])) - 0.1 * log_sigmoid(-0.1 * (ratio[c] - ratio[r]))
        )
    )
    per_token = [x / n for x, n in zip(ratio, lengths, strict=True)]
    found["length_normalised_dpo"] = over(lambda c, r: -log_sigmoid(5 * (per_token[c] - per_token[r])))
    found["ipo"] = over(lambda c, r: (ratio[c] - ratio[r] - 5.0) ** 2)
    found["simpo"] = over(lambda c, r: -log_sigmoid(2 * (mean[c] - mean[r]) - 1.0))
    found["orpo"] = over(lambda c, r: -mean[c] - 0.1 * log_sigmoid(odds[c] - odds[r]))
    sides = [0.1 * (x if i % 2 == 0 else -x) for i, x in enumerate(ratio)]
    found["kto"] = math.fsum(1 - 1 / (1 + math.exp(-x)) for x in sides) / len(sides)
    return found


def test_losses_on_pairs_are_those_of_their_formulas(of_b):
    scores, uid, mask = (B["fixture"][name] for name in ("scores", "uid", "mask"))
    order = []
    for group in dict.fromkeys(uid):
        rows = [i for i, name in enumerate(uid) if name == group]
        best, worst = max(rows, key=lambda i: scores[i]), min(rows, key=lambda i: scores[i])
        order += [best, worst] if scores[best] > scores[worst] else []
    assert len(order) == 4  # the third group's scores are equal
    lengths = [sum(mask[i]) for i in order]

    def sums(name):
        return [math.fsum(x * m for x, m in zip(B["fixture"][name][i], mask[i], strict=True)) for i in order]

    logp, ref, step = sums("logp"), sums("ref"), 1e-5
    expected = pair_losses(logp, ref, lengths)
    assert expected.keys() == PREFERENCE_LOSSES.keys()
    slopes = []
    for i in range(len(order)):
        ends = [
            pair_losses([x + s * step * (i == j) for j, x in enumerate(logp)], ref, lengths) for s in (1, -1)
        ]
        slopes.append({name: (ends[0][name] - ends[1][name]) / (2 * step) for name in expected})
    for name, loss in expected.items():
        row = of_b[f"preference/{name}"]
        assert row["pairs"] == [order[:2], order[2:]]
        assert row["loss"] == pytest.approx(loss, rel=EXACT), name
        # A sum's derivative is that of each of its tokens.
        norm = math.sqrt(math.fsum(n * s[name] ** 2 for n, s in zip(lengths, slopes, strict=True)))
        assert row["grad_l2"] == pytest.approx(norm, rel=1e-6), name


def test_a_reward_model_is_compared_by_its_own_scores_or_by_the_scores(tmp_path, of_a):
    row = of_a["reward_model/bradley_terry"]
    assert row["loss"] == pytest.approx(
        (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(-0.75))) / 2, abs=1e-6
    )
    assert row["with_respect_to"] == "scores"
    fixture = changed(A["fixture"], {"rm_scores": [2.0, 1.0, 0.0, 1.0], "margins": [0.5, 9.0, 0.0, 9.0]})
    row = run(tmp_path, fixture)["reward_model/bradley_terry"]
    assert row["loss"] == pytest.approx(
        (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(1.0))) / 2, abs=1e-6
    )
    assert row["with_respect_to"] == "rm_scores"


def test_a_teacher_s_divergences_and_their_gradients_are_those_of_plain_sums(tmp_path):
    fixture = copy.deepcopy(A["fixture"])
    fixture["teacher_logits"] = [[z[::-1] for z in row] for row in fixture["logits"]]
    rows = run(tmp_path, fixture, flags=("--float64",))
    sums, squares, count = {"reverse": 0.0, "forward": 0.0}, {"reverse": 0.0, "forward": 0.0}, 0
    for mask, row in zip(fixture["mask"], fixture["logits"], strict=True):
        for trained, z in zip(mask, row, strict=True):
            if trained:
                normaliser = math.log(math.fsum(map(math.exp, z)))
                p = [x - normaliser for x in z]
                q = p[::-1]
                reverse = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
                sums["reverse"] += reverse
                sums["forward"] += math.fsum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True))
                squares["reverse"] += math.fsum(
                    (math.exp(a) * (a - b - reverse)) ** 2 for a, b in zip(p, q, strict=True)
                )
                squares["forward"] += math.fsum(
                    (math.exp(a) - math.exp(b)) ** 2 for a, b in zip(p, q, strict=True)
                )
                count += 1
    for name in sums:
        row = rows[f"distillation/{name}"]
        assert row["loss"] == pytest.approx(sums[name] / count, rel=EXACT)
        assert row["grad_l2"] == pytest.approx(math.sqrt(squares[name]) / count, rel=EXACT)
    whole = rows["algorithm/on_policy_distillation"]
    assert whole["loss"] == pytest.approx(rows["distillation/reverse"]["loss"], rel=EXACT)
    assert whole["grad_l2"] == pytest.approx(rows["distillation/reverse"]["grad_l2"], rel=EXACT)
    assert whole["with_respect_to"] == "logits"


def test_a_bonus_on_entropy_is_subtracted(tmp_path, of_a):
    rows = run(tmp_path, A["fixture"], {"entropy": {"coefficient": 0.5}})
    difference = of_a["entropy/bonus"]["loss"] - rows["entropy/bonus"]["loss"]
    assert difference == pytest.approx(0.5 * rows["entropy/mean"]["loss"], abs=1e-5)


def test_a_composition_of_the_file_is_a_row(tmp_path, of_a):
    table = {
        "ratio": {"type": "sequence"},
        "surrogate": {"type": "clipped", "clip_high": 0.28},
        "correction": {"type": "truncated_tokens"},
        "aggregation": {"type": "sample_mean_of_token_means"},
    }
    rows = run(tmp_path, A["fixture"], {"composition/mine": table, "composition/default": {}})
    assert rows["composition/default"]["loss"] == of_a["surrogate/clipped"]["loss"]
    mine = rows["composition/mine"]
    assert mine["hyperparameters"]["correction.cap"] == 2.0
    assert {"correction.cap", "surrogate.clip_low"} <= set(mine["defaults"])
    assert "surrogate.clip_high" not in mine["defaults"]
    assert mine["loss"] != of_a["ratio/sequence|sample_mean_of_token_means"]["loss"]


# ----------------------------------------------------------------------------------- groups, masks, order


def test_the_order_of_the_rollouts_changes_nothing_but_the_order(tmp_path):
    order = [7, 0, 15, 4, 1, 12, 5, 2, 8, 13, 3, 9, 6, 14, 10, 11]
    fixture = {name: [values[i] for i in order] for name, values in B["fixture"].items()}
    rows = run(tmp_path, fixture, B["hyperparameters"], flags=("--float64",))
    here = run(tmp_path, B["fixture"], B["hyperparameters"], flags=("--float64",))
    for name, row in here.items():
        for key in ("loss", "grad_l2"):
            if key in row:
                assert rows[name][key] == pytest.approx(row[key], abs=1e-9, rel=1e-9), name
        if "advantages" in row:
            assert_close(rows[name]["advantages"], [row["advantages"][i] for i in order], 1e-9)


def test_what_stands_at_masked_tokens_does_not_matter(tmp_path, of_a):
    fixture = copy.deepcopy(A["fixture"])
    for name in ("logp", "old", "roll", "ref", "values", "adv", "tok_rew"):
        fixture[name][1][5], fixture[name][3][2] = math.nan, -math.inf
    fixture["labels"][1][5] = 99
    rows = run(tmp_path, fixture)
    assert rows == of_a


def test_groups_of_one_and_rollouts_without_a_trained_token_give_numbers(tmp_path):
    fixture = changed(A["fixture"], {"uid": [1, "a", "a", 2]})
    fixture["mask"] = [*fixture["mask"][:3], [0.0] * 6]
    rows = run(tmp_path, fixture)
    assert rows["algorithm/grpo"]["advantages"][0] == [0.0] * 6
    assert rows["preference/dpo"]["pairs"] == [[2, 1]]
    assert all(math.isfinite(row["loss"]) for row in rows.values() if "loss" in row)


# ----------------------------------------------------------------------------------------- bad input


def broken(**fields):
    return lambda f: f.update(fields)


def remove(name):
    return lambda f: f.pop(name)


def shorten(f):
    f["old"][2] = f["old"][2][:4]


def not_finite(f):
    f["ref"][1][3] = math.nan


def half(f):
    f["mask"][0][1] = 0.5


def word(f):
    f["labels"][0][0] = 11


@pytest.mark.parametrize(
    ("change", "where", "constraint"),
    [
        (remove("logp"), "fixture.logp", "must be there, [B, T]; got no such key"),
        (remove("uid"), "fixture.uid", "must be there, [B]"),
        (broken(logpp=[1]), "fixture.logpp", "Did you mean 'logp'?"),
        (broken(mask=[]), "fixture.mask", "must be [B, T] with at least one row"),
        (
            broken(scores=[1.0, 2.0]),
            "fixture.scores",
            "must have 4 entries, being of [B] = [4]; got a list of 2",
        ),
        (
            broken(scores=3),
            "fixture.scores",
            "must have 4 entries, being of [B] = [4]; got 3, which is no list",
        ),
        (shorten, "fixture.old[2]", "must have 6 entries, being of [B, T] = [4, 6]; got a list of 4"),
        (broken(scores=[1, 0, "x", 1]), "fixture.scores[2]", "must be a number; got 'x'"),
        (broken(scores=[1, 0, None, 1]), "fixture.scores[2]", "must be a number; got None"),
        (broken(scores=[1, 0, math.inf, 1]), "fixture.scores[2]", "must be finite"),
        (not_finite, "fixture.ref[1][3]", "must be finite where a token is trained"),
        (half, "fixture.mask[0][1]", "must be 0 or 1; got 0.5"),
        (word, "fixture.labels[0][0]", "must be an index, 0 or more below V = 11"),
        (
            broken(logits=[[[0.0]] * 6] * 3),
            "fixture.logits",
            "must have 4 entries, being of [B, T, V] = [4, 6, 1]",
        ),
        (broken(logits=[1, 2, 3, 4]), "fixture.logits", "must be [B, T, V]"),
        (broken(uid=["a", "a", "b"]), "fixture.uid", "must have 4 entries"),
        (broken(uid=["a", "a", "b", 1.5]), "fixture.uid[3]", "must be a string or an integer"),
        (
            broken(greedy=[0.5, 0.5, 0.5, 0.4]),
            "fixture.greedy[2]",
            "must be equal within a group; got [0.5, 0.4]",
        ),
        (
            broken(greedy=[1] * 4, baselines=[1] * 4),
            "fixture.baselines",
            "must be absent beside fixture.greedy",
        ),
    ],
)
def test_a_bad_fixture_is_refused_with_file_key_and_shape(tmp_path, capsys, change, where, constraint):
    fixture = copy.deepcopy(A["fixture"])
    change(fixture)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"fixture": fixture}))
    assert cli.main(["conformance", str(path)]) == 2
    output = capsys.readouterr()
    assert f"{path}: {where}" in output.err
    assert constraint in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("tables", "where", "constraint"),
    [
        ({"clipped_surogate": {}}, "hyperparameters.clipped_surogate", "Did you mean 'clipped_surrogate'?"),
        ({"clipped_surrogate": {"clip": 0.2}}, "hyperparameters.clipped_surrogate.clip", "must be a key of"),
        ({"clipped_surrogate": {"clip_low": 2}}, "hyperparameters.clipped_surrogate.clip_low", "<= 1"),
        ({"surrogate/clipped": {"clip_low": "x"}}, "hyperparameters.surrogate/clipped.clip_low", "a number"),
        ({"surrogate/clipped": 3}, "hyperparameters.surrogate/clipped", "must be an object"),
        ({"whiten": {"eps": 0}}, "hyperparameters.whiten.eps", "> 0"),
        (
            {"algorithm/ppo": {"loss": {"surogate": {}}}},
            "hyperparameters.algorithm/ppo.loss.surogate",
            "Did you mean 'surrogate'?",
        ),
        (
            {"algorithm/grpo": {"shaping": {"mask_truncated": True}}},
            "hyperparameters.algorithm/grpo.shaping.mask_truncated",
            "must be absent",
        ),
        ({"composition/x": {"surrogate": {"type": "clippd"}}}, "hyperparameters.composition/x", "clipped"),
        ([1], "hyperparameters", "must be an object of objects"),
    ],
)
def test_bad_hyperparameters_are_refused(tmp_path, capsys, tables, where, constraint):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"fixture": A["fixture"], "hyperparameters": tables}))
    assert cli.main(["conformance", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {where}" in error
    assert constraint in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1 must be JSON"),
        ("[]", "must hold an object; got 'list'"),
        ('{"fixtures": {}}', "fixture must be an object of arrays; got no such key"),
    ],
)
def test_a_file_that_is_no_fixture_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert cli.main(["conformance", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_or_cannot_be_written_is_refused(tmp_path, capsys):
    assert cli.main(["conformance", str(tmp_path / "none.json")]) == 2
    assert "none.json must be a readable file" in capsys.readouterr().err
    target = tmp_path / "no" / "rows.json"
    assert cli.main(["conformance", str(FOLDER / "fixture_a.json"), "--output", str(target)]) == 2
    assert "--output must be a file that can be written" in capsys.readouterr().err


def test_the_page_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "make_conformance_page.py"))
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert script["render"]() == page
    for name in ROWS:  # complete
        assert any(f"| `{shown}` |" in page for shown in endings(name)), name


def endings(name):
    """A row's name without the peer's, as a cell of a table shows it."""
    parts = name.replace("|", "\\|").split("/")
    return ["/".join(parts[i:]) for i in range(len(parts))]
