"""The losses, corrections and aggregations of fixture B in plain loops, with gradients by differences."""

import math

from scripts.fixture_b.settings import CLIP, LENGTH, H


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
