"""The names of the losses on preferences: literal dicts, so that reading them imports no torch."""

from __future__ import annotations

PREFERENCE_LOSSES = {
    "dpo": "titan_rl.algorithms.preference_losses:Dpo",
    "cdpo": "titan_rl.algorithms.preference_losses:ConservativeDpo",
    "length_normalised_dpo": "titan_rl.algorithms.preference_losses:LengthNormalisedDpo",
    "ipo": "titan_rl.algorithms.preference_losses:Ipo",
    "simpo": "titan_rl.algorithms.preference_losses:SimPO",
    "orpo": "titan_rl.algorithms.preference_losses:Orpo",
    "kto": "titan_rl.algorithms.preference_losses:Kto",
}
"""``loss.type`` of ``trainer = "preference"`` -> the class, built as ``cls(config)``."""

REWARD_MODEL_LOSSES = {
    "bradley_terry": "titan_rl.algorithms.reward_model_losses:BradleyTerry",
}
"""``loss.type`` of ``trainer = "reward_model"`` -> the class, built as ``cls(config)``."""
