"""Rows put together from slices, with the collectives of two ranks replaced by what the other one holds."""

from types import SimpleNamespace

import pytest
import torch

from titan_rl.titan import row_slices

# Two rows of eight tokens. A rank has the outer slices of one row and the inner ones of the other.
INDEX = torch.tensor([[[0, 1, 6, 7], [2, 3, 4, 5]], [[2, 3, 4, 5], [0, 1, 6, 7]]])
VALUES = torch.tensor([[[10.0, 11, 16, 17], [22, 23, 24, 25]], [[12, 13, 14, 15], [20, 21, 26, 27]]])
WHOLE = torch.tensor([[10.0, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27]])


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """A group of two ranks; what both hold is known."""

    def all_gather(slices, mine, group):
        held = VALUES if mine.is_floating_point() else INDEX
        assert group == "cp"
        assert any(torch.equal(mine, of_rank) for of_rank in held)
        for slice_, of_rank in zip(slices, held, strict=True):
            slice_.copy_(of_rank)

    fake = SimpleNamespace(get_world_size=lambda group: 2, all_gather=all_gather, ProcessGroup=object)
    monkeypatch.setattr(row_slices, "dist", fake)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_the_whole_rows_in_the_order_of_their_tokens(rank):
    assert torch.equal(row_slices.gather_rows(VALUES[rank], INDEX[rank], "cp"), WHOLE)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_gradient_of_a_rank_is_that_at_its_own_places_and_of_no_other_rank(rank):
    values = VALUES[rank].clone().requires_grad_()
    weights = torch.arange(1.0, 17.0).view(2, 8) ** 2
    (row_slices.gather_rows(values, INDEX[rank], "cp") * weights).sum().backward()
    expected = torch.stack([weights[row][INDEX[rank, row]] for row in (0, 1)])
    assert torch.equal(values.grad, expected)


def test_the_ranks_gradients_add_up_to_that_of_a_loss_on_the_whole_rows():
    """Of a parameter that every value depends on, by a loss that mixes tokens of both ranks."""

    def loss(rows):
        return rows.logsumexp(1).sum() + (rows[:, 1:] * rows[:, :-1]).sum()

    found = []
    for rank in (0, 1):
        scale = torch.ones((), requires_grad=True)
        loss(row_slices.gather_rows(VALUES[rank] * scale, INDEX[rank], "cp")).backward()
        found.append(scale.grad)
    scale = torch.ones((), requires_grad=True)
    loss(WHOLE * scale).backward()
    torch.testing.assert_close(found[0] + found[1], scale.grad, rtol=1e-6, atol=0)
    assert found[0].abs() > 1
    assert found[1].abs() > 1


def test_slices_that_are_only_laid_side_by_side_are_other_rows():
    assert not torch.equal(torch.cat(list(VALUES), 1), WHOLE)
