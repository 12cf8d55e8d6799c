"""The standard error that the critic's benchmark prints beside its ratio."""

import torch

from benchmarks.critic_error import standard_error


def test_the_spread_over_prompts_is_that_of_leaving_each_of_them_out():
    measured = torch.tensor([0.0, 1.0, 0.0, 1.0])
    predicted = torch.tensor([0.0, 0.0, 0.0, 1.0])
    # Without "a": errors 0, 0 of a variance of 1/4. Without "b": 0, 1.
    assert abs(standard_error(measured, predicted, ["a", "a", "b", "b"]) - 1.0) < 1e-6


def test_states_of_one_prompt_are_no_evidence_of_their_own():
    generator = torch.Generator().manual_seed(0)
    measured = torch.rand(50, generator=generator)
    predicted = measured + 0.1 * torch.randn(50, generator=generator)
    prompts = [str(i) for i in range(50)]
    once = standard_error(measured, predicted, prompts)
    twice = standard_error(measured.repeat(2), predicted.repeat(2), prompts * 2)
    assert abs(twice / once - 1) < 0.01
