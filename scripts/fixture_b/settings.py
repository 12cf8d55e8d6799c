"""Sizes and hyperparameters of fixture B, and a table of its rollouts and tokens."""

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


def matrix(values):
    """``[B, T]`` of a dict by (i, t); 0 where nothing is trained."""
    rows = max(i for i, _ in values) + 1
    return [[values.get((i, t), 0.0) for t in range(LENGTH)] for i in range(rows)]
