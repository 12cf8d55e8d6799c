"""What must hold for every composition of the pure functions, whatever it computes.

Packed = padded, one micro-batch = several, nothing depends on what stands at untrained tokens, and on the
policy itself every surrogate is the plain policy gradient. Float64, random batches, and planted faults.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.numerics.composition import Batch, Loss, evaluate, part, value

TOLERANCE = 1e-10
_FILE = Path(__file__).parent / "data" / "fixture_b.json"
H = json.loads(_FILE.read_text())["hyperparameters"]


def _of(name):
    return part(name, **H.get(name, {}))


SAMPLE_MEAN, TOKEN_MEAN = _of("sample_mean_of_token_means"), _of("token_mean")
SURROGATES = {
    name: Loss(surrogate=_of(name), aggregation=SAMPLE_MEAN)
    for name in (
        "clipped_surrogate",
        "dual_clipped_surrogate",
        "soft_gated_surrogate",
        "reinforce_surrogate",
        "clipped_weight_surrogate",
        "geometric_mean_surrogate",
        "gamma_weighted_surrogate",
        "total_variation_masked",
        "binary_kl_masked",
        "quadratic_surrogate",
    )
}
CLIPPED = SURROGATES["clipped_surrogate"]
RATIOS = {
    "sequence_ratio": part("sequence_ratio"),
    "sequence_token_ratio": part("sequence_token_ratio"),
    "product of ratios": part("sequence_ratio", length_normalise=False),
}
CORRECTIONS = [name for name in H if name.startswith(("truncated_", "masked_", "reject_"))]
AGGREGATIONS = ("token_mean", "sample_mean_of_token_sums", "sample_mean_over_constant")
LOSSES = {
    **SURROGATES,
    **{name: replace(CLIPPED, ratio=ratio) for name, ratio in RATIOS.items()},
    **{name: replace(CLIPPED, corrections=(_of(name),)) for name in CORRECTIONS},
    **{name: replace(CLIPPED, aggregation=_of(name)) for name in AGGREGATIONS},
    **{name: replace(CLIPPED, kl=part(name), coefficient=0.1) for name in ("k2", "k3", "absolute")},
}
PROMPTS, COMPLETIONS = (2, 1, 3, 1, 2, 1), (4, 1, 5, 2, 3, 6)


def padded(seed=0, *, old_is_policy=False):
    """One sample a row: prompt, completion (a long one with an untrained token in the middle), padding."""
    draw = torch.Generator().manual_seed(seed)
    rows, length = len(PROMPTS), 10
    policy = -torch.rand(rows, length, generator=draw, dtype=torch.float64) * 2 - 0.2

    def near(values, scale):
        noise = torch.randn(rows, length, generator=draw, dtype=torch.float64) * scale
        return (values + noise).clamp(max=-0.01)

    old = policy.clone() if old_is_policy else near(policy, 0.8)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    index = torch.full((rows, length), -1)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        mask[row, prompt : prompt + completion] = True
        if completion > 3:
            mask[row, prompt + 2] = False
        index[row, : prompt + completion] = row
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, -0.3], dtype=torch.float64)
    return Batch(
        policy=policy,
        old=old,
        generator=near(old, 0.3),
        ref=near(policy, 0.5),
        advantages=advantages[:, None].expand(rows, length),
        loss_mask=mask,
        sample_index=index,
        num_samples=rows,
        num_loss_tokens=int(mask.sum()),
    )


TOKENS = ("policy", "old", "generator", "ref", "advantages", "loss_mask", "sample_index")


def packed(batch, rows=((3, 0, 5), (2,), (4, 1)), length=19):
    """The samples of a padded batch several to a row, and where each of its tokens went."""
    places, new = {}, {}
    for row, samples in enumerate(rows):
        start = 0
        for sample in samples:
            size = PROMPTS[sample] + COMPLETIONS[sample]
            for t in range(size):
                places[sample, t] = (row, start + t)
            start += size
    for name in TOKENS:
        values = getattr(batch, name)
        fill = {"loss_mask": False, "sample_index": -1}.get(name, float("nan"))
        new[name] = torch.full((len(rows), length), fill, dtype=values.dtype)
        for source, target in places.items():
            new[name][target] = values[source]
    return batch._replace(**new), places


def moved_back(gradient, places, like):
    found = torch.zeros_like(like)
    for source, target in places.items():
        found[source] = gradient[target]
    return found


def equal(actual, expected, tolerance=TOLERANCE):
    return (actual - expected).norm().item() <= tolerance * expected.norm().item() + 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_packed_equals_padded(name):
    batch = padded()
    whole, (tight, places) = evaluate(LOSSES[name], batch), packed(batch)
    found = evaluate(LOSSES[name], tight)
    assert equal(found.loss, whole.loss)
    assert equal(moved_back(found.gradient, places, whole.gradient), whole.gradient)


@pytest.mark.parametrize("name", ["sequence_ratio", "geometric_mean_surrogate", "truncated_sample_weights"])
def test_a_sample_index_that_joins_neighbours_would_be_noticed(name):
    batch = padded()
    tight, places = packed(batch)
    joined = tight._replace(sample_index=torch.where(tight.sample_index == 0, 3, tight.sample_index))
    whole, found = evaluate(LOSSES[name], batch), evaluate(LOSSES[name], joined)
    assert not equal(moved_back(found.gradient, places, whole.gradient), whole.gradient, 1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_the_shares_of_micro_batches_add_up_to_the_whole(name):
    batch = padded(1)
    whole = evaluate(LOSSES[name], batch)
    parts = [
        evaluate(LOSSES[name], batch._replace(**{n: getattr(batch, n)[rows] for n in TOKENS}))
        for rows in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    assert equal(sum(one.loss for one in parts), whole.loss)
    assert equal(torch.cat([one.gradient for one in parts]), whole.gradient)


def test_a_mean_per_micro_batch_would_be_noticed():
    batch = padded(1)._replace(num_loss_tokens=None)
    loss = LOSSES["token_mean"]
    halves = [
        evaluate(loss, batch._replace(**{n: getattr(batch, n)[rows] for n in TOKENS})).loss
        for rows in (slice(0, 3), slice(3, 6))
    ]
    assert not equal(sum(halves) / 2, evaluate(loss, batch).loss, 1e-3)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_untrained_tokens_have_no_influence_and_no_gradient(name, junk):
    batch = padded(2)
    dirty = batch._replace(**{n: torch.where(batch.loss_mask, getattr(batch, n), junk) for n in TOKENS[:5]})
    clean, found = evaluate(LOSSES[name], batch), evaluate(LOSSES[name], dirty)
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(found.gradient, clean.gradient)
    assert not found.gradient[~batch.loss_mask].any()
    assert found.gradient[batch.loss_mask].any()


ON_POLICY = [*SURROGATES, *RATIOS]


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_the_policy_itself_every_surrogate_is_the_plain_policy_gradient(name):
    batch = padded(3, old_is_policy=True)
    found = evaluate(LOSSES[name], batch)
    lengths = batch.loss_mask.sum(1, keepdim=True)
    plain = -batch.advantages / (lengths * batch.num_samples) * batch.loss_mask
    if name == "product of ratios":  # d prod r / d log p_t is not divided by the length
        plain = plain * lengths
    assert equal(found.gradient, plain)
    assert not any(flag.any() for flag in found.fired.values())


@pytest.mark.parametrize("name", ["clipped_surrogate", "dual_clipped_surrogate", "geometric_mean_surrogate"])
def test_without_bounds_nothing_is_clipped(name):
    wide = {"clip_low": 1.0 if "geo" not in name else 1e9, "clip_high": 1e9}
    if name.startswith("dual"):
        wide["clip_dual"] = 1e9
    batch = padded(4)
    free = replace(SURROGATES[name], surrogate=part(name, **wide))
    found = evaluate(free, batch)
    difference = (batch.policy - batch.old).double()
    if "geo" in name:
        means = (difference * batch.loss_mask).sum(1, keepdim=True) / batch.loss_mask.sum(1, keepdim=True)
        difference = means.expand_as(difference)
    values = -(difference.exp() * batch.advantages * batch.loss_mask)
    plain = (values.sum(1) / batch.loss_mask.sum(1)).mean()
    assert equal(found.loss, plain)
    assert not any(flag.any() for flag in found.fired.values())


def test_the_two_gradients_of_a_sequence_s_ratio_are_the_same_with_one_advantage_per_sample():
    batch = padded(5)
    one, other = (evaluate(LOSSES[name], batch) for name in ("sequence_ratio", "sequence_token_ratio"))
    assert equal(one.loss, other.loss)
    assert equal(one.gradient, other.gradient)
    varied = batch._replace(advantages=batch.advantages * torch.arange(1, 11))
    one, other = (evaluate(LOSSES[name], varied) for name in ("sequence_ratio", "sequence_token_ratio"))
    assert not equal(one.gradient, other.gradient, 1e-2)


def test_a_batch_without_a_trained_token_is_finite_and_zero():
    batch = padded()
    empty = batch._replace(loss_mask=torch.zeros_like(batch.loss_mask), num_loss_tokens=0)
    for name, loss in LOSSES.items():
        found = evaluate(loss, empty)
        assert found.loss.item() == 0, name
        assert not found.gradient.any(), name


TRACED = ["dual_clipped_surrogate", "sequence_token_ratio", "geometric_mean_surrogate"]
TRACED += ["gamma_weighted_surrogate", "truncated_sample_weights", "reject_samples_by_mean_k3"]


@pytest.mark.parametrize("name", TRACED)
def test_compositions_are_traced_without_a_graph_break(name):
    batch = padded(6)

    def loss(policy):
        return value(LOSSES[name], batch._replace(policy=policy))[0]

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    policies = [batch.policy.clone().requires_grad_() for _ in range(2)]
    compiled(policies[0]).backward()
    loss(policies[1]).backward()
    assert torch.equal(policies[0].grad, policies[1].grad)
