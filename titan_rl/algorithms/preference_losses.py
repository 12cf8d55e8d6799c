"""The losses of ``trainer = "preference"``: DPO and its variants, each a small class around one formula.

A loss says what it needs (``needs``); the trainer knows no loss by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt

from titan_rl.algorithms.interfaces import LossOutput
from titan_rl.algorithms.preference_interfaces import (
    CompletionScores,
    PreferenceInputs,
    PreferenceNeeds,
    logprob_metrics,
    over,
    pair_metrics,
)
from titan_rl.functional.preference import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    log_ratio,
    orpo_loss,
    per_token,
    simpo_loss,
)


class Dpo:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength, label noise and length normalisation."""

        beta: Annotated[float, Gt(0)] = 0.1
        """Strength of the tie to the reference, in units of reward per nat: the smaller, the further the
        policy may go."""

        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
        """Probability that a label is wrong; above 0 it is conservative DPO (Mitchell 2023)."""

        length_normalised: bool = False
        """Divide each log-ratio by the completion's length (Lambert et al. 2024, Tulu 3, arXiv 2411.15124,
        eq. 6); beta is then per nat a token, and larger values are usual."""

    needs = PreferenceNeeds(reference=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's pairs; the rewards are ``beta`` times the log-ratios."""
        config = self.config
        chosen, rejected = _log_ratios(inputs, length_normalised=config.length_normalised)
        loss = dpo_loss(chosen, rejected, beta=config.beta, label_smoothing=config.label_smoothing)
        return _pair_output(loss, config.beta * chosen, config.beta * rejected, inputs)


class ConservativeDpo(Dpo):
    """DPO that expects a tenth of the labels to be wrong (Mitchell 2023, "cDPO")."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dpo.Config):
        """DPO's options with labels smoothed."""

        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.1
        """Probability that a label is wrong."""


class LengthNormalisedDpo(Dpo):
    """DPO on log-ratios per token (Lambert et al. 2024, Tulu 3, arXiv 2411.15124, eq. 6)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dpo.Config):
        """DPO's options, beta as in Tulu 3."""

        beta: Annotated[float, Gt(0)] = 5.0
        """Strength of the tie to the reference, in units of reward per (nat a token)."""

        length_normalised: bool = True
        """Divide each log-ratio by the completion's length."""


class Ipo:
    """Identity preference optimisation (Azar et al. 2023, arXiv 2310.12036, eq. 17)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Target margin and length normalisation."""

        beta: Annotated[float, Gt(0)] = 0.1
        """The paper's tau: log-ratios are pulled ``1 / (2 beta)`` nats apart, and no further."""

        length_normalised: bool = False
        """Log-ratios are sums over tokens, as in the paper; true divides each by its completion's length, as
        TRL does, and the target margin is then in nats a token."""

    needs = PreferenceNeeds(reference=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's pairs; the rewards are ``beta`` times the log-ratios."""
        beta = self.config.beta
        chosen, rejected = _log_ratios(inputs, length_normalised=self.config.length_normalised)
        return _pair_output(ipo_loss(chosen, rejected, beta=beta), beta * chosen, beta * rejected, inputs)


class SimPO:
    """Simple preference optimisation, without a reference (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Scale and target margin, the paper's range being 2 to 2.5 and 0.3 to 1.6."""

        beta: Annotated[float, Gt(0)] = 2.0
        """Factor of the mean log-probability of a token."""

        gamma: Annotated[float, Ge(0)] = 1.0
        """Target margin between the rewards of chosen and rejected."""

    needs = PreferenceNeeds()

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's pairs; the rewards are ``beta`` times mean log-probabilities."""
        beta, (chosen, rejected) = self.config.beta, (inputs.chosen, inputs.rejected)
        loss = simpo_loss(
            chosen.values,
            rejected.values,
            chosen.lengths,
            rejected.lengths,
            beta=beta,
            gamma=self.config.gamma,
        )
        mean = per_token(chosen.values, chosen.lengths), per_token(rejected.values, rejected.lengths)
        return _pair_output(loss, beta * mean[0], beta * mean[1], inputs)


class Orpo:
    """Odds-ratio preference optimisation: SFT and preference in one (Hong et al. 2024, arXiv 2403.07691)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Weight of the preference beside the SFT loss."""

        odds_weight: Annotated[float, Ge(0)] = 0.1
        """lambda of eq. 6. 0 is SFT on the chosen completions."""

    needs = PreferenceNeeds()

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's pairs; the rewards are ``odds_weight`` times mean log-probabilities."""
        chosen, rejected, weight = inputs.chosen, inputs.rejected, self.config.odds_weight
        loss, log_odds_ratio = orpo_loss(
            chosen.values, rejected.values, chosen.lengths, rejected.lengths, odds_weight=weight
        )
        mean = per_token(chosen.values, chosen.lengths), per_token(rejected.values, rejected.lengths)
        output = _pair_output(loss, weight * mean[0], weight * mean[1], inputs)
        extra = {
            "sft_loss/mean": over(-mean[0].detach().sum(), inputs.num_chosen),
            "log_odds_ratio/mean": over(log_odds_ratio.detach().sum(), inputs.num_chosen),
        }
        return LossOutput(output.loss, output.metrics | extra)


class Kto:
    """Kahneman-Tversky optimisation, of single labelled completions (Ethayarajh et al. 2024, eq. 8).

    arXiv 2402.01306. The completions of pairs are taken one by one. The weights should balance the two kinds:
    ``desirable_weight`` x their number against ``undesirable_weight`` x theirs within a factor of 1 to 3/2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength of the tie to the reference, and weights."""

        beta: Annotated[float, Gt(0)] = 0.1
        """Risk aversion, in units of value per nat."""

        desirable_weight: Annotated[float, Gt(0)] = 1.0
        """lambda_D, of completions labelled good."""

        undesirable_weight: Annotated[float, Gt(0)] = 1.0
        """lambda_U, of completions labelled bad."""

    needs = PreferenceNeeds(reference=True, pairs=False, kl_baseline=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """Mean over the step's completions of both kinds; the rewards are ``beta`` times the log-ratios."""
        config, baseline = self.config, inputs.kl_baseline
        if baseline is None:
            raise ValueError("kl_baseline must be given to this loss; got None.")
        chosen, rejected = _log_ratios(inputs, length_normalised=False)
        good, bad = (
            kto_loss(ratios, is_desirable=desirable, kl_baseline=baseline, beta=config.beta, weight=weight)
            for ratios, desirable, weight in (
                (chosen, True, config.desirable_weight),
                (rejected, False, config.undesirable_weight),
            )
        )
        count = inputs.num_chosen + inputs.num_rejected
        loss = over(good.sum() + bad.sum(), count)
        right = _right_side(chosen.detach() - baseline) + _right_side(baseline - rejected.detach())
        rewards = [config.beta * ratios.detach().sum() for ratios in (chosen, rejected)]
        means = over(rewards[0], inputs.num_chosen), over(rewards[1], inputs.num_rejected)
        metrics = {
            "loss/mean": loss.detach(),
            "accuracy/mean": over(right, count),
            "margin/mean": means[0] - means[1],
            "chosen_reward/mean": means[0],
            "rejected_reward/mean": means[1],
            "kl_baseline/max": baseline.detach(),
        }
        return LossOutput(loss, metrics | logprob_metrics(inputs))


def _right_side(distance: torch.Tensor) -> torch.Tensor:
    """Number of values above 0, a 0 being half."""
    return (distance > 0).float().sum() + 0.5 * (distance == 0).float().sum()


def _log_ratios(inputs: PreferenceInputs, *, length_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    def of(side: CompletionScores) -> torch.Tensor:
        if side.ref_logprobs is None:
            raise ValueError("ref_logprobs must be given to this loss; got None.")
        return log_ratio(side.values, side.ref_logprobs, side.lengths if length_normalised else None)

    return of(inputs.chosen), of(inputs.rejected)


def _pair_output(
    loss: torch.Tensor,
    chosen_rewards: torch.Tensor,
    rejected_rewards: torch.Tensor,
    inputs: PreferenceInputs,
) -> LossOutput:
    total = over(loss.sum(), inputs.num_chosen)
    metrics = {"loss/mean": total.detach()}
    metrics |= pair_metrics(chosen_rewards, rejected_rewards, inputs) | logprob_metrics(inputs)
    return LossOutput(total, metrics)


DEFAULT = Dpo.Config
"""The loss of a preference run that names none."""
