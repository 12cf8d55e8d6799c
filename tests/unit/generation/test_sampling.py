import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.generation.sampling import draw, processed_logprobs, truncate
from titan_rl.types import SamplingParams

PROBS = torch.tensor([0.1, 0.4, 0.2, 0.3])


def params(**fields: float) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1} | fields))


def test_logprobs_are_those_of_the_logits_divided_by_the_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(2.0)]] * 2)
    got = processed_logprobs(logits, [params(temperature=1.0), params(temperature=0.5)]).exp()
    assert got.tolist() == [pytest.approx([1 / 3, 2 / 3]), pytest.approx([1 / 5, 4 / 5])]


def test_a_greedy_row_keeps_the_logprobs_of_temperature_one_without_truncation() -> None:
    got = processed_logprobs(PROBS.log()[None], [params(temperature=0.0, top_k=1, top_p=0.1)])
    assert got.exp()[0].tolist() == pytest.approx(PROBS.tolist())


def test_truncation_touches_only_the_rows_that_ask_for_it() -> None:
    got = processed_logprobs(PROBS.log().repeat(2, 1), [params(), params(top_k=1)]).exp()
    assert got[0].tolist() == pytest.approx(PROBS.tolist())
    assert got[1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, PROBS.tolist()),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # top_k leaves 4/9, 3/9, 2/9: 0.75 of that is the two likeliest, although they are 0.7 of the whole.
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_truncation_keeps_the_likely_tokens_and_renormalises(
    sampling: dict[str, float], kept: list[float]
) -> None:
    assert truncate(PROBS.log(), params(**sampling)).exp().tolist() == pytest.approx(kept, abs=1e-6)


def test_tokens_that_tie_with_the_kth_are_all_kept() -> None:
    tied = torch.tensor([0.25, 0.5, 0.25]).log()
    assert truncate(tied, params(top_k=2)).exp().tolist() == pytest.approx([0.25, 0.5, 0.25])


def test_a_draw_inverts_the_distribution_function() -> None:
    rows = PROBS.log().repeat(6, 1)
    assert draw(rows, [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.7001]).tolist() == [0, 0, 1, 1, 2, 3]


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=20),
    st.integers(0, 19),
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_never_takes_a_token_of_probability_zero(
    logits: list[float], dropped: int, uniform: float
) -> None:
    row = torch.tensor([logits])
    row[0, dropped % len(logits)] = -math.inf
    logprobs = torch.log_softmax(row, -1)
    for number in (uniform, 0.0, math.nextafter(1.0, 0.0)):
        token = draw(logprobs, [number]).item()
        assert logprobs[0, token] > -math.inf


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(50, 300) * 3, -1)
    uniforms = torch.rand(50, dtype=torch.float64).tolist()
    together = draw(logprobs, uniforms).tolist()
    assert together == [draw(logprobs[i : i + 1], uniforms[i : i + 1]).item() for i in range(50)]
    assert len(set(together)) > 10


def test_the_logprob_of_a_token_drawn_from_nan_is_nan() -> None:
    logprobs = processed_logprobs(torch.full((1, 4), math.nan), [params()])
    token = draw(logprobs, [0.5]).item()
    assert 0 <= token < 4
    assert math.isnan(logprobs[0, token].item())
