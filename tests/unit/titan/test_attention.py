"""CPU attention per document is dense-masked attention, values and gradients, without the dense mask.

In float64, so that every comparison is within 1e-12.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder

from titan_rl.titan import device
from titan_rl.titan.attention import CpuDocumentAttention, DocumentSpans, use_cpu_attention
from titan_rl.titan.branches import branch_mask_mod

device.install()

TOLERANCE = 1e-12
ROWS = {
    "ragged": [[5, 1, 7, 3], [2, 2, 9, 3], [16]],
    "one_row": [[3, 8, 5]],
    "single_tokens": [[1] * 16, [1] * 8 + [8]],
    "equal": [[8, 8], [4, 4, 4, 4]],
}


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def same_document(positions: torch.Tensor) -> torch.Tensor:
    """``[B, T, T]``: True where query and key are of one document, from its starts alone."""
    starts = positions == 0
    starts[:, 0] = True
    document = starts.cumsum(1)
    return document[:, :, None] == document[:, None, :]


def dense_attention(query, key, value, mask, scale=None):
    """Softmax attention written out, on ``[B, T, N, H]``, with ``mask [B, T, T]``."""
    repeat = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeat, dim=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("btnh,bsnh->bnts", query, key) * scale
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", weights, value)


def causal_documents(positions: torch.Tensor) -> torch.Tensor:
    length = positions.shape[1]
    return same_document(positions) & torch.ones(length, length, dtype=torch.bool).tril()


def make_qkv(batch, length, *, heads=6, kv_heads=2, dim=4, value_dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    return [
        torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def run(attention, qkv, masks, **options):
    """Output, and the gradients of a fixed weighting of it."""
    out = attention(*qkv, attention_masks=masks, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return out, torch.autograd.grad((out * weights).sum(), qkv)


def expected_of(qkv, mask, **options):
    out = dense_attention(*qkv, mask, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return out, torch.autograd.grad((out * weights).sum(), qkv)


def assert_same(got, expected):
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


@pytest.fixture
def attention() -> CpuDocumentAttention:
    return CpuDocumentAttention.Config().build()


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_it_equals_dense_masked_attention_in_values_and_gradients(attention, rows, heads, kv_heads):
    positions = positions_of(rows)
    qkv = make_qkv(*positions.shape, heads=heads, kv_heads=kv_heads)
    got = run(attention, qkv, DocumentSpans.from_positions(positions), enable_gqa=heads != kv_heads)
    assert_same(got, expected_of(qkv, causal_documents(positions)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=6), min_size=1, max_size=3), st.booleans())
def test_it_equals_dense_masked_attention_whatever_the_documents(rows, is_cut):
    length = min(sum(row) for row in rows)
    positions = torch.stack([positions_of([row])[0, :length] for row in rows])
    if is_cut:  # the row starts in the middle of a document
        positions = positions[:, 1:].contiguous()
    qkv = make_qkv(*positions.shape, heads=2, kv_heads=1)
    attention = CpuDocumentAttention.Config().build()
    got = run(attention, qkv, DocumentSpans.from_positions(positions), enable_gqa=True)
    assert_same(got, expected_of(qkv, causal_documents(positions)))


def test_planted_fault_attention_over_the_whole_row_is_noticed(attention):
    positions = positions_of(ROWS["ragged"])
    qkv = make_qkv(*positions.shape)
    leaking = torch.arange(positions.shape[1]).expand_as(positions)
    got = run(attention, qkv, DocumentSpans.from_positions(leaking), enable_gqa=True)
    with pytest.raises(AssertionError):
        assert_same(got, expected_of(qkv, causal_documents(positions)))


BRANCHES = {
    # Documents and, where positions restart above 0, branches of the document before.
    "one_group": [[0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 3, 4, 0, 1, 2, 3]],
    "two_groups_and_a_document": [
        [0, 1, 2, 3, 2, 3, 4, 2, 0, 1, 2, 0, 1, 2, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 6, 0, 1, 2],
    ],
    "prefixes_of_one_length": [[0, 1, 2, 2, 3, 2, 0, 1, 2, 3, 2, 3, 4, 5, 2, 0]],
    "prefixes_of_two_lengths_in_one_document": [[0, 1, 2, 3, 4, 5, 6, 4, 5, 5, 6, 4, 5, 0, 1, 1]],
    "the_whole_document": [[0, 1, 2, 3, 0, 1, 2, 1, 2, 3, 1, 1, 0, 1, 1, 2]],
}


@pytest.mark.parametrize("rows", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_branches_attend_to_their_prefix_and_to_themselves(attention, rows, heads, kv_heads):
    positions = torch.tensor(rows)
    mask = create_mask(branch_mask_mod(positions), len(rows), None, 16, 16, device="cpu")[:, 0]
    assert not torch.equal(mask, causal_documents(positions))
    qkv = make_qkv(*positions.shape, heads=heads, kv_heads=kv_heads)
    spans = DocumentSpans.from_positions(positions)
    assert spans.branches
    got = run(attention, qkv, spans, enable_gqa=heads != kv_heads)
    assert_same(got, expected_of(qkv, mask))
    block_mask = _titan_mask(Decoder.__new__(Decoder), positions, per_document=False)
    assert_same(run(attention, qkv, block_mask, enable_gqa=heads != kv_heads), got)


def test_planted_fault_a_branch_that_sees_its_sibling_is_noticed(attention):
    positions = torch.tensor(BRANCHES["one_group"])
    mask = create_mask(branch_mask_mod(positions), 1, None, 16, 16, device="cpu")[:, 0]
    qkv = make_qkv(*positions.shape)
    one_piece = torch.tensor([[*range(12), 0, 1, 2, 3]])
    got = run(attention, qkv, DocumentSpans.from_positions(one_piece), enable_gqa=True)
    with pytest.raises(AssertionError):
        assert_same(got, expected_of(qkv, mask))


def test_a_prefix_in_several_buckets_gets_the_gradient_of_all(attention):
    """Branches of very different lengths are computed apart; both have the same prefix."""
    positions = torch.tensor([[0, 1, 2, 3, 2, 3, *range(2, 12)]])
    spans = DocumentSpans.from_positions(positions)
    assert len(spans.branches) == 2
    mask = create_mask(branch_mask_mod(positions), 1, None, 16, 16, device="cpu")[:, 0]
    qkv = make_qkv(1, 16)
    assert_same(run(attention, qkv, spans, enable_gqa=True), expected_of(qkv, mask))


def test_positions_that_restart_beyond_the_document_are_refused():
    with pytest.raises(ValueError, match=r"restart within the document's 2 tokens; got 5"):
        DocumentSpans.from_positions(torch.tensor([[0, 1, 5, 6]]))


def test_branches_are_computed_without_a_mask_over_the_row(attention):
    positions = torch.tensor([[*range(40), *list(range(32, 40)) * 59]])
    length = positions.shape[1]
    assert length == 512
    qkv = make_qkv(1, length, heads=2, kv_heads=1)
    biggest = largest(attention, qkv, lambda: DocumentSpans.from_positions(positions))
    assert biggest <= 59 * 2 * 40 * 8  # keys, or scores, of branches of 8 tokens with a prefix of 32


def test_positions_are_left_as_they_are():
    positions = positions_of([[3, 2]])[:, 1:].contiguous()
    DocumentSpans.from_positions(positions)
    assert positions.tolist() == [[1, 2, 0, 1]]


def test_the_factor_on_the_scores_is_used(attention):
    positions = positions_of(ROWS["one_row"])
    qkv = make_qkv(*positions.shape)
    got = run(attention, qkv, DocumentSpans.from_positions(positions), enable_gqa=True, scale=0.123)
    assert_same(got, expected_of(qkv, causal_documents(positions), scale=0.123))


def test_its_gradient_passes_gradcheck(attention):
    positions = positions_of([[2, 1, 3], [4, 2]])
    spans = DocumentSpans.from_positions(positions)
    qkv = make_qkv(*positions.shape, heads=2, kv_heads=1, dim=2, value_dim=2)
    assert torch.autograd.gradcheck(
        lambda *inputs: attention(*inputs, attention_masks=spans, enable_gqa=True), qkv
    )


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def largest(attention, qkv, masks_of) -> int:
    with LargestTensor() as mode:
        run(attention, qkv, masks_of(), enable_gqa=True)
    return mode.numel


def test_nothing_as_large_as_a_mask_over_the_row_ever_exists(attention):
    rows = [[16, 9, 31, 8] * 8]
    positions = positions_of(rows)
    length = positions.shape[1]
    assert length == 512
    qkv = make_qkv(1, length, heads=2, kv_heads=1)
    biggest = largest(attention, qkv, lambda: DocumentSpans.from_positions(positions))
    assert biggest <= length * 2 * 40  # scores of documents of at most 31 tokens, and the tensors themselves

    def dense_mask():
        decoder = Decoder.__new__(Decoder)
        return _titan_mask(decoder, positions, per_document=False)

    assert largest(attention, qkv, dense_mask) >= length * length  # so the measure does see one


def _titan_mask(decoder, positions, *, per_document):
    config = CpuDocumentAttention.Config(per_document=per_document)
    return decoder._create_flex_attention_mask_for_document(
        positions, SimpleNamespace(inner_attention=config)
    )


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_torchtitans_own_mask_of_packed_documents_gives_the_same(attention, rows):
    positions = positions_of(rows)
    decoder = Decoder.__new__(Decoder)
    block_mask = _titan_mask(decoder, positions, per_document=False)
    spans = _titan_mask(decoder, positions, per_document=True)
    assert isinstance(spans, DocumentSpans)
    qkv = make_qkv(*positions.shape)
    assert_same(run(attention, qkv, spans, enable_gqa=True), run(attention, qkv, block_mask, enable_gqa=True))


def test_other_masks_are_computed_densely_and_once(attention):
    positions = positions_of(ROWS["ragged"])
    rows, length = positions.shape
    same = same_document(positions)
    calls = []

    def window(b, h, q, k):
        calls.append(1)
        return (k <= q) & (q - k < 3) & same[b, q, k]

    block_mask = create_block_mask(window, rows, None, length, length, device="cpu")
    qkv = make_qkv(rows, length)
    made = len(calls)
    got = run(attention, qkv, block_mask, enable_gqa=True)
    again = run(attention, qkv, block_mask, enable_gqa=True)
    assert len(calls) == made + 1
    near = torch.arange(length)[:, None] - torch.arange(length) < 3
    expected = expected_of(qkv, causal_documents(positions) & near)
    assert_same(got, expected)
    assert_same(again, expected)


def test_masks_that_differ_by_head_are_kept_apart(attention):
    def by_head(b, h, q, k):
        return (k <= q) & ((h == 0) | (k == q))

    block_mask = create_block_mask(by_head, 1, 2, 8, 8, device="cpu")
    qkv = make_qkv(1, 8, heads=2, kv_heads=2)
    out = attention(*qkv, attention_masks=block_mask)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None]
    expected = dense_attention(*qkv, causal)
    torch.testing.assert_close(out[:, :, 0], expected[:, :, 0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out[:, :, 1], qkv[2][:, :, 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("option", ["score_mod", "out_transform"])
def test_what_a_cpu_cannot_do_is_refused(attention, option):
    positions = positions_of(ROWS["one_row"])
    with pytest.raises(NotImplementedError, match=option):
        attention(
            *make_qkv(*positions.shape),
            attention_masks=DocumentSpans.from_positions(positions),
            **{option: lambda *args: args[0]},
        )


@pytest.mark.parametrize(
    ("registry", "flavor"), [(llama3, "debugmodel"), (qwen3, "debugmodel"), (qwen3, "debugmodel_moe")]
)
def test_every_attention_of_a_model_is_swapped_and_keeps_its_initialiser_and_sharding(registry, flavor):
    config = registry.model_registry(flavor, attn_backend="flex").model
    found = [attention for _, attention, _, _ in config.traverse(FlexAttention.Config)]
    for index, attention in enumerate(found):
        attention.sharding_config = f"sharding {index % 1}"
    use_cpu_attention(config, per_document=False)
    swapped = [attention for _, attention, _, _ in config.traverse(FlexAttention.Config)]
    assert len(swapped) == len(config.layers) > 1
    assert all(isinstance(attention, CpuDocumentAttention.Config) for attention in swapped)
    assert {attention.sharding_config for attention in swapped} == {"sharding 0"}
    assert not any(attention.per_document for attention in swapped)


def test_an_attention_in_a_list_is_swapped_too():
    holder = [FlexAttention.Config()]

    def traverse(kind):
        yield "inner.0", holder[0], holder, 0

    use_cpu_attention(SimpleNamespace(traverse=traverse))
    assert isinstance(holder[0], CpuDocumentAttention.Config)
    assert holder[0].per_document


def test_attention_in_torch_is_the_reference_of_this_file():
    query, key, value = make_qkv(2, 12, heads=4, kv_heads=2)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    ours = dense_attention(query, key, value, mask[None].expand(2, -1, -1))
    theirs = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=TOLERANCE)
