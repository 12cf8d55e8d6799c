"""Values per token to values per document, against loops over the rows."""

import pytest
import torch

from titan_rl.functional.documents import at_last_token, document_sum

INDEX = torch.tensor([[2, 2, 0, 0, 0, -1], [1, 3, 3, 3, -1, -1]])
VALUES = torch.arange(12.0).view(2, 6)


def test_sums_are_those_of_the_trained_tokens_and_the_gradient_is_the_mask():
    mask = torch.tensor([[False, True, False, True, True, False], [True, False, True, True, False, False]])
    values = VALUES.clone().masked_fill(~mask, float("nan")).requires_grad_()
    sums = document_sum(values, mask, INDEX, 4)
    assert sums.tolist() == [3.0 + 4.0, 6.0, 1.0, 8.0 + 9.0]
    sums.sum().backward()
    assert torch.equal(values.grad, mask.float())


def test_the_last_token_of_each_document_has_the_gradient():
    values = VALUES.clone().requires_grad_()
    last = at_last_token(values, INDEX, 4)
    assert last.tolist() == [4.0, 6.0, 1.0, 9.0]
    (last * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert values.grad.nonzero().tolist() == [[0, 1], [0, 4], [1, 0], [1, 3]]
    assert values.grad.sum() == 10.0


def test_no_documents_give_nothing_but_stay_in_the_graph():
    values = torch.zeros(1, 4, requires_grad=True)
    empty = torch.full((1, 4), -1)
    for result in (document_sum(values, empty >= 0, empty, 0), at_last_token(values, empty, 0)):
        assert result.shape == (0,)
        result.sum().backward()
    assert values.grad.tolist() == [[0.0] * 4]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="sample_index must have the shape of values"):
        at_last_token(VALUES, INDEX[:1], 4)
