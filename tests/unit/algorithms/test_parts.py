"""Ratios, surrogates, corrections, aggregations and penalties as parts: their options, by hand; bad ones.

Two samples in one row and a third in another, uneven; each token's numbers are chosen so that every bound is
passed on one side or the other. What the formulas are worth is tested with the pure functions.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from titan_rl.algorithms import registries
from titan_rl.algorithms.aggregations import (
    SampleMeanOfTokenMeans,
    SampleMeanOfTokenSums,
    SampleMeanOverConstant,
    TokenMean,
)
from titan_rl.algorithms.corrections import (
    MaskedTokens,
    NoCorrection,
    RejectNegativeSamples,
    RejectSamplesByGeometricMean,
    RejectSamplesByMeanK3,
    RejectTokens,
    TruncatedSamples,
    TruncatedTokens,
)
from titan_rl.algorithms.interfaces import LossInputs, SurrogateOutput
from titan_rl.algorithms.penalties import Distillation, EntropyBonus, KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.ratios import SequenceRatio, TokenRatio
from titan_rl.algorithms.surrogates import (
    Clipped,
    ClippedWeight,
    GeometricMean,
    Reinforce,
    SoftGated,
    TotalVariation,
)
from titan_rl.config.choice import build
from titan_rl.config.registry import resolve
from titan_rl.errors import ConfigError

REGISTRIES = ("ADVANTAGES", "RATIOS", "SURROGATES", "CORRECTIONS", "AGGREGATIONS", "KLS")
PARTS = [(name, key) for name in REGISTRIES for key in getattr(registries, name)]

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 0, 0]]).bool()
INDEX = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]])
SAMPLES = ([(0, 1), (0, 2)], [(0, 4)], [(1, 0), (1, 1), (1, 2)])
ADVANTAGES = torch.tensor([[0.0, 1.0, 1.0, 0.0, -2.0], [-0.5, -0.5, -0.5, 0.0, 0.0]])
LOG_RATIO = torch.tensor([[0.0, 0.5, -0.25, 0.0, -0.75], [1.5, -0.125, 0.0625, 0.0, 0.0]])
MISMATCH = torch.tensor([[0.0, 1.0, -0.5, 0.0, 0.03], [-1.25, 0.5, 0.25, 0.0, 0.0]])  # old minus generator
POLICY = torch.tensor([[0.0, -1.0, -2.0, 0.0, -0.5], [-1.5, -0.25, -3.0, 0.0, 0.0]])


def inputs(**changed):
    def poisoned(values):
        return torch.where(MASK, values.double(), math.nan)

    old = POLICY - LOG_RATIO
    found = LossInputs(
        policy_logprobs=poisoned(POLICY).requires_grad_(),
        advantages=poisoned(ADVANTAGES),
        loss_mask=MASK,
        sample_index=INDEX,
        generator_logprobs=poisoned(old - MISMATCH),
        num_loss_tokens=10,
        num_samples=5,
        max_tokens=8,
        old_logprobs=poisoned(old),
    )
    return replace(found, **changed).masked()


def at_tokens(values):
    return [values[place].item() for sample in SAMPLES for place in sample]


def tokens(values, flags=False):
    """Of a tensor: its values at the trained tokens, sample by sample."""
    return at_tokens(values.int() if flags else values.detach())


RATIOS = [math.exp(x) for x in at_tokens(LOG_RATIO)]
ADVANTAGE = at_tokens(ADVANTAGES)


def surrogate(part, ratio=None, **options):
    given = inputs()
    ratio = ratio or TokenRatio(TokenRatio.Config())
    return part(part.Config(**options))(given, ratio(given))


def correction(part, given=None, **options):
    return part(part.Config(**options))(given or inputs())


@pytest.mark.parametrize(("registry", "key"), PARTS)
def test_every_part_builds_from_its_default_config(registry, key):
    part = resolve(key, getattr(registries, registry), "type")
    assert isinstance(build(part.Config()), part)


# ------------------------------------------------------------------------------------------------- ratios


def test_a_token_s_ratio_is_its_own():
    assert tokens(TokenRatio(TokenRatio.Config())(inputs()).ratio) == pytest.approx(RATIOS)


@pytest.mark.parametrize("token_gradient", [True, False])
@pytest.mark.parametrize("length_normalise", [True, False])
def test_a_sequence_s_ratio_is_the_geometric_mean_or_the_product(length_normalise, token_gradient):
    options = {"length_normalise": length_normalise, "token_gradient": token_gradient}
    ratio = SequenceRatio(SequenceRatio.Config(**options))(inputs())
    sums = [0.5 - 0.25, -0.75, 1.5 - 0.125 + 0.0625]
    lengths = [2, 1, 3] if length_normalise else [1, 1, 1]
    whole = [math.exp(total / length) for total, length in zip(sums, lengths, strict=True)]
    expected = [whole[i] for i, sample in enumerate(SAMPLES) for _ in sample]
    assert tokens(ratio.ratio) == pytest.approx(expected)


@pytest.mark.parametrize("token_gradient", [True, False])
def test_the_gradient_of_a_sequence_s_ratio_is_the_token_s_own_or_shared(token_gradient):
    given = inputs()
    ratio = SequenceRatio(SequenceRatio.Config(token_gradient=token_gradient))(given)
    (gradient,) = torch.autograd.grad(ratio.ratio[0, 1], given.policy_logprobs)
    whole = math.exp(0.125)
    own, sibling = (whole, 0.0) if token_gradient else (whole / 2, whole / 2)
    assert gradient[0].tolist() == pytest.approx([0, own, sibling, 0, 0])


# --------------------------------------------------------------------------------------------- surrogates


def test_the_clip_takes_the_pessimistic_side_and_says_which():
    found = surrogate(Clipped, clip_low=0.1, clip_high=0.3)
    expected = [-min(r * a, min(max(r, 0.9), 1.3) * a) for r, a in zip(RATIOS, ADVANTAGE, strict=True)]
    assert tokens(found.loss) == pytest.approx(expected)
    assert tokens(found.is_clipped_high, flags=True) == [1, 0, 0, 0, 0, 0]
    assert tokens(found.is_clipped_low, flags=True) == [0, 0, 1, 0, 1, 0]
    assert found.is_dual_clipped is None


def test_a_dual_clip_bounds_the_loss_of_a_negative_advantage():
    found = surrogate(Clipped, clip_low=0.2, clip_high=0.2, clip_dual=3.0)
    plain = surrogate(Clipped, clip_low=0.2, clip_high=0.2)
    assert tokens(found.is_dual_clipped, flags=True) == [0, 0, 0, 1, 0, 0]
    assert RATIOS[3] > 4
    assert tokens(found.loss)[3] == pytest.approx(3.0 * 0.5)
    assert tokens(plain.loss)[3] == pytest.approx(RATIOS[3] * 0.5)
    others = [0, 1, 2, 4, 5]
    assert [tokens(found.loss)[i] for i in others] == [tokens(plain.loss)[i] for i in others]


def test_reinforce_has_no_ratio():
    expected = [-a * p for a, p in zip(ADVANTAGE, at_tokens(POLICY), strict=True)]
    assert tokens(surrogate(Reinforce).loss) == pytest.approx(expected)


def test_a_clipped_weight_multiplies_the_log_probability():
    found = surrogate(ClippedWeight, clip_low=0.5, clip_high=0.25)
    expected = [
        -min(max(r, 0.5), 1.25) * a * p for r, a, p in zip(RATIOS, ADVANTAGE, at_tokens(POLICY), strict=True)
    ]
    assert tokens(found.loss) == pytest.approx(expected)
    assert tokens(found.is_clipped_high, flags=True) == [1, 0, 0, 1, 0, 0]
    assert tokens(found.is_clipped_low, flags=True) == [0, 0, 1, 0, 0, 0]


def test_a_soft_gate_has_a_temperature_for_each_sign():
    found = surrogate(SoftGated, tau_positive=2.0, tau_negative=3.0)
    expected = []
    for r, a in zip(RATIOS, ADVANTAGE, strict=True):
        tau = 2.0 if a > 0 else 3.0
        expected.append(-a * 4 / tau / (1 + math.exp(-tau * (r - 1))))
    assert tokens(found.loss) == pytest.approx(expected)


def test_a_geometric_mean_clips_each_token_before_it_is_taken():
    found = surrogate(GeometricMean, clip_low=0.1, clip_high=0.25)
    means = [(0.25 - 0.25) / 2, -0.1, (1.5 - 0.1 + 0.0625) / 3]
    expected = [
        -ADVANTAGES[place].item() * math.exp(m) for m, s in zip(means, SAMPLES, strict=True) for place in s
    ]
    assert tokens(found.loss) == pytest.approx(expected)
    assert tokens(found.is_clipped_high, flags=True) == [1, 0, 0, 0, 0, 0]
    assert tokens(found.is_clipped_low, flags=True) == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("max_weight", [None, 1.0, 0.875])
def test_total_variation_bounds_probabilities_and_weights(max_weight):
    bound = {} if max_weight is None else {"max_weight": max_weight}
    found = surrogate(TotalVariation, max_decrease=0.2, max_increase=0.125, **bound)
    expected, low, high = [], [], []
    for r, a, p in zip(RATIOS, ADVANTAGE, at_tokens(POLICY), strict=True):
        moved = math.exp(p) - math.exp(p) / r
        high.append(int(a > 0 and moved > 0.125))
        low.append(int(a <= 0 and moved < -0.2))
        expected.append(0.0 if high[-1] or low[-1] else -min(r, max_weight or 20.0) * a * p)
    assert tokens(found.loss) == pytest.approx(expected)
    assert tokens(found.is_clipped_high, flags=True) == high == [1, 0, 0, 0, 0, 0]
    assert tokens(found.is_clipped_low, flags=True) == low == [0, 0, 1, 0, 0, 0]


# -------------------------------------------------------------------------------------------- corrections

WEIGHTS = [math.exp(x) for x in at_tokens(MISMATCH)]


def test_no_correction_is_none():
    assert correction(NoCorrection) is None


def test_truncated_token_weights():
    found = correction(TruncatedTokens, cap=1.5)
    assert tokens(found.weights) == pytest.approx([min(w, 1.5) for w in WEIGHTS])
    assert tokens(found.is_truncated, flags=True) == [1, 0, 0, 0, 1, 0]
    assert not found.is_rejected.any()


def test_truncated_sample_weights():
    found = correction(TruncatedSamples, cap=1.5)
    assert tokens(found.weights) == pytest.approx([1.5] * 2 + [math.exp(0.03)] + [math.exp(-0.5)] * 3)
    assert tokens(found.is_truncated, flags=True) == [1, 1, 0, 0, 0, 0]


def test_masked_tokens_keep_their_ratio_or_nothing():
    found = correction(MaskedTokens, low=0.5, high=2.0)
    assert tokens(found.weights) == pytest.approx([0, WEIGHTS[1], WEIGHTS[2], 0, WEIGHTS[4], WEIGHTS[5]])
    assert tokens(found.is_rejected, flags=True) == [1, 0, 0, 1, 0, 0]


def test_rejected_tokens_leave_the_others_at_one():
    found = correction(RejectTokens, low=0.7, high=1.5)
    assert tokens(found.weights) == [0, 0, 1, 0, 0, 1]
    assert tokens(found.is_rejected, flags=True) == [1, 1, 0, 1, 1, 0]


def test_samples_are_rejected_by_their_geometric_mean():
    # Means of the log-ratio: 0.25, 0.03, -1/6.
    assert tokens(correction(RejectSamplesByGeometricMean, low=0.9, high=1.1).weights) == [0, 0, 1, 0, 0, 0]
    assert tokens(correction(RejectSamplesByGeometricMean, low=0.8, high=1.1).weights) == [0, 0, 1, 1, 1, 1]
    assert tokens(correction(RejectSamplesByGeometricMean, low=0.9, high=1.3).weights) == [1, 1, 1, 0, 0, 0]
    assert tokens(correction(RejectSamplesByGeometricMean).weights) == [0] * 6  # 0.99 to 1.01


def test_samples_are_rejected_by_their_mean_k3():
    def k3(sample):
        return sum(math.expm1(MISMATCH[p].item()) - MISMATCH[p].item() for p in sample) / len(sample)

    first, second, third = map(k3, SAMPLES)
    assert second < 0.001 < third < first
    between = (third + first) / 2
    assert tokens(correction(RejectSamplesByMeanK3, max_kl=between).weights) == [0, 0, 1, 1, 1, 1]
    assert tokens(correction(RejectSamplesByMeanK3, max_kl=0.001).weights) == [0, 0, 1, 0, 0, 0]


def test_negative_samples_are_rejected_when_the_policy_now_has_left_them():
    # Generator minus policy now: minus (LOG_RATIO + MISMATCH); its means are -0.375, 0.72, -0.3125.
    assert tokens(correction(RejectNegativeSamples, max_kl=0.7).weights) == [1, 1, 0, 1, 1, 1]
    assert tokens(correction(RejectNegativeSamples, max_kl=0.73).weights) == [1] * 6
    positive = inputs(advantages=ADVANTAGES.abs().double())
    assert tokens(correction(RejectNegativeSamples, positive, max_kl=0.0).weights) == [1] * 6


def test_a_correction_and_a_rejection_are_multiplied_and_counted():
    config = PolicyLoss.Config(
        surrogate=Reinforce.Config(),
        correction=TruncatedTokens.Config(cap=1.5),
        rejection=RejectSamplesByGeometricMean.Config(low=0.8, high=1.1),
    )
    output = config.build()(inputs())
    weights = [0.0, 0.0] + [min(w, 1.5) for w in WEIGHTS[2:]]
    loss = sum(-w * a * p for w, a, p in zip(weights, ADVANTAGE, at_tokens(POLICY), strict=True)) / 10
    assert output.loss.item() == pytest.approx(loss)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics["correction_weight/mean"] == pytest.approx(sum(weights) / 10)
    assert metrics["correction_weight_square/mean"] == pytest.approx(sum(w * w for w in weights) / 10)
    assert metrics["correction_weight/max"] == pytest.approx(1.5)
    assert metrics["correction_truncated_fraction/mean"] == pytest.approx(2 / 10)
    assert metrics["correction_rejected_fraction/mean"] == pytest.approx(2 / 10)


def test_rejecting_everything_is_a_loss_of_zero_with_finite_metrics():
    config = PolicyLoss.Config(rejection=RejectSamplesByGeometricMean.Config())
    given = inputs()
    output = config.build()(given)
    (gradient,) = torch.autograd.grad(output.loss, given.policy_logprobs)
    assert output.loss.item() == 0.0
    assert (gradient == 0).all()
    assert all(math.isfinite(value.item()) for value in output.metrics.values())
    assert output.metrics["correction_rejected_fraction/mean"].item() == pytest.approx(6 / 10)


# ------------------------------------------------------------------------------------------- aggregations

VALUES = torch.tensor([[0.0, 1.0, 3.0, 0.0, 5.0], [2.0, 4.0, 9.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TokenMean, 24 / 10),
        (SampleMeanOfTokenMeans, (2 + 5 + 5) / 5),
        (SampleMeanOfTokenSums, 24 / 5),
        (SampleMeanOverConstant, 24 / (5 * 8)),
    ],
)
def test_aggregations_divide_by_the_counts_of_the_step(part, expected):
    poisoned = torch.where(MASK, VALUES, math.nan)
    assert part(part.Config())(inputs(), poisoned).item() == pytest.approx(expected)


# ----------------------------------------------------------------------------------- penalties and bonuses


@pytest.mark.parametrize(
    ("estimator", "function"),
    [
        ("k1", lambda r: -r),
        ("k2", lambda r: r * r / 2),
        ("k3", lambda r: math.expm1(r) - r),
    ],
)
def test_the_estimator_is_the_one_that_is_named(estimator, function):
    kl = KLPenalty(KLPenalty.Config(estimator=estimator, placement="reward"))
    reference = POLICY + LOG_RATIO
    assert tokens(kl(POLICY, reference)) == pytest.approx([function(r) for r in at_tokens(LOG_RATIO)])


def test_terms_are_aggregated_like_the_policy_loss_and_added_with_their_factors():
    given = inputs(
        ref_logprobs=(POLICY + LOG_RATIO).double(), entropy=VALUES.double(), teacher_kl=VALUES.double() * 2
    )
    config = PolicyLoss.Config(
        aggregation=SampleMeanOfTokenMeans.Config(),
        kl=KLPenalty.Config(coefficient=0.5, estimator="k2"),
        entropy=EntropyBonus.Config(coefficient=0.25),
        distillation=Distillation.Config(coefficient=2.0),
    )
    output = config.build()(given)
    k2 = [r * r / 2 for r in at_tokens(LOG_RATIO)]
    kl = ((k2[0] + k2[1]) / 2 + k2[2] + (k2[3] + k2[4] + k2[5]) / 3) / 5
    entropy = (2 + 5 + 5) / 5
    expected = output.metrics["policy_loss/mean"].item() + 0.5 * kl - 0.25 * entropy + 2.0 * 2 * entropy
    assert output.loss.item() == pytest.approx(expected)
    assert output.metrics["entropy/mean"].item() == pytest.approx(24 / 10)
    assert output.metrics["teacher_kl/mean"].item() == pytest.approx(48 / 10)


def test_a_penalty_in_the_reward_adds_nothing_to_the_loss_and_is_measured_all_the_same():
    reference = (POLICY + LOG_RATIO).double()
    in_reward = PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.5, placement="reward", estimator="k1"))
    output = in_reward.build()(inputs(ref_logprobs=reference))
    plain = PolicyLoss.Config().build()(inputs())
    assert output.loss.item() == plain.loss.item()
    expected = sum(math.expm1(r) - r for r in at_tokens(LOG_RATIO)) / 10
    assert output.metrics["reference_kl/mean"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ({"entropy": EntropyBonus.Config(coefficient=0.1)}, "entropy"),
        ({"distillation": Distillation.Config(coefficient=0.1)}, "teacher_kl"),
        ({"kl": KLPenalty.Config(coefficient=0.1)}, "ref_logprobs"),
    ],
)
def test_what_a_term_needs_must_be_given(term, name):
    with pytest.raises(ValueError, match=rf"{name} must be given with a coefficient of 0\.1; got None"):
        PolicyLoss.Config(**term).build()(inputs())


@pytest.mark.parametrize(
    ("term", "is_zero"),
    [
        ({}, True),
        ({"kl": KLPenalty.Config(coefficient=0.1)}, False),
        ({"kl": KLPenalty.Config(coefficient=0.1, placement="reward", estimator="k1")}, True),
        ({"entropy": EntropyBonus.Config(coefficient=0.1)}, False),
        ({"distillation": Distillation.Config(coefficient=0.1)}, False),
    ],
)
@pytest.mark.parametrize("name", registries.SURROGATES)
def test_what_claims_to_be_zero_without_an_advantage_has_no_gradient(name, term, is_zero):
    config = PolicyLoss.Config(surrogate=resolve(name, registries.SURROGATES, "type").Config(), **term)
    loss = config.build()
    assert loss.is_zero_without_advantage == is_zero
    entropy = VALUES.double().requires_grad_()
    given = inputs(
        advantages=torch.zeros_like(ADVANTAGES).double(),
        ref_logprobs=(POLICY + LOG_RATIO).double(),
        entropy=entropy,
        teacher_kl=entropy * 2,
    )
    output = loss(given)
    gradients = torch.autograd.grad(output.loss, [given.policy_logprobs, entropy], allow_unused=True)
    size = sum(float(g.abs().sum()) for g in gradients if g is not None)
    assert (size == 0.0) == is_zero


# ---------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Clipped.Config(clip_high=0.28, clip_dual=1.28),
            r"loss\.surrogate\.clip_dual must be 0, or above 1 \+ loss\.surrogate\.clip_high = 1\.28; got",
        ),
        (Clipped.Config(clip_dual=0.5), r"loss\.surrogate\.clip_dual must be 0, or above .*clip_high"),
        (Clipped.Config(clip_dual=math.nan), r"loss\.surrogate\.clip_dual must be"),
        (KLPenalty.Config(estimator="k1"), r'loss\.kl\.estimator must .* with loss\.kl\.placement = "loss"'),
        (KLPenalty.Config(target=0.1), r"loss\.kl\.coefficient must be above 0 with loss\.kl\.target"),
        (KLPenalty.Config(coefficient=math.nan), r"loss\.kl\.coefficient must be 0 or more"),
    ],
)
def test_a_contradiction_is_refused_and_both_keys_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        build(config)


@pytest.mark.parametrize(
    ("part", "bounds"),
    [
        (MaskedTokens, {"low": 2.0, "high": 2.0}),
        (RejectTokens, {"low": 3.0}),
        (RejectSamplesByGeometricMean, {"low": 1.02}),
        (RejectTokens, {"low": math.nan}),
    ],
)
def test_bounds_that_keep_nothing_are_refused(part, bounds):
    with pytest.raises(ConfigError, match=r"^low must be below high = "):
        part.Config(**bounds)


@pytest.mark.parametrize(
    ("part", "name"), [(EntropyBonus, r"loss\.entropy\.coeff"), (Distillation, r"loss\.distillation\.coeff")]
)
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_negative_factor_is_refused(part, name, value):
    with pytest.raises(ConfigError, match=name):
        part(part.Config(coefficient=value))


class PullToOne:
    """A surrogate of one's own that also pushes tokens of advantage 0."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Nothing."""

    def __init__(self, config):
        self.config = config

    def __call__(self, inputs, ratio):
        nowhere = torch.zeros_like(inputs.loss_mask)
        return SurrogateOutput((ratio.ratio - 1).square() - inputs.advantages * ratio.ratio, nowhere, nowhere)


def test_samples_of_advantage_zero_are_computed_for_a_surrogate_that_does_not_say_otherwise():
    assert not PolicyLoss.Config(surrogate=PullToOne.Config()).build().is_zero_without_advantage
