"""The names of every part that an algorithm can be composed of, and of every named algorithm.

Literal dicts ``name -> "package.module:Class"`` and nothing else, so that reading them imports no torch.
"""

from __future__ import annotations

ALGORITHMS = {
    "grpo": "titan_rl.algorithms.grpo:preset",
}

ADVANTAGES = {
    "group_normalized": "titan_rl.algorithms.advantages:GroupNormalized",
}

RATIOS = {
    "token": "titan_rl.algorithms.ratios:TokenRatio",
}

SURROGATES = {
    "clipped": "titan_rl.algorithms.surrogates:Clipped",
}

CORRECTIONS = {
    "none": "titan_rl.algorithms.corrections:NoCorrection",
}

AGGREGATIONS = {
    "token_mean": "titan_rl.algorithms.aggregations:TokenMean",
}

KLS = {
    "reference": "titan_rl.algorithms.penalties:KLPenalty",
}
