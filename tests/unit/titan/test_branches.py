"""Documents and branches from positions: against a description token by token, and TorchTitan's own mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torchtitan.models import gpt_oss, llama3, qwen3
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)

from titan_rl.titan.branches import Pieces, branch_mask_mod, has_branches, knows_branches, sharers

BRANCH = st.tuples(st.integers(1, 4), st.integers(1, 4))
DOCUMENT = st.tuples(st.integers(1, 5), st.lists(BRANCH, max_size=3))
ROWS = st.lists(st.lists(DOCUMENT, min_size=1, max_size=3), min_size=1, max_size=3)


def described(rows):
    """Positions ``[B, T]`` of rows of (document length, [(prefix, tokens more)]), and who sees whom."""
    positions, origins = [], []
    for row in rows:
        here, seen = [], []  # seen: for each token the indices that it may attend to
        for length, branches in row:
            start = len(here)
            for offset in range(length):
                seen.append([*range(start, start + offset + 1)])
                here.append(offset)
            for prefix, more in branches:
                prefix = min(prefix, length)
                first = len(here)
                # Longer than the piece before is taken for its continuation, so begin at what it has reached.
                if here[-1] + 1 == prefix:
                    continue
                for offset in range(more):
                    own = range(first, first + offset + 1)
                    seen.append([*range(start, start + prefix), *own])
                    here.append(prefix + offset)
        positions.append(here)
        origins.append(seen)
    longest = max(map(len, positions))
    for here, seen in zip(positions, origins, strict=True):
        start = len(here)
        for offset in range(longest - start):
            seen.append([*range(start, start + offset + 1)])
            here.append(offset)
    mask = torch.zeros(len(rows), longest, longest, dtype=torch.bool)
    for row, seen in enumerate(origins):
        for token, others in enumerate(seen):
            mask[row, token, others] = True
    return torch.tensor(positions), mask


def dense(mask_mod, positions):
    rows, length = positions.shape
    return create_mask(mask_mod, rows, None, length, length, device="cpu")[:, 0]


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_the_mask_lets_a_branch_see_its_prefix_and_itself(rows):
    positions, expected = described(rows)
    assert torch.equal(dense(branch_mask_mod(positions), positions), expected)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_without_branches_the_mask_is_torchtitans(rows):
    positions, _ = described([[(length, []) for length, _ in row] for row in rows])
    assert not has_branches(positions)
    theirs = get_efficient_causal_mask_mod_for_packed_document(positions)
    expected = dense(theirs, positions) & dense(get_causal_mask_mod(), positions)
    assert torch.equal(dense(branch_mask_mod(positions), positions), expected)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_a_token_is_of_as_many_samples_as_pieces_see_it_in_a_prefix_and_one_more(rows):
    positions, mask = described(rows)
    pieces = Pieces.of(positions)
    starts = pieces.piece_start == torch.arange(positions.shape[1])
    seen_by = torch.zeros_like(positions)
    for row in range(len(positions)):
        for start in starts[row].nonzero().flatten().tolist():
            others = mask[row, start].clone()
            others[start] = False
            seen_by[row] += others
    assert torch.equal(sharers(positions), 1 + seen_by)
    assert has_branches(positions) == bool((sharers(positions) > 1).any())


def test_a_row_that_begins_within_a_document_counts_from_there():
    positions = torch.tensor([[3, 4, 5, 6, 5, 6]])
    assert Pieces.of(positions).prefix_end.tolist() == [[0, 0, 0, 0, 2, 2]]
    assert positions.tolist() == [[3, 4, 5, 6, 5, 6]]


@pytest.mark.parametrize(
    ("registry", "flavor", "backend", "expected"),
    [
        (llama3, "debugmodel", "flex", True),
        (qwen3, "debugmodel", "flex", True),
        (qwen3, "debugmodel_moe", "flex", True),
        (llama3, "debugmodel", "varlen", False),
        (gpt_oss, "debugmodel", "flex", False),  # sliding windows
    ],
)
def test_models_with_masks_of_their_own_do_not_know_branches(registry, flavor, backend, expected):
    assert knows_branches(registry.model_registry(flavor, attn_backend=backend).model) is expected
