"""A step of GRPO and of PPO with every layer computed again in the backward pass, against the plain one.

On one rank; PPO's gradients are the policy's and the critic's. "Equal", in fp32: as steps.py has it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.distributed import algorithms_worker, launching
from tests.distributed.algorithms_worker import Setup
from tests.distributed.steps import check_equal, unequal

pytestmark = pytest.mark.slow

NAMES = ("grpo", "ppo")
MODES: dict[str, Any] = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


@contextmanager
def another_recomputation(setup: Setup) -> Iterator[None]:
    """Planted fault: what is computed again is not what was computed at first."""
    (model,) = setup.rank.policy.parts
    norm = next(module for name, module in model.named_modules() if name.endswith("attention_norm"))
    calls = Counter()

    def scaled(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls["norm"] += 1
        return output * (1.0 if calls["norm"] % 2 else 1.01)

    hook = norm.register_forward_hook(scaled)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    directory = tmp_path_factory.mktemp("checkpointing")
    algorithms_worker.write_model(directory, initializer_range=0.15)
    found = {}
    with launching.only_rank(directory):
        for mode, section in MODES.items():
            setup = Setup(directory, activation_checkpoint=section)
            names = [name for name, _ in setup.rank.module.named_parameters()]
            found[mode] = SimpleNamespace(
                num_wrapped=sum("_checkpoint_wrapped_module" in name for name in names),
                steps={name: setup.step(name, setup.batch(name, "packed")) for name in NAMES},
            )
        with another_recomputation(setup):
            found["fault"] = setup.step("grpo", setup.batch("grpo", "packed"))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_changes_neither_loss_nor_gradients(computed, mode, name):
    assert computed[mode].num_wrapped > 0
    assert computed["none"].num_wrapped == 0
    expected = computed["none"].steps[name]
    assert any(key.startswith("critic.") for key in expected.gradients) == (name == "ppo")
    check_equal(computed[mode].steps[name], expected)


def test_planted_fault_another_recomputation_is_noticed(computed):
    assert unequal(computed["fault"], computed["none"].steps["grpo"]) != []
