"""The clipped surrogate against hand-computed numbers and an independent loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.surrogate import clipped_surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, (False, False)),
        (1.5, 2.0, -2.56, 0.0, (False, True)),  # -(1 + 0.28) * 2
        (0.5, 2.0, -1.0, -2.0, (False, False)),  # below the bound, but improving: not clipped
        (0.5, -2.0, 1.6, 0.0, (True, False)),  # (1 - 0.2) * 2
        (1.5, -2.0, 3.0, 2.0, (False, False)),
        (5.0, 0.0, 0.0, 0.0, (False, False)),
    ],
)
def test_loss_gradient_and_clipping_by_hand(ratio, advantage, loss, gradient, clipped):
    ratio = torch.tensor([ratio], requires_grad=True)
    value, low, high = clipped_surrogate(ratio, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert ratio.grad.item() == pytest.approx(gradient)
    assert (low.item(), high.item()) == clipped


@given(
    st.floats(0.0, 100.0),
    st.floats(-5.0, 5.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 2.0),
)
def test_it_is_equation_7_of_the_paper(ratio, advantage, clip_low, clip_high):
    value, _, _ = clipped_surrogate(
        torch.tensor([ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    assert value.item() == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-12)


def test_a_nan_ratio_is_not_hidden_by_the_clipping():
    value, _, _ = clipped_surrogate(
        torch.tensor([float("nan")]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2
    )
    assert value.isnan().all()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="advantages must have the shape of ratio"):
        clipped_surrogate(torch.ones(2, 3), torch.ones(2, 1), clip_low=0.2, clip_high=0.2)
