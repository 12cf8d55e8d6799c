"""Skipped steps in a row: counted again from the start once a step was applied."""

import pytest

from titan_rl.errors import NonFiniteError
from titan_rl.resilience.skip_limit import SkipLimit


def test_one_too_many_in_a_row_ends_the_run_and_an_applied_step_starts_again():
    limit = SkipLimit(2, look_at="the rollouts")
    for _ in range(3):
        limit.skipped("nothing to train on")
        limit.skipped("nothing to train on")
        limit.applied()
    limit.skipped("a")
    limit.skipped("b")
    with pytest.raises(NonFiniteError) as raised:
        limit.skipped("the gradient norm is nan")
    assert str(raised.value) == (
        "3 steps in a row were skipped, more than resilience.max_skipped_steps; "
        "the last because the gradient norm is nan. Look at the rollouts."
    )


def test_with_a_limit_of_0_the_first_one_ends_it():
    with pytest.raises(NonFiniteError, match=r"^1 steps of the critic in a row"):
        SkipLimit(0, of="the critic", look_at="the returns").skipped("the gradient norm is inf")
