"""The names of every part that an algorithm can be composed of, and of every named algorithm.

Literal dicts ``name -> "package.module:Class"`` and nothing else, so that reading them imports no torch.
"""

from __future__ import annotations

ALGORITHMS = {
    "grpo": "titan_rl.algorithms.grpo:preset",
    "dr_grpo": "titan_rl.algorithms.dr_grpo:preset",
    "dapo": "titan_rl.algorithms.dapo:preset",
    "rloo": "titan_rl.algorithms.rloo:preset",
    "reinforce_pp": "titan_rl.algorithms.reinforce_pp:preset",
    "reinforce_pp_baseline": "titan_rl.algorithms.reinforce_pp:baseline_preset",
    "remax": "titan_rl.algorithms.remax:preset",
    "gspo": "titan_rl.algorithms.gspo:preset",
    "cispo": "titan_rl.algorithms.cispo:preset",
    "sapo": "titan_rl.algorithms.sapo:preset",
    "gmpo": "titan_rl.algorithms.gmpo:preset",
    "ppo": "titan_rl.algorithms.ppo:preset",
    "dual_clip_ppo": "titan_rl.algorithms.ppo:dual_clip_preset",
    "on_policy_distillation": "titan_rl.algorithms.on_policy_distillation:preset",
}

DEFAULT_ALGORITHM = "grpo"
"""What a run does that names none."""

ADVANTAGES = {
    "group_normalized": "titan_rl.algorithms.advantages:GroupNormalized",
    "leave_one_out": "titan_rl.algorithms.advantages:LeaveOneOut",
    "length_weighted": "titan_rl.algorithms.advantages:LengthWeighted",
    "greedy_baseline": "titan_rl.algorithms.advantages:GreedyBaseline",
    "returns": "titan_rl.algorithms.advantages:Returns",
    "gae": "titan_rl.algorithms.advantages:GAE",
    "none": "titan_rl.algorithms.advantages:NoAdvantage",
}

LOSSES = {
    "composed": "titan_rl.algorithms.policy_loss:PolicyLoss",
}

RATIOS = {
    "token": "titan_rl.algorithms.ratios:TokenRatio",
    "sequence": "titan_rl.algorithms.ratios:SequenceRatio",
}

SURROGATES = {
    "clipped": "titan_rl.algorithms.surrogates:Clipped",
    "reinforce": "titan_rl.algorithms.surrogates:Reinforce",
    "clipped_weight": "titan_rl.algorithms.surrogates:ClippedWeight",
    "soft_gated": "titan_rl.algorithms.surrogates:SoftGated",
    "geometric_mean": "titan_rl.algorithms.surrogates:GeometricMean",
    "total_variation": "titan_rl.algorithms.surrogates:TotalVariation",
}

CORRECTIONS = {
    "none": "titan_rl.algorithms.corrections:NoCorrection",
    "truncated_tokens": "titan_rl.algorithms.corrections:TruncatedTokens",
    "truncated_samples": "titan_rl.algorithms.corrections:TruncatedSamples",
    "masked_tokens": "titan_rl.algorithms.corrections:MaskedTokens",
    "reject_tokens": "titan_rl.algorithms.corrections:RejectTokens",
    "reject_samples_by_geometric_mean": "titan_rl.algorithms.corrections:RejectSamplesByGeometricMean",
    "reject_samples_by_mean_k3": "titan_rl.algorithms.corrections:RejectSamplesByMeanK3",
    "reject_negative_samples": "titan_rl.algorithms.corrections:RejectNegativeSamples",
}

AGGREGATIONS = {
    "token_mean": "titan_rl.algorithms.aggregations:TokenMean",
    "sample_mean_of_token_means": "titan_rl.algorithms.aggregations:SampleMeanOfTokenMeans",
    "sample_mean_of_token_sums": "titan_rl.algorithms.aggregations:SampleMeanOfTokenSums",
    "sample_mean_over_constant": "titan_rl.algorithms.aggregations:SampleMeanOverConstant",
}

KLS = {
    "reference": "titan_rl.algorithms.penalties:KLPenalty",
}
