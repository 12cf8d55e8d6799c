"""A step of GRPO, GSPO, PPO with critic and reference, and distillation in every layout, against one rank.

parallel_worker.py computes with 2 and 4 gloo ranks; this process is the one rank, with padded rows. "Equal":
per tensor ``||a - b|| <= 1e-5 ||b|| + 1e-8``, in fp32, and a loss within 1e-6 of its terms (steps.py). Those
of 8 ranks run with ``make nightly``.
"""

from types import SimpleNamespace

import pytest

from tests.distributed import algorithms_worker, launching, parallel_worker
from tests.distributed.parallel_worker import FAULTS, LAYOUTS, NAMES, SAVED_UNDER, SHARED
from tests.distributed.steps import Step, check_equal, unequal

pytestmark = pytest.mark.slow
FOUR, EIGHT = pytest.param(4, marks=pytest.mark.scale), pytest.param(8, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    # With the wilder weights of the other tests rounding alone comes near the bound.
    algorithms_worker.write_model(path, initializer_range=0.15)
    return path


@pytest.fixture(scope="module")
def expected(directory):
    with launching.only_rank(directory):
        setup = algorithms_worker.Setup(directory)
        steps = {name: setup.step(name, setup.batch(name, "one_of_eight")) for name in NAMES}
        return steps | {"top_k": parallel_worker.distilling(setup)}


@pytest.fixture(scope="module")
def launched(directory):
    """Launch of a world size, on first use. Two ranks go first: they write the checkpoint."""
    launches = {}

    def launch(world_size):
        if world_size > 2:
            launch(2)
        if world_size not in launches:
            launches[world_size] = run(directory, world_size)
        return launches[world_size]

    return launch


def run(directory, world_size):
    launching.on_ranks(parallel_worker, directory, world_size)
    reports, tensors = launching.read(directory, world_size)
    return SimpleNamespace(tensors=tensors, rest=reports[0])


def step(launch, case) -> Step:
    gradients = {
        key.removeprefix(f"{case}/"): value
        for key, value in launch.tensors.items()
        if key.startswith(f"{case}/")
    }
    return Step(launch.rest[case]["loss"], launch.rest[case]["metrics"], gradients)


@pytest.mark.parametrize("world_size", [2, FOUR, EIGHT])
@pytest.mark.parametrize("name", [*NAMES, "top_k"])
def test_every_layout_gives_the_loss_metrics_and_gradients_of_one_rank(launched, expected, world_size, name):
    launch = launched(world_size)
    for layout in LAYOUTS[world_size]:
        check_equal(step(launch, f"{layout}/{name}"), expected[name])


@pytest.mark.parametrize("world_size", [2, FOUR, EIGHT])
@pytest.mark.parametrize("name", SHARED)
def test_every_layout_gives_the_same_with_rows_that_share_prompts(launched, expected, world_size, name):
    launch = launched(world_size)
    for layout in LAYOUTS[world_size]:
        check_equal(step(launch, f"{layout}/shared/{name}"), expected[name])


@pytest.mark.parametrize("layout", FAULTS)
def test_planted_faults_of_the_layout_are_noticed(launched, expected, layout):
    launch, right = launched(2), expected["grpo"]
    assert len(unequal(step(launch, f"{layout}/fault"), right)) > len(right.gradients) // 2
    check_equal(step(launch, f"{layout}/again"), right)


@pytest.mark.parametrize("layout", FAULTS)
def test_planted_fault_attention_between_documents_is_noticed(launched, expected, layout):
    assert unequal(step(launched(2), f"{layout}/leaking"), expected["grpo"]) != []


@pytest.mark.parametrize("layout", ["pp2", "pp2_interleaved"])
def test_scoring_between_the_steps_of_a_pipeline_changes_no_gradient(launched, expected, layout):
    launch = launched(2)
    for number in range(5):
        check_equal(step(launch, f"{layout}/alternating{number}"), expected["grpo"])


@pytest.fixture(scope="module")
def on_one_rank(directory, launched):
    """The checkpoint that two tensor-parallel ranks wrote, restored on one rank."""
    launched(2)
    with launching.only_rank(directory):
        setup = algorithms_worker.Setup(directory)
        parallel_worker.restore(setup, directory / "checkpoint")
        return parallel_worker.restored(setup)


@pytest.mark.parametrize("world_size", [2, FOUR, EIGHT])
def test_a_checkpoint_of_one_layout_is_restored_under_every_other(launched, on_one_rank, world_size):
    launch, layouts = launched(world_size), list(LAYOUTS[world_size])
    if SAVED_UNDER in layouts:
        layouts = layouts[layouts.index(SAVED_UNDER) :]
    for layout in layouts:
        prefix = f"{layout}/restored/"
        got = {k.removeprefix(prefix): v for k, v in launch.tensors.items() if k.startswith(prefix)}
        assert got.keys() >= {"logprobs", "values"}
        for key, value in got.items():
            # The moments are the file's; log-probabilities and values are computed under the layout.
            bound = 0.0 if ".exp_avg" in key else 1e-5
            assert (value - on_one_rank[key]).abs().max() <= bound, (layout, key)
    assert sum(".exp_avg" in key for key in on_one_rank) > 20
    assert on_one_rank["values"].abs().max() > 0.1


def test_a_pipeline_fills_up_its_schedule(launched):
    """Three rows and a schedule of two: the fourth is empty, and nothing of it reaches a gradient."""
    assert launched(2).rest["pp2/micro_batches"] % 2 == 1
