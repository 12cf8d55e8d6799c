"""Write tests/numerics/data/fixture_b.json: a small batch on which every branch of every loss is taken.

The expected values come from plain loops over Python floats, in fixture_b/ beside this file, written from the
papers that are cited at each function, with gradients by central differences. Nothing of ``titan_rl`` and
nothing of torch is imported: the tests compare the product with this file.

    python scripts/make_fixture_b.py
"""

import json
import math
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.fixture_b.advantages import (  # noqa: E402
    advantage_rows,
    group_normalized,
    overlong_row,
    token_rows,
    value_row,
)
from scripts.fixture_b.losses import CORRECTIONS, Losses, loss_rows  # noqa: E402
from scripts.fixture_b.settings import GROUP_SIZES, HYPERPARAMETERS, LENGTH, VOCABULARY, matrix  # noqa: E402

TARGET = ROOT / "tests" / "numerics" / "data" / "fixture_b.json"


def make_fixture():
    """Numbers with at most four decimals, the same on every machine."""
    draw = random.Random(2)
    size = sum(GROUP_SIZES)
    logits, labels, mask, logp, old, roll, ref, values, vpreds = ([] for _ in range(9))
    for i in range(size):
        trained = 1 if i == 5 else draw.randint(2, 6)
        start = draw.randint(0, LENGTH - trained - 1)
        row_mask = [float(start <= t < start + trained) for t in range(LENGTH)]
        if trained >= 4:
            row_mask[start + 2] = 0.0  # between two turns
        row_logits = [[round(draw.gauss(0, 2.0), 3) for _ in range(VOCABULARY)] for _ in range(LENGTH)]
        row_labels = [_likely(draw, z) for z in row_logits]
        row_logp = [round(_log_softmax(z)[label], 4) for z, label in zip(row_logits, row_labels, strict=True)]
        row_old = [_apart(draw, p, 3.0) for p in row_logp]
        # Every third generator is nearly the old policy, the others are up to 2.5 nats away at some tokens.
        near = i % 3 == 0
        row_roll = [_apart(draw, p, 0.004 if near else draw.choice((0.1, 2.5))) for p in row_old]
        row_ref = [_apart(draw, p, 0.5) for p in row_logp]
        row_values = [round(draw.gauss(0.3, 0.5), 3) for _ in range(LENGTH)]
        row_vpreds = [round(v + draw.uniform(-0.6, 0.6), 3) for v in row_values]
        for column, row in zip(
            (logits, labels, mask, logp, old, roll, ref, values, vpreds),
            (row_logits, row_labels, row_mask, row_logp, row_old, row_roll, row_ref, row_values, row_vpreds),
            strict=True,
        ):
            column.append(row)
    uid = [name for name, count in zip("abc", GROUP_SIZES, strict=True) for _ in range(count)]
    scores = [1.0, 0.0, 0.25, 0.0, *(round(draw.choice((0, 0.1, 0.5, 1)) + i / 100, 2) for i in range(8))]
    scores += [0.7] * GROUP_SIZES[2]
    baselines = [{"a": 0.5, "b": 0.1, "c": 0.7}[name] for name in uid]
    centred = group_normalized(scores, uid, with_deviation=True)
    adv = [[round(centred[i], 2) * m for m in mask[i]] for i in range(size)]
    return {
        "logits": logits, "labels": labels, "mask": mask, "logp": logp, "old": old, "roll": roll, "ref": ref,
        "scores": scores, "baselines": baselines, "values": values, "vpreds": vpreds, "adv": adv, "uid": uid,
    }  # fmt: skip


def _likely(draw, logits):
    """The most likely word or any word, so that probabilities near 1 and near 0 both occur."""
    best = max(range(VOCABULARY), key=lambda v: logits[v])
    return best if draw.random() < 0.6 else draw.randrange(VOCABULARY)


def _log_softmax(logits):
    largest = max(logits)
    normaliser = largest + math.log(math.fsum(math.exp(z - largest) for z in logits))
    return [z - normaliser for z in logits]


def _apart(draw, logprob, distance):
    """Another log-probability at most ``distance`` away, and below 0."""
    difference = draw.uniform(-distance, distance)
    if logprob + difference > -0.01:
        difference = -abs(difference)
    return round(logprob + difference, 4)


def _rounded(node):
    if isinstance(node, float):
        return round(node, 9) + 0.0  # no negative zero
    if isinstance(node, dict):
        return {key: _rounded(value) for key, value in node.items()}
    return [_rounded(value) for value in node] if isinstance(node, list) else node


def main():
    """Write the file."""
    fixture = make_fixture()
    losses = Losses(fixture)
    tokens = token_rows(fixture, losses)
    log_softmax = [[_log_softmax(z) for z in row] for row in fixture["logits"]]
    entropy = losses.each(lambda i, t: -math.fsum(math.exp(x) * x for x in log_softmax[i][t]))
    rows = {
        "losses": loss_rows(fixture),
        "advantages": advantage_rows(fixture, losses),
        "token advantages": {name: matrix(values) for name, values in tokens.items()},
        "corrections": {
            name: {
                part: matrix({key: float(found[index]) for key, found in losses.correction(name).items()})
                for index, part in enumerate(("weights", "is_truncated", "is_rejected"))
            }
            for name in CORRECTIONS
        },
        "kl": {name: matrix(losses.kl(fixture["logp"], name)) for name in ("k1", "k2", "k3", "absolute")},
        "value loss": value_row(fixture, tokens["gae returns"]),
        "entropy": matrix(entropy),
        "soft_overlong": overlong_row([len(losses.tokens[i]) for i in losses.tokens]),
    }
    about = (
        "Written by scripts/make_fixture_b.py. 16 rollouts in groups of 4, 8 and 4 (the last with equal "
        "rewards), at most 9 tokens, 11 words, log-ratios up to 3 nats. Expected values from float64 loops "
        "written from the papers; grad is d loss / d logp and grad_l2 its norm. Names as in fixture_a.json: "
        "old, roll and ref are the log-probabilities of the old policy, the generator and the reference."
    )
    data = {
        "about": about,
        "hyperparameters": HYPERPARAMETERS,
        "fixture": fixture,
        "expected": _rounded(rows),
    }
    TARGET.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
