"""``[optimizer]`` as TorchTitan's parameter groups, there and back."""

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_rl.titan.sections import OptimizerSection, optimizer_from_section, section_from_optimizer


@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(),
        OptimizerSection(name="Adam", lr=3e-4, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        OptimizerSection(implementation="foreach"),
    ],
)
def test_a_section_survives_the_way_there_and_back(section):
    assert section_from_optimizer(optimizer_from_section(section)) == section


def test_torchtitan_builds_the_optimizer_that_the_section_describes():
    section = OptimizerSection(
        lr=3e-4, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, implementation="foreach"
    )
    model = nn.Linear(3, 2)
    (built,) = optimizer_from_section(section).build(model_parts=[model]).optimizers
    assert type(built) is torch.optim.AdamW
    (group,) = built.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        3e-4,
        (0.8, 0.99),
        1e-6,
        0.1,
    )
    assert group["foreach"]
    assert len(group["params"]) == 2


def test_without_parameter_groups_the_section_is_the_default():
    config = OptimizersContainer.Config(param_groups=[], implementation="for-loop")
    assert section_from_optimizer(config) == OptimizerSection(implementation="for-loop")
