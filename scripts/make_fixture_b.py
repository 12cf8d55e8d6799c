"""Write tests/numerics/data/fixture_b.json: a small batch on which every branch of every loss is taken.

The expected values come from plain loops over Python floats, written from the papers that are cited at each
function, with gradients by central differences. Nothing of ``titan_rl`` and nothing of torch is imported: the
tests compare the product with this file.

    python scripts/make_fixture_b.py
"""

import json
import math
import random
from pathlib import Path

TARGET = Path(__file__).parents[1] / "tests" / "numerics" / "data" / "fixture_b.json"
GROUP_SIZES = (4, 8, 4)  # the last group is degenerate: equal rewards
VOCABULARY, LENGTH = 11, 9

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
HYPERPARAMETERS = {
    "clipped_surrogate": CLIP,
    "dual_clipped_surrogate": {**CLIP, "clip_dual": 3.0},
    "clipped_weight_surrogate": CLIP,
    "soft_gated_surrogate": {"tau_positive": 1.0, "tau_negative": 1.05},
    "geometric_mean_surrogate": {"clip_low": 0.4, "clip_high": 0.4},
    "gamma_weighted_surrogate": {
        "k_positive": 2.0,
        "lambda_positive": 3.0,
        "k_negative": 3.0,
        "lambda_negative": 2.0,
    },
    "total_variation_masked": {"max_decrease": 0.15, "max_increase": 0.2, "max_weight": 5.0},
    "binary_kl_masked": {"max_kl_decrease": 0.1, "max_kl_increase": 0.15, "max_weight": 5.0},
    "quadratic_surrogate": {"beta": 0.5},
    "sample_mean_over_constant": {"max_tokens": 8},
    "truncated_token_weights": {"cap": 2.0},
    "truncated_sample_weights": {"cap": 2.0},
    "masked_token_weights": {"low": 0.5, "high": 5.0},
    "reject_tokens": {"low": 0.5, "high": 2.0},
    "reject_samples_by_geometric_mean": {"low": 0.99, "high": 1.01},
    "reject_samples_by_mean_k3": {"max_kl": 0.05},
    "reject_negative_samples_by_mean_k1": {"max_kl": 0.1},
    "kl": {"coefficient": 0.05},
    "group_normalized": {"eps": 1e-6},
    "discounted_returns": {"gamma": 0.9},
    "gae": {"gamma": 0.97, "lambda_policy": 0.9, "lambda_critic": 1.0},
    "length_adaptive_lambda": {"alpha": 0.4},
    "whiten": {"eps": 1e-8},
    "clipped_value_loss": {"clip": 0.2},
    "soft_overlong": {"max_tokens": 6, "overlong_buffer_tokens": 3, "overlong_penalty": 1.0},
}
H = HYPERPARAMETERS


# ------------------------------------------------------------------------------------------------ the batch
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


# ------------------------------------------------------------------------------------------------ the losses
class Losses:
    """Values per token of every loss. ``p`` is differentiated, ``q`` (the same numbers) is not.

    Every method returns ``{(i, t): value}`` over the trained tokens.
    """

    def __init__(self, fixture):
        self.fixture = fixture
        self.old, self.roll, self.ref = fixture["old"], fixture["roll"], fixture["ref"]
        self.adv = fixture["adv"]
        self.tokens = {
            i: [t for t in range(LENGTH) if row[t]] for i, row in enumerate(fixture["mask"])
        }  # trained tokens of each sample

    def each(self, function):
        """Apply a function of (i, t) to every trained token."""
        return {(i, t): function(i, t) for i, ts in self.tokens.items() for t in ts}

    def mean_over(self, i, function):
        """Mean of a function of t over the trained tokens of a sample."""
        return math.fsum(function(t) for t in self.tokens[i]) / len(self.tokens[i])

    def token_ratio(self, p, i, t):
        """Schulman et al. 2017 (arXiv 1707.06347), section 3."""
        return math.exp(p[i][t] - self.old[i][t])

    def sequence_ratio(self, p, i):
        """Zheng et al. 2025 (arXiv 2507.18071), eq. 7."""
        return math.exp(self.mean_over(i, lambda t: p[i][t] - self.old[i][t]))

    def product_ratio(self, p, i):
        """The importance weight of a whole sample."""
        return math.exp(math.fsum(p[i][t] - self.old[i][t] for t in self.tokens[i]))

    def _clip(self, ratio, a):
        """Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with the two bounds of DAPO (arXiv 2503.14476)."""
        bounded = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
        return -min(ratio * a, bounded * a)

    def clipped(self, p, q):
        """The clip of PPO per token."""
        return self.each(lambda i, t: self._clip(self.token_ratio(p, i, t), self.adv[i][t]))

    def sequence_clipped(self, p, q):
        """Zheng et al. 2025 (arXiv 2507.18071): the clip of that ratio."""
        return self.each(lambda i, t: self._clip(self.sequence_ratio(p, i), self.adv[i][t]))

    def sequence_token_clipped(self, p, q):
        """Zheng et al. 2025, GSPO-token: the value of the sequence's ratio, the token's own gradient."""
        return self.each(
            lambda i, t: self._clip(self.sequence_ratio(q, i) * math.exp(p[i][t] - q[i][t]), self.adv[i][t])
        )

    def product_clipped(self, p, q):
        """The same without the length normalisation."""
        return self.each(lambda i, t: self._clip(self.product_ratio(p, i), self.adv[i][t]))

    def dual_clipped(self, p, q):
        """Ye et al. 2020 (arXiv 1912.09729): where A < 0, max(min(r A, clip(r) A), c A), negated."""
        c = H["dual_clipped_surrogate"]["clip_dual"]

        def one(i, t):
            a, loss = self.adv[i][t], self._clip(self.token_ratio(p, i, t), self.adv[i][t])
            return min(loss, -c * a) if a < 0 else loss

        return self.each(one)

    def reinforce(self, p, q):
        """Williams 1992: the score-function estimator."""
        return self.each(lambda i, t: -self.adv[i][t] * p[i][t])

    def clipped_weight(self, p, q):
        """MiniMax 2025 (arXiv 2506.13585), eq. 4 and 5."""

        def one(i, t):
            weight = min(max(self.token_ratio(q, i, t), 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
            return -weight * self.adv[i][t] * p[i][t]

        return self.each(one)

    def weight_clipped_above(self, p, q):
        """The same without a lower bound, which is how MiniMax use it."""
        return self.each(
            lambda i, t: -min(self.token_ratio(q, i, t), 1 + CLIP["clip_high"]) * self.adv[i][t] * p[i][t]
        )

    def soft_gated(self, p, q):
        """Gao et al. 2025 (arXiv 2511.20347)."""
        h = H["soft_gated_surrogate"]

        def one(i, t):
            a = self.adv[i][t]
            tau = h["tau_positive"] if a > 0 else h["tau_negative"]
            sigmoid = 1 / (1 + math.exp(-tau * (self.token_ratio(p, i, t) - 1)))
            return -4 / tau * sigmoid * a

        return self.each(one)

    def geometric_mean(self, p, q):
        """Zhao et al. 2025 (arXiv 2507.20673): a one-sided clip per token, then the geometric mean."""
        h = H["geometric_mean_surrogate"]

        def one(i, u):
            log_ratio, a = p[i][u] - self.old[i][u], self.adv[i][u]
            if a > 0:
                return min(log_ratio, h["clip_high"])
            return max(log_ratio, -h["clip_low"]) if a < 0 else log_ratio

        return self.each(lambda i, t: -self.adv[i][t] * math.exp(self.mean_over(i, lambda u: one(i, u))))

    def gamma_weighted(self, p, q):
        """Shen et al. 2026 (arXiv 2602.10693): W^k e^(lambda (1 - W)) of the product of all ratios."""
        h = H["gamma_weighted_surrogate"]

        def one(i, t):
            sign = "positive" if self.adv[i][t] >= 0 else "negative"
            k, decay = h[f"k_{sign}"], h[f"lambda_{sign}"]
            weight = min(max(self.product_ratio(q, i), 1e-8), math.exp(20))
            return -(weight**k * math.exp(decay * (1 - weight))) * self.adv[i][t] * p[i][t]

        return self.each(one)

    def total_variation(self, p, q):
        """Qi et al. 2026 (arXiv 2602.04879), total variation of the two outcomes."""
        h = H["total_variation_masked"]

        def one(i, t):
            a, moved = self.adv[i][t], math.exp(q[i][t]) - math.exp(self.old[i][t])
            keep = moved <= h["max_increase"] if a > 0 else moved >= -h["max_decrease"]
            return -min(self.token_ratio(q, i, t), h["max_weight"]) * a * p[i][t] if keep else 0.0

        return self.each(one)

    def binary_kl(self, p, q):
        """Qi et al. 2026 (arXiv 2602.04879), KL of the two outcomes."""
        h = H["binary_kl_masked"]

        def one(i, t):
            a, now, before = self.adv[i][t], math.exp(q[i][t]), math.exp(self.old[i][t])
            kl = before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))
            if a > 0:
                keep = kl <= h["max_kl_increase"] or now <= before
            else:
                keep = kl <= h["max_kl_decrease"] or now >= before
            return -min(self.token_ratio(q, i, t), h["max_weight"]) * a * p[i][t] if keep else 0.0

        return self.each(one)

    def quadratic(self, p, q):
        """Richemond et al. 2024 (arXiv 2405.19107), per token."""
        beta = H["quadratic_surrogate"]["beta"]
        return self.each(
            lambda i, t: -self.adv[i][t] * p[i][t] + 0.5 * beta * (p[i][t] - self.old[i][t]) ** 2
        )

    def kl(self, p, name):
        """Schulman 2020: k1, k2 and k3 of KL(policy || reference), and the absolute difference."""

        def one(i, t):
            r = self.ref[i][t] - p[i][t]
            return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r, "absolute": abs(r)}[name]

        return self.each(one)

    # -------------------------------------------------------------------------------------- corrections
    def correction(self, name):
        """Weights, and which tokens are truncated and rejected, of old policy against generator."""
        h = H[name]
        gap = {key: self.old[key[0]][key[1]] - self.roll[key[0]][key[1]] for key in self.each(max)}

        def over(i, function):
            return self.mean_over(i, lambda t: function(gap[i, t]))

        def one(i, t):
            ratio = math.exp(gap[i, t])
            if name == "truncated_token_weights":
                return min(ratio, h["cap"]), ratio > h["cap"], False
            if name == "truncated_sample_weights":
                product = math.exp(math.fsum(gap[i, u] for u in self.tokens[i]))
                return min(product, h["cap"]), product > h["cap"], False
            if name == "masked_token_weights":
                inside = h["low"] <= ratio <= h["high"]
                return (ratio if inside else 0.0), False, not inside
            if name == "reject_tokens":
                inside = h["low"] <= ratio <= h["high"]
            elif name == "reject_samples_by_geometric_mean":
                inside = h["low"] <= math.exp(over(i, lambda x: x)) <= h["high"]
            elif name == "reject_samples_by_mean_k3":
                inside = over(i, lambda x: math.exp(x) - 1 - x) <= h["max_kl"]
            else:  # DeepSeek-AI 2025 (arXiv 2512.02556), eq. 9, of the policy against the old policy
                drift = self.mean_over(i, lambda u: self.old[i][u] - self.fixture["logp"][i][u])
                inside = not (self.adv[i][t] < 0 and drift > h["max_kl"])
            return float(inside), False, not inside

        return self.each(one)

    # ------------------------------------------------------------------------------------- aggregations
    def aggregate(self, values, name):
        """One number of the values per token; the file is the whole step."""
        size = len(self.tokens)
        if name == "token_mean":
            return math.fsum(values.values()) / len(values)
        if name == "sample_mean_of_token_means":
            means = (math.fsum(values[i, t] for t in ts) / len(ts) for i, ts in self.tokens.items())
            return math.fsum(means) / size
        total = math.fsum(values.values()) / size
        return total / H["sample_mean_over_constant"]["max_tokens"] if name.endswith("constant") else total


LOSSES = {
    "clipped|token_mean": ("clipped", "token_mean"),
    "clipped|sample_mean_of_token_means": ("clipped", "sample_mean_of_token_means"),
    "clipped|sample_mean_of_token_sums": ("clipped", "sample_mean_of_token_sums"),
    "clipped|sample_mean_over_constant": ("clipped", "sample_mean_over_constant"),
    "dual_clipped|token_mean": ("dual_clipped", "token_mean"),
    "dual_clipped|sample_mean_of_token_means": ("dual_clipped", "sample_mean_of_token_means"),
    "sequence_ratio clipped|sample_mean_of_token_means": ("sequence_clipped", "sample_mean_of_token_means"),
    "sequence_ratio clipped|sample_mean_of_token_sums": ("sequence_clipped", "sample_mean_of_token_sums"),
    "sequence_token_ratio clipped|token_mean": ("sequence_token_clipped", "token_mean"),
    "product_ratio clipped|token_mean": ("product_clipped", "token_mean"),
    "reinforce|token_mean": ("reinforce", "token_mean"),
    "clipped_weight|token_mean": ("clipped_weight", "token_mean"),
    "clipped_weight above|token_mean": ("weight_clipped_above", "token_mean"),
    "soft_gated|sample_mean_of_token_means": ("soft_gated", "sample_mean_of_token_means"),
    "geometric_mean|sample_mean_of_token_means": ("geometric_mean", "sample_mean_of_token_means"),
    "geometric_mean|token_mean": ("geometric_mean", "token_mean"),
    "gamma_weighted|token_mean": ("gamma_weighted", "token_mean"),
    "total_variation|token_mean": ("total_variation", "token_mean"),
    "binary_kl|token_mean": ("binary_kl", "token_mean"),
    "quadratic|token_mean": ("quadratic", "token_mean"),
}
CORRECTIONS = [name for name in H if name.startswith(("truncated_", "masked_", "reject_"))]


def loss_rows(fixture):
    """Loss and gradient of every composition."""
    losses = Losses(fixture)
    rows = {}

    def add(name, function):
        rows[name] = {"loss": function(fixture["logp"], fixture["logp"]), **_gradient(function, losses)}

    for name, (method, aggregation) in LOSSES.items():
        values = getattr(losses, method)
        add(name, lambda p, q, v=values, a=aggregation: losses.aggregate(v(p, q), a))
    for name in CORRECTIONS:
        weights = losses.correction(name)

        def corrected(p, q, weights=weights):
            values = losses.clipped(p, q)
            return losses.aggregate({key: weights[key][0] * values[key] for key in values}, "token_mean")

        add(f"clipped|{name}|token_mean", corrected)
    for name in ("k2", "k3"):

        def penalised(p, q, name=name):
            penalty = losses.aggregate(losses.kl(p, name), "token_mean")
            return losses.aggregate(losses.clipped(p, q), "token_mean") + H["kl"]["coefficient"] * penalty

        add(f"clipped|token_mean|{name}", penalised)
    return rows


def _gradient(function, losses, step=1e-5):
    """Central differences of ``function(p, q)`` in ``p``; they are exact to about 1e-10 here."""
    frozen = losses.fixture["logp"]
    moved = [list(row) for row in frozen]
    gradient = [[0.0] * LENGTH for _ in frozen]
    for i, ts in losses.tokens.items():
        for t in ts:
            ends = []
            for sign in (1, -1):
                moved[i][t] = frozen[i][t] + sign * step
                ends.append(function(moved, frozen))
            moved[i][t] = frozen[i][t]
            gradient[i][t] = (ends[0] - ends[1]) / (2 * step)
    return {"grad_l2": math.sqrt(math.fsum(g * g for row in gradient for g in row)), "grad": gradient}


# -------------------------------------------------------------------------------------------- the advantages
def _groups(uid):
    return [[i for i, name in enumerate(uid) if name == group] for group in dict.fromkeys(uid)]


def group_normalized(scores, uid, *, with_deviation):
    """Shao et al. 2024 (arXiv 2402.03300), Bessel-corrected; Liu et al. 2025 (arXiv 2503.20783) without."""
    found = [0.0] * len(scores)
    for group in _groups(uid):
        mean = math.fsum(scores[i] for i in group) / len(group)
        deviation = math.sqrt(math.fsum((scores[i] - mean) ** 2 for i in group) / (len(group) - 1))
        for i in group:
            equal = len({scores[j] for j in group}) == 1
            centred = 0.0 if equal else scores[i] - mean
            found[i] = centred / (deviation + H["group_normalized"]["eps"]) if with_deviation else centred
    return found


def advantage_rows(fixture, losses):
    """One advantage per rollout."""
    scores, uid = fixture["scores"], fixture["uid"]
    lengths = [len(losses.tokens[i]) for i in range(len(scores))]
    rows = {
        "group_normalized": group_normalized(scores, uid, with_deviation=True),
        "group_centred": group_normalized(scores, uid, with_deviation=False),
        "against_baseline": [r - b for r, b in zip(scores, fixture["baselines"], strict=True)],
    }
    for name in ("leave_one_out", "length_weighted", "best_of_group"):
        rows[name] = [0.0] * len(scores)
    for group in _groups(uid):
        for i in group:
            others = [scores[j] for j in group if j != i]
            # Ahmadian et al. 2024 (arXiv 2402.14740)
            rows["leave_one_out"][i] = scores[i] - math.fsum(others) / len(others)
            # Hao et al. 2025 (arXiv 2505.23585)
            weighted = math.fsum(lengths[j] * scores[j] for j in group)
            rows["length_weighted"][i] = scores[i] - weighted / sum(lengths[j] for j in group)
            # Tang et al. 2025 (arXiv 2503.19595): what the maximum loses without this rollout
            rows["best_of_group"][i] = max(scores[j] for j in group) - max(others)
    return rows


def whitened(values):
    """Mean 0 and variance 1 over all trained tokens; Bessel-corrected, eps inside the root."""
    mean = math.fsum(values.values()) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values.values()) / (len(values) - 1)
    return {key: (x - mean) / math.sqrt(variance + H["whiten"]["eps"]) for key, x in values.items()}


def token_rows(fixture, losses):
    """Advantages and returns per token."""
    scores = fixture["scores"]
    last = {i: ts[-1] for i, ts in losses.tokens.items()}
    # KL in the reward: minus k1 at every token, the reward at the last.
    k1 = losses.kl(fixture["logp"], "k1")
    coefficient = H["kl"]["coefficient"]
    rewards = {(i, t): (scores[i] if t == last[i] else 0.0) - coefficient * k1[i, t] for i, t in k1}
    returns, gamma = {}, H["discounted_returns"]["gamma"]
    for i, ts in losses.tokens.items():
        running = 0.0
        for t in reversed(ts):  # Hu et al. 2025 (arXiv 2501.03262): discounted returns, then whitened
            running = rewards[i, t] + gamma * running
            returns[i, t] = running
    centred = group_normalized(scores, fixture["uid"], with_deviation=False)
    h, alpha = H["gae"], H["length_adaptive_lambda"]["alpha"]
    rows = {
        "rewards": rewards,
        "discounted_returns": returns,
        "discounted_returns, whitened": whitened(returns),
        "group_centred, whitened": whitened(losses.each(lambda i, t: centred[i])),
    }
    # Yuan et al. 2025 (arXiv 2503.01491): one lambda for the policy, another for the critic's targets
    policy = _gae(fixture, losses, rewards, lambda i: h["lambda_policy"])
    critic = _gae(fixture, losses, rewards, lambda i: h["lambda_critic"])
    # Yue et al. 2025 (arXiv 2504.05118), section 4.2
    adaptive = _gae(fixture, losses, rewards, lambda i: max(1 - 1 / (alpha * len(losses.tokens[i])), 0.0))
    rows["gae"], rows["gae, whitened"], rows["gae, length-adaptive"] = policy, whitened(policy), adaptive
    rows["gae returns"] = {(i, t): fixture["values"][i][t] + a for (i, t), a in critic.items()}
    return rows


def _gae(fixture, losses, rewards, decay):
    """Schulman et al. 2016 (arXiv 1506.02438), eq. 11 and 16; the state after the last token is worth 0."""
    gamma, found = H["gae"]["gamma"], {}
    for i, ts in losses.tokens.items():
        advantage, next_value = 0.0, 0.0
        for t in reversed(ts):
            value = fixture["values"][i][t]
            delta = rewards[i, t] + gamma * next_value - value
            advantage = delta + gamma * decay(i) * advantage
            next_value = value
            found[i, t] = advantage
    return found


def value_row(fixture, losses, targets):
    """0.5 max((V - R)^2, (clip(V) - R)^2) of PPO's reference implementation, and its gradient in V."""
    clip = H["clipped_value_loss"]["clip"]
    loss, gradient = {}, {}
    for i, t in targets:
        value, old, target = fixture["vpreds"][i][t], fixture["values"][i][t], targets[i, t]
        near = min(max(value, old - clip), old + clip)
        plain, bounded = (value - target) ** 2, (near - target) ** 2
        loss[i, t] = 0.5 * max(plain, bounded)
        gradient[i, t] = (0.0 if bounded > plain else value - target) / len(targets)
    return {"loss": math.fsum(loss.values()) / len(loss), "grad": _matrix(gradient)}


def overlong_row(lengths):
    """Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13; no completion here exceeds the maximum."""
    h = H["soft_overlong"]
    free = h["max_tokens"] - h["overlong_buffer_tokens"]
    return [
        0.0 if length <= free else h["overlong_penalty"] * (free - length) / h["overlong_buffer_tokens"]
        for length in lengths
    ]


def _matrix(values):
    rows = max(i for i, _ in values) + 1
    return [[values.get((i, t), 0.0) for t in range(LENGTH)] for i in range(rows)]


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
        "token advantages": {name: _matrix(values) for name, values in tokens.items()},
        "corrections": {
            name: {
                part: _matrix({key: float(found[index]) for key, found in losses.correction(name).items()})
                for index, part in enumerate(("weights", "is_truncated", "is_rejected"))
            }
            for name in CORRECTIONS
        },
        "kl": {name: _matrix(losses.kl(fixture["logp"], name)) for name in ("k1", "k2", "k3", "absolute")},
        "value loss": value_row(fixture, losses, tokens["gae returns"]),
        "entropy": _matrix(entropy),
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
