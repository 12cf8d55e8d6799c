"""The pure functions against ``data/fixture_b.json``: plain float64 loops, every branch of every loss.

The file is written by ``scripts/make_fixture_b.py``, which imports nothing of the product.
"""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from tests.numerics.composition import Batch, Loss, correct, evaluate, part
from titan_rl.algorithms.shaping import ShapingSection, shape_reward
from titan_rl.functional import advantages, kl, returns
from titan_rl.functional.logprobs import chunked_logprobs
from titan_rl.functional.segments import is_last_trained
from titan_rl.functional.value import clipped_value_loss
from titan_rl.functional.whitening import whiten, whitening_sums

TOLERANCE = 1e-5
ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "data" / "fixture_b.json"
DATA = json.loads(FILE.read_text())
H, EXPECTED, UID = DATA["hyperparameters"], DATA["expected"], DATA["fixture"]["uid"]
RAW = {name: torch.tensor(values) for name, values in DATA["fixture"].items() if name != "uid"}
MASK = RAW["mask"].bool()
ROWS, LENGTH = MASK.shape
INDEX = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)
SEGMENTS = {"loss_mask": MASK, "sample_index": INDEX}
BATCH = Batch(RAW["logp"], RAW["old"], RAW["roll"], RAW["ref"], RAW["adv"], MASK, INDEX, num_samples=ROWS)
GROUPS = [slice(0, 4), slice(4, 12), slice(12, 16)]


def _with(name, **changes):
    return part(name, **{**H.get(name, {}), **changes})


CLIPPED = _with("clipped_surrogate")
# By the first part of a row's name: ratio and surrogate.
LOSSES = {
    "clipped": ("token_ratio", CLIPPED),
    "dual_clipped": ("token_ratio", _with("dual_clipped_surrogate")),
    "sequence_ratio clipped": ("sequence_ratio", CLIPPED),
    "sequence_token_ratio clipped": ("sequence_token_ratio", CLIPPED),
    "product_ratio clipped": (part("sequence_ratio", length_normalise=False), CLIPPED),
    "reinforce": ("token_ratio", part("reinforce_surrogate")),
    "clipped_weight": ("token_ratio", _with("clipped_weight_surrogate")),
    "clipped_weight above": ("token_ratio", _with("clipped_weight_surrogate", clip_low=1.0)),
    "soft_gated": ("token_ratio", _with("soft_gated_surrogate")),
    "geometric_mean": ("token_ratio", _with("geometric_mean_surrogate")),
    "gamma_weighted": ("token_ratio", _with("gamma_weighted_surrogate")),
    "total_variation": ("token_ratio", _with("total_variation_masked")),
    "binary_kl": ("token_ratio", _with("binary_kl_masked")),
    "quadratic": ("token_ratio", _with("quadratic_surrogate")),
}
CORRECTIONS = list(EXPECTED["corrections"])


def composition(name):
    """The loss that a row's name spells out."""
    first, *middle, last = name.split("|")
    corrections, penalty = (), None
    if last in ("k2", "k3"):
        penalty, (last,) = part(last), middle
    elif middle:
        corrections = (_with(middle[0]),)
    ratio, surrogate = LOSSES[first]
    return Loss(
        ratio=part(ratio) if isinstance(ratio, str) else ratio,
        surrogate=surrogate,
        corrections=corrections,
        aggregation=_with(last),
        kl=penalty,
        coefficient=H["kl"]["coefficient"],
    )


def close(actual, expected, scale=1.0):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= TOLERANCE * max(scale, 1.0)


def test_the_file_is_what_its_script_writes(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "make_fixture_b.py"))
    written = tmp_path / "fixture_b.json"
    script["main"].__globals__["TARGET"] = written
    script["main"]()
    assert json.loads(written.read_text()) == DATA


def test_the_script_imports_nothing_but_the_standard_library():
    scripts = ROOT / "scripts"
    files = [scripts / "make_fixture_b.py", *sorted((scripts / "fixture_b").glob("*.py"))]
    assert len(files) == 4
    lines = [line for file in files for line in file.read_text().splitlines()]
    imports = {line.split()[1] for line in lines if line.lstrip().startswith(("import ", "from "))}
    ours = {f"scripts.fixture_b.{file.stem}" for file in files[1:]}
    assert imports == {"json", "math", "random", "sys", "pathlib"} | ours


@pytest.mark.parametrize("name", EXPECTED["losses"])
def test_loss_and_every_gradient_equal_the_loops(name):
    expected, outcome = EXPECTED["losses"][name], evaluate(composition(name), BATCH)
    assert outcome.loss.item() == pytest.approx(expected["loss"], abs=TOLERANCE, rel=TOLERANCE)
    assert outcome.gradient.norm().item() == pytest.approx(expected["grad_l2"], abs=TOLERANCE, rel=TOLERANCE)
    close(outcome.gradient, expected["grad"], expected["grad_l2"])
    assert not outcome.gradient[~MASK].any()


def test_every_row_of_losses_differs_from_every_other():
    found = [(row["loss"], row["grad_l2"]) for row in EXPECTED["losses"].values()]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE


FLAGS = ["clipped", "dual_clipped", "sequence_ratio clipped", "sequence_token_ratio clipped"]
FLAGS += ["product_ratio clipped", "clipped_weight", "geometric_mean", "total_variation", "binary_kl"]


@pytest.mark.parametrize("first", FLAGS)
def test_every_bound_is_at_work_at_some_trained_tokens_and_not_at_others(first):
    name = next(name for name in EXPECTED["losses"] if name.startswith(f"{first}|"))
    fired = evaluate(composition(name), BATCH).fired
    assert len(fired) == (3 if first == "dual_clipped" else 2)
    for flag, values in fired.items():
        assert 0 < values[MASK].sum() < MASK.sum(), flag


def test_both_signs_of_the_advantage_and_none_occur_among_trained_tokens():
    trained = RAW["adv"][MASK]
    assert (trained > 0).any()
    assert (trained < 0).any()
    assert (trained == 0).any()
    assert (RAW["logp"] - RAW["old"])[MASK].abs().max() > 2.9


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_equal_the_loops_and_both_outcomes_occur(name):
    expected, found = EXPECTED["corrections"][name], correct(_with(name), BATCH)
    close(found.weights, expected["weights"])
    for flag in ("is_truncated", "is_rejected"):
        assert torch.equal(getattr(found, flag).float(), torch.tensor(expected[flag]))
    acts = found.is_truncated | found.is_rejected
    assert 0 < acts[MASK].sum() < MASK.sum()


def test_tokens_are_masked_on_both_sides():
    ratio = (RAW["old"] - RAW["roll"]).exp()[MASK]
    assert (ratio < H["masked_token_weights"]["low"]).any()
    assert (ratio > H["masked_token_weights"]["high"]).any()
    assert (ratio > H["reject_tokens"]["high"]).any()


ADVANTAGES = {
    "group_normalized": lambda r, i: advantages.group_normalized(r, **H["group_normalized"]),
    "group_centred": lambda r, i: advantages.group_normalized(r, normalise_std=False),
    "leave_one_out": lambda r, i: advantages.leave_one_out(r),
    "length_weighted": lambda r, i: advantages.length_weighted(r, MASK[i].sum(1)),
    "best_of_group": lambda r, i: advantages.best_of_group(r),
    "against_baseline": lambda r, i: advantages.against_baseline(r, RAW["baselines"][i]),
}


def _of_groups(name):
    return torch.cat([ADVANTAGES[name](RAW["scores"][group], group) for group in GROUPS])


@pytest.mark.parametrize("name", EXPECTED["advantages"])
def test_advantages_of_groups_equal_the_loops(name):
    found = _of_groups(name)
    close(found, EXPECTED["advantages"][name])
    if name != "against_baseline":
        assert not found[GROUPS[2]].any()  # equal rewards


def _rewards():
    at_the_end = torch.where(is_last_trained(MASK, INDEX), RAW["scores"][:, None], 0.0)
    return (at_the_end - H["kl"]["coefficient"] * kl.k1(RAW["logp"], RAW["ref"])) * MASK


def _whitened(values):
    return whiten(values, MASK, *whitening_sums(values, MASK), **H["whiten"])


def test_advantages_per_token_equal_the_loops():
    expected, rewards = EXPECTED["token advantages"], _rewards()
    close(rewards, expected["rewards"])
    found = returns.discounted_returns(rewards, **SEGMENTS, **H["discounted_returns"])
    close(found, expected["discounted_returns"])
    close(_whitened(found), expected["discounted_returns, whitened"])
    centred = _of_groups("group_centred")[:, None] * MASK
    close(_whitened(centred), expected["group_centred, whitened"])


def test_advantages_and_returns_of_a_critic_equal_the_loops():
    expected, rewards = EXPECTED["token advantages"], _rewards()
    found = returns.gae(rewards, RAW["values"], **SEGMENTS, **H["gae"])
    close(found.advantages, expected["gae"])
    close(found.returns, expected["gae returns"])
    close(_whitened(found.advantages), expected["gae, whitened"])
    lambdas = returns.length_adaptive_lambda(MASK, INDEX, **H["length_adaptive_lambda"])
    assert (lambdas == 0).any()
    assert (lambdas > 0.4).any()
    adaptive = returns.gae(rewards, RAW["values"], **SEGMENTS, gamma=H["gae"]["gamma"], lambda_policy=lambdas)
    close(adaptive.advantages, expected["gae, length-adaptive"])


def test_the_critic_s_loss_and_gradient_equal_the_loops_and_are_clipped_on_both_sides():
    expected = EXPECTED["value loss"]
    values = RAW["vpreds"].clone().requires_grad_()
    targets = torch.tensor(EXPECTED["token advantages"]["gae returns"])
    found = clipped_value_loss(values, RAW["values"], targets, **H["clipped_value_loss"])
    loss = found.loss[MASK].mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=TOLERANCE)
    close(values.grad, expected["grad"])
    clipped = found.is_clipped & MASK
    assert (clipped & (values > RAW["values"])).any()
    assert (clipped & (values < RAW["values"])).any()
    assert (~clipped & MASK & ((values - RAW["values"]).abs() > H["clipped_value_loss"]["clip"])).any()


@pytest.mark.parametrize("name", EXPECTED["kl"])
def test_kl_estimates_equal_the_loops(name):
    close(getattr(kl, name)(RAW["logp"], RAW["ref"]) * MASK, EXPECTED["kl"][name])


def test_logprobs_and_entropy_of_the_logits_equal_the_loops():
    vocabulary = RAW["logits"].shape[-1]
    logprobs, entropy = chunked_logprobs(
        RAW["logits"].view(-1, vocabulary),
        torch.eye(vocabulary),
        RAW["labels"].view(-1),
        chunk_tokens=50,
        with_entropy=True,
    )
    assert (logprobs.view(ROWS, LENGTH) - RAW["logp"]).abs().max() <= 5.1e-5  # rounded to four decimals
    close(entropy.view(ROWS, LENGTH) * MASK, EXPECTED["entropy"])


def test_the_soft_punishment_of_length_equals_the_loops():
    h = H["soft_overlong"]
    section = ShapingSection(
        overlong_buffer_tokens=h["overlong_buffer_tokens"], overlong_penalty=h["overlong_penalty"]
    )
    found = [
        shape_reward(0.0, num_tokens=length, section=section, max_tokens=h["max_tokens"])
        for length in MASK.sum(1).tolist()
    ]
    assert found == pytest.approx(EXPECTED["soft_overlong"], abs=TOLERANCE)
    assert min(found) < 0 < max(MASK.sum(1).tolist()) - h["overlong_buffer_tokens"]
    assert math.isclose(max(found), 0.0)
