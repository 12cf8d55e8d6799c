"""``titan-rl conformance``: what it writes, formulas by hand, order and masks; its page is current."""

import copy
import json
import math
import runpy

import pytest

from tests.numerics.peer_rows import ROWS
from tests.unit.tools.conformance_runs import EXACT, FOLDER, ROOT, A, B, assert_close, changed, run
from titan_rl import cli
from titan_rl.algorithms import registries
from titan_rl.algorithms.preference_registry import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES

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


# ------------------------------------------------------------------------------------------ the page


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
