"""The composed loss against a loop in plain Python, its metrics, its masks, and its contradictions."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from titan_rl.algorithms.interfaces import CorrectionOutput, LossInputs
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.surrogates import Clipped
from titan_rl.errors import ConfigError

TOLERANCE = 1e-9


def make_inputs(*, rows=3, length=7, seed=0, dtype=torch.float64):
    """Three rows of uneven length; old and reference differ from the policy by enough to clip."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(rows, length, generator=generator, dtype=dtype)

    policy = -normal(1.0).abs() - 0.1
    lengths = torch.tensor([length, length - 3, 2])[:rows, None]
    mask = torch.arange(length)[None] < lengths
    return LossInputs(
        policy_logprobs=policy.clone().requires_grad_(),
        advantages=normal(1.0),
        loss_mask=mask,
        sample_index=torch.where(mask, torch.arange(rows)[:, None], -1),
        generator_logprobs=policy + normal(0.02),
        num_loss_tokens=20,
        num_samples=4,
        max_tokens=8,
        old_logprobs=policy + normal(0.4),
        ref_logprobs=policy + normal(0.3),
        entropy=normal(1.0).abs(),
    )


def make_loss(*, coefficient=0.05, estimator="k3", clip_low=0.2, clip_high=0.28, **build_options):
    config = PolicyLoss.Config(
        surrogate=Clipped.Config(clip_low=clip_low, clip_high=clip_high),
        kl=KLPenalty.Config(coefficient=coefficient, estimator=estimator),
    )
    return config.build(**build_options)


def loop(inputs, *, coefficient=0.05, clip_low=0.2, clip_high=0.28):
    """Loss, gradient and metrics of one micro-batch, token by token, without torch's autograd."""
    totals = dict.fromkeys(
        ["policy_loss", "kl", "ratio", "low", "high", "old_kl", "entropy", "mismatch", "mismatch_k3"], 0.0
    )
    gradient = torch.zeros_like(inputs.policy_logprobs)
    count = int(inputs.num_loss_tokens)
    for row, column in inputs.loss_mask.nonzero().tolist():
        policy, old, ref, gen, advantage, entropy = (
            values[row, column].item()
            for values in (
                inputs.policy_logprobs,
                inputs.old_logprobs,
                inputs.ref_logprobs,
                inputs.generator_logprobs,
                inputs.advantages,
                inputs.entropy,
            )
        )
        ratio = math.exp(policy - old)
        unclipped = ratio * advantage
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage
        totals["policy_loss"] -= min(unclipped, clipped)
        totals["kl"] += math.exp(ref - policy) - 1 - (ref - policy)
        totals["ratio"] += ratio
        totals["low"] += clipped < unclipped and ratio < 1
        totals["high"] += clipped < unclipped and ratio > 1
        totals["old_kl"] += ratio - 1 - (policy - old)
        totals["entropy"] += entropy
        totals["mismatch"] += abs(policy - gen)
        totals["mismatch_k3"] += math.exp(policy - gen) - 1 - (policy - gen)
        gradient[row, column] = (
            -(unclipped if unclipped <= clipped else 0.0) + coefficient * (1 - math.exp(ref - policy))
        ) / count
    return {name: total / count for name, total in totals.items()}, gradient


@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_and_metrics_equal_the_loop(seed):
    inputs = make_inputs(seed=seed)
    output = make_loss()(inputs)
    output.loss.backward()
    expected, gradient = loop(inputs)
    assert output.loss.item() == pytest.approx(expected["policy_loss"] + 0.05 * expected["kl"], abs=TOLERANCE)
    assert (inputs.policy_logprobs.grad - gradient).norm() <= TOLERANCE
    for metric, name in {
        "policy_loss/mean": "policy_loss",
        "reference_kl/mean": "kl",
        "ratio/mean": "ratio",
        "clip_low_fraction/mean": "low",
        "clip_high_fraction/mean": "high",
        "old_kl/mean": "old_kl",
        "entropy/mean": "entropy",
        "mismatch_abs/mean": "mismatch",
        "mismatch_k3/mean": "mismatch_k3",
    }.items():
        # Metrics are fp32 whatever the loss is.
        assert output.metrics[metric].item() == pytest.approx(expected[name], abs=1e-6), metric


def test_the_fixture_of_this_file_clips_at_both_ends():
    totals = [loop(make_inputs(seed=seed))[0] for seed in range(4)]
    assert sum(total["low"] for total in totals) > 0
    assert sum(total["high"] for total in totals) > 0


def test_maxima_and_advantage_metrics_are_those_of_the_trained_tokens():
    inputs = make_inputs()
    metrics = make_loss()(inputs).metrics
    mask = inputs.loss_mask
    ratio = (inputs.policy_logprobs - inputs.old_logprobs).exp()[mask]
    assert metrics["ratio/max"].item() == pytest.approx(ratio.max().item())
    assert metrics["advantage_abs/max"].item() == pytest.approx(inputs.advantages[mask].abs().max().item())
    assert metrics["advantage/mean"].item() == pytest.approx(inputs.advantages[mask].sum().item() / 20)
    assert metrics["advantage_abs/mean"].item() == pytest.approx(
        inputs.advantages[mask].abs().sum().item() / 20
    )
    difference = (inputs.policy_logprobs - inputs.generator_logprobs)[mask].abs()
    assert metrics["mismatch_abs/max"].item() == pytest.approx(difference.max().item())
    assert {name.rpartition("/")[2] for name in metrics} == {"mean", "max"}
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_token_gets_exactly_zero_gradient_whatever_stands_there(poison, estimator):
    inputs = make_inputs()
    masked = ~inputs.loss_mask
    clean = make_loss(estimator=estimator)(inputs)
    (expected,) = torch.autograd.grad(clean.loss, inputs.policy_logprobs)

    def poisoned(values):
        return values.detach().masked_fill(masked, poison)

    dirty_inputs = replace(
        inputs,
        policy_logprobs=poisoned(inputs.policy_logprobs).requires_grad_(),
        old_logprobs=poisoned(inputs.old_logprobs),
        ref_logprobs=poisoned(inputs.ref_logprobs),
        generator_logprobs=poisoned(inputs.generator_logprobs),
        advantages=poisoned(inputs.advantages),
        entropy=poisoned(inputs.entropy),
    )
    dirty = make_loss(estimator=estimator)(dirty_inputs)
    (gradient,) = torch.autograd.grad(dirty.loss, dirty_inputs.policy_logprobs)
    assert dirty.loss.item() == clean.loss.item()
    assert torch.equal(gradient, expected)
    assert (gradient[masked] == 0).all()
    assert {k: v.item() for k, v in dirty.metrics.items()} == {k: v.item() for k, v in clean.metrics.items()}


def test_a_nan_at_a_trained_token_reaches_the_loss():
    inputs = make_inputs()
    poisoned = inputs.policy_logprobs.detach().clone()
    poisoned[0, 0] = float("nan")
    assert make_loss()(replace(inputs, policy_logprobs=poisoned)).loss.isnan()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_policy_gradient():
    inputs = replace(make_inputs(), old_logprobs=None)
    output = make_loss(coefficient=0.0)(inputs)
    output.loss.backward()
    expected = torch.where(inputs.loss_mask, -inputs.advantages / 20, 0.0)
    assert torch.allclose(inputs.policy_logprobs.grad, expected, atol=1e-15)
    assert output.metrics["ratio/max"].item() == 1.0
    assert output.metrics["old_kl/mean"].item() == 0.0


def test_a_ratio_of_e100_gives_a_finite_loss_and_is_counted():
    inputs = make_inputs()
    old = inputs.old_logprobs.clone()
    old[0, :2] = -100.0
    inputs = replace(inputs, old_logprobs=old, advantages=-torch.ones_like(inputs.advantages))
    output = make_loss()(inputs)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(inputs.policy_logprobs.grad).all()
    assert output.metrics["log_ratio_clamped_fraction/mean"].item() == pytest.approx(2 / 20)
    assert output.metrics["ratio/max"].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_a_micro_batch_without_trained_tokens_gives_zeros_and_the_same_metric_names():
    inputs = make_inputs()
    empty = replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask))
    output = make_loss()(empty)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert (inputs.policy_logprobs.grad == 0).all()
    assert output.metrics.keys() == make_loss()(inputs).metrics.keys()
    assert all(value.item() == 0.0 for value in output.metrics.values())


class HalveAndReject:
    """A user's correction: halves every token and rejects the first column."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        factor: float = 0.5

    def __init__(self, config):
        self.factor = config.factor

    def __call__(self, inputs):
        weights = torch.full_like(inputs.advantages, self.factor)
        weights[:, 0] = 0.0
        never = torch.zeros_like(inputs.loss_mask)
        return CorrectionOutput(weights, is_truncated=never, is_rejected=weights == 0)


def test_a_correction_weighs_the_surrogate_alone_and_leaves_the_count():
    inputs = replace(make_inputs(), old_logprobs=None)
    plain = make_loss()(inputs)
    corrected = PolicyLoss.Config(
        surrogate=Clipped.Config(clip_high=0.28),
        correction=HalveAndReject.Config(),
        kl=KLPenalty.Config(coefficient=0.05),
    ).build()(inputs)
    mask, advantages = inputs.loss_mask[:, 1:], inputs.advantages[:, 1:]
    expected = -0.5 * advantages[mask].sum().item() / 20
    assert corrected.metrics["policy_loss/mean"].item() == pytest.approx(expected, abs=TOLERANCE)
    penalties = [(x.loss.detach() - x.metrics["policy_loss/mean"]).item() for x in (plain, corrected)]
    assert penalties[0] == pytest.approx(penalties[1], abs=TOLERANCE)
    assert penalties[0] > 1e-4


def test_k2_penalises_with_the_squared_log_ratio():
    inputs = make_inputs()
    k2 = make_loss(coefficient=1.0, estimator="k2")(inputs)
    expected = 0.5 * (inputs.ref_logprobs - inputs.policy_logprobs)[inputs.loss_mask].square().sum() / 20
    assert (k2.loss.detach() - k2.metrics["policy_loss/mean"]).item() == pytest.approx(
        expected.item(), abs=1e-7
    )


def test_needs_follow_from_the_composition():
    assert make_loss(coefficient=0.0).needs(steps_per_iteration=1).reference is False
    assert make_loss(coefficient=1e-3).needs(steps_per_iteration=1).reference is True
    assert make_loss().needs(steps_per_iteration=1).old is False
    assert make_loss().needs(steps_per_iteration=2).old is True


def test_a_penalty_without_reference_logprobs_is_refused():
    with pytest.raises(ValueError, match=r"ref_logprobs must be given with a coefficient of 0\.05"):
        make_loss()(replace(make_inputs(), ref_logprobs=None))
    assert (
        "reference_kl/mean"
        not in make_loss(coefficient=0.0)(replace(make_inputs(), ref_logprobs=None)).metrics
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(3)}, "advantages must have the shape of loss_mask"),
        ({"old_logprobs": torch.zeros(3, 1)}, "old_logprobs must have the shape of loss_mask"),
        ({"loss_mask": torch.zeros(3, 7)}, "loss_mask must be bool"),
        ({"num_loss_tokens": torch.ones(3)}, "num_loss_tokens must be 0-d"),
    ],
)
def test_shapes_that_would_broadcast_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        make_loss()(replace(make_inputs(), **change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"loss\.surrogate\.clip_low must be between 0 and 1; got -0\.1"),
        ({"clip_low": 1.5}, r"loss\.surrogate\.clip_low must be between 0 and 1"),
        ({"clip_high": -0.1}, r"loss\.surrogate\.clip_high must be 0 or more"),
        ({"clip_high": math.nan}, r"loss\.surrogate\.clip_high must be 0 or more"),
        ({"coefficient": -1.0}, r"loss\.kl\.coefficient must be 0 or more"),
        ({"estimator": "k1"}, r"loss\.kl\.estimator must be .*gradient of k1 has expectation 0"),
    ],
)
def test_values_that_make_no_loss_are_refused_by_key(options, message):
    with pytest.raises(ConfigError, match=message):
        make_loss(**options)


class _CountingBackend:
    """A torch.compile backend that runs the graph as it is and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def _compile_config(backend, *, enable=True, components=("model", "loss")):
    return SimpleNamespace(enable=enable, components=list(components), backend=backend)


def test_compiling_changes_no_number_and_makes_one_graph_for_all_counts():
    backend = _CountingBackend()
    compiled = make_loss(compile_config=_compile_config(backend))
    for seed, count in ((0, 20), (1, 33)):
        inputs = replace(make_inputs(seed=seed), num_loss_tokens=count)
        eager = make_loss()(inputs)
        output = compiled(inputs)
        (expected,) = torch.autograd.grad(eager.loss, inputs.policy_logprobs)
        (gradient,) = torch.autograd.grad(output.loss, inputs.policy_logprobs)
        assert torch.allclose(gradient, expected, atol=1e-12)
        assert output.loss.item() == pytest.approx(eager.loss.item(), abs=TOLERANCE)
        assert output.metrics.keys() == eager.metrics.keys()
    assert backend.graphs == 1


@pytest.mark.parametrize("options", [{"enable": False}, {"components": ["model"]}])
def test_nothing_is_compiled_unless_the_loss_is_asked_for(options):
    backend = _CountingBackend()
    make_loss(compile_config=_compile_config(backend, **options))(make_inputs())
    assert backend.graphs == 0
