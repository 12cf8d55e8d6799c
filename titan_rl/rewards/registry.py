"""The names of the built-in rewards. A user's own reward needs no entry here: ``package.module:Class``."""

REWARDS = {
    "exact_match": "titan_rl.rewards.exact_match:ExactMatch",
    "reasoning_gym": "titan_rl.rewards.reasoning_gym_score:ReasoningGymScore",
    "numeric": "titan_rl.rewards.numeric:Numeric",
    "math_verify": "titan_rl.rewards.math_verify:MathVerify",
    "format": "titan_rl.rewards.format:Format",
    "length": "titan_rl.rewards.length:Length",
}
"""``[[reward]] type`` -> the class that computes it."""
