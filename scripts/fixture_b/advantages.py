"""The advantages, returns, the critic's loss and the punishment of length of fixture B in plain loops."""

import math

from scripts.fixture_b.settings import H, matrix


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


def value_row(fixture, targets):
    """0.5 max((V - R)^2, (clip(V) - R)^2) of PPO's reference implementation, and its gradient in V."""
    clip = H["clipped_value_loss"]["clip"]
    loss, gradient = {}, {}
    for i, t in targets:
        value, old, target = fixture["vpreds"][i][t], fixture["values"][i][t], targets[i, t]
        near = min(max(value, old - clip), old + clip)
        plain, bounded = (value - target) ** 2, (near - target) ** 2
        loss[i, t] = 0.5 * max(plain, bounded)
        gradient[i, t] = (0.0 if bounded > plain else value - target) / len(targets)
    return {"loss": math.fsum(loss.values()) / len(loss), "grad": matrix(gradient)}


def overlong_row(lengths):
    """Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13; no completion here exceeds the maximum."""
    h = H["soft_overlong"]
    free = h["max_tokens"] - h["overlong_buffer_tokens"]
    return [
        0.0 if length <= free else h["overlong_penalty"] * (free - length) / h["overlong_buffer_tokens"]
        for length in lengths
    ]
