"""A step of every algorithm on two gloo ranks of FSDP against one rank: losses, metrics and all gradients.

The computation is in algorithms_worker.py: once on two forked ranks, packed, and once in this
process, padded. "Equal": per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32, and a loss within 1e-6 of
its terms (steps.py).
"""

from types import SimpleNamespace

import pytest

from tests.distributed import algorithms_worker, launching
from tests.distributed.algorithms_worker import NAMES
from tests.distributed.steps import Step, check_equal, has_equal_loss, unequal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("algorithms")
    algorithms_worker.write_model(directory)
    launching.on_ranks(algorithms_worker, directory, 2)
    with launching.only_rank(directory):
        setup = algorithms_worker.Setup(directory)
        expected = {name: setup.step(name, setup.batch(name, "one_of_eight")) for name in NAMES}
    reports, tensors = launching.read(directory, 2)
    return SimpleNamespace(expected=expected, tensors=tensors, rest=reports[0])


def step(launch, name, case) -> Step:
    prefix, rest = f"{name}/{case}/", launch.rest[f"{name}/{case}"]
    gradients = {k.removeprefix(prefix): v for k, v in launch.tensors.items() if k.startswith(prefix)}
    return Step(rest["loss"], rest["metrics"], gradients)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["packed", "one_rank_empty"])
def test_two_ranks_give_the_loss_metrics_and_gradients_of_one(launch, name, case):
    check_equal(step(launch, name, case), launch.expected[name])


def test_samples_were_trained_on_another_rank_than_their_group_s(launch):
    assert launch.rest["moved_tokens"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_counts_that_are_local_to_the_rank_are_noticed(launch, name):
    got, expected = step(launch, name, "local_counts"), launch.expected[name]
    assert len(unequal(got, expected)) == len(expected.gradients)
    assert not has_equal_loss(got, expected)
