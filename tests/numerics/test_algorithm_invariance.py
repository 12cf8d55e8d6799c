"""The gradient of an algorithm's step does not depend on how samples are cut into micro-batches and rows.

On a small random TorchTitan model, eight rollouts of uneven length in three groups, old different from the
policy, the generator from both, the KL penalty on in its place (loss or reward), an entropy bonus on for two
and a correction or a rejection for seven; advantages, whitening and returns through the trainer's own code;
with a critic its gradients too. "Equal": per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32, and a loss
within 1e-6 of its terms (steps.py). Each invariant is shown to fail under a planted fault.
"""

from types import SimpleNamespace

import pytest

from tests.distributed import algorithms_worker, launching
from tests.distributed.algorithms_worker import CORRECTIONS, ENTROPY, NAMES
from tests.distributed.steps import BIAS, check_equal, has_equal_loss, unequal

pytestmark = pytest.mark.slow

WITH_CRITIC = ("ppo", "dual_clip_ppo")


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("algorithms")
    algorithms_worker.write_model(directory)
    found = {}
    with launching.only_rank(directory):
        setup = algorithms_worker.Setup(directory)
        for name in NAMES:
            batches = {layout: setup.batch(name, layout) for layout in algorithms_worker.LAYOUTS}
            packed, shared = batches["packed"], batches["shared"]
            found[name] = SimpleNamespace(
                batches=batches,
                mean_per_micro_batch=setup.mean_per_micro_batch(name, packed),
                leaking=setup.leaking(name, packed),
                sibling_sight=setup.misreading_branches(name, shared, fault="masks"),
                running_positions=setup.misreading_branches(name, shared, fault="positions"),
                **{layout: setup.step(name, batch) for layout, batch in batches.items()},
            )
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["eight_of_one", "packed", "shared"])
def test_loss_metrics_and_every_gradient_are_those_of_one_micro_batch_of_eight_padded_rows(
    computed, name, layout
):
    got, expected = getattr(computed[name], layout), computed[name].one_of_eight
    check_equal(got, expected)
    assert got.sizes == pytest.approx(expected.sizes, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_compares_something(computed, name):
    found = computed[name]
    gradients = found.one_of_eight.gradients
    assert len(gradients) >= (40 if name in WITH_CRITIC else 20)
    assert any(key.startswith("critic.") for key in gradients) == (name in WITH_CRITIC)
    assert all(value.norm() > 1e-6 for value in gradients.values())
    assert abs(found.one_of_eight.loss) <= found.one_of_eight.sizes["loss"] * (1 + 1e-6)
    assert (BIAS in found.one_of_eight.sizes) == (name in WITH_CRITIC)
    counts = {layout: len(batch.micro_batches) for layout, batch in found.batches.items()}
    assert {k: counts[k] for k in ("eight_of_one", "one_of_eight")} == {"eight_of_one": 8, "one_of_eight": 1}
    tokens = {k: sum(m.num_tokens for m in found.batches[k].micro_batches) for k in ("packed", "shared")}
    assert tokens["shared"] == tokens["packed"] - 2 * 5 - 6  # of three siblings and of two
    documents = [len(m.document_lengths[0]) for m in found.batches["packed"].micro_batches]
    assert len(set(documents)) > 1
    assert max(documents) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_old_generator_and_reference_differ_from_the_policy(computed, name):
    metrics = computed[name].one_of_eight.metrics
    assert metrics["loss/ratio_max"] > 1.05
    assert metrics["loss/old_kl"] > 0.01
    assert metrics["loss/mismatch_abs"] > 0.1
    assert metrics["loss/reference_kl"] > 1e-3
    if name != "on_policy_distillation":
        assert metrics["loss/advantage_abs"] > 0.1


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_change_some_tokens_and_not_all(computed, name):
    metrics = computed[name].one_of_eight.metrics
    parts = CORRECTIONS[name].values()
    if any(type(part).__qualname__.startswith("Truncated") and part.cap < 2 for part in parts):
        assert 0 < metrics["loss/correction_truncated_fraction"] < 1
    else:
        assert 0 < metrics["loss/correction_rejected_fraction"] < 1


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_a_mean_per_micro_batch_is_noticed(computed, name):
    got, expected = computed[name].mean_per_micro_batch, computed[name].one_of_eight
    assert len(unequal(got, expected)) == len(expected.gradients)
    assert not has_equal_loss(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_attention_leaking_between_documents_is_noticed(computed, name):
    got, expected = computed[name].leaking, computed[name].one_of_eight
    assert len(unequal(got, expected)) == len(expected.gradients)
    assert not has_equal_loss(got, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["sibling_sight", "running_positions"])
def test_planted_faults_in_rows_that_share_prompts_are_noticed(computed, name, fault):
    got, expected = getattr(computed[name], fault), computed[name].one_of_eight
    assert len(unequal(got, expected)) == len(expected.gradients)
    assert not has_equal_loss(got, expected)


def test_bonuses_and_corrections_are_on_for_some():
    assert len(ENTROPY) >= 1
    assert len(CORRECTIONS) >= 5
    assert set(ENTROPY) | set(CORRECTIONS) <= set(NAMES)
