"""The checksum of a tensor's bits: exact, position-sensitive, and the same however it is summed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.functional.checksum import tensor_checksum

BLOCK_BYTES = 8 * 2**15


def by_hand(tensor: torch.Tensor) -> int:
    """The formula of the docstring in Python integers."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    total, num_bytes = len(content), len(content)
    content += b"\0" * (-num_bytes % BLOCK_BYTES)
    for block in range(len(content) // BLOCK_BYTES):
        upper = lower = 0
        for i in range(2**15):
            start = block * BLOCK_BYTES + 8 * i
            weight = i * (2 * i + 1) % 2**15 + 1
            lower += weight * int.from_bytes(content[start : start + 4], "little")
            upper += weight * int.from_bytes(content[start + 4 : start + 8], "little", signed=True)
        total += (upper + 3 * lower + 1) * pow(0x9E3779B97F4A7C15, block + 1, 2**61 - 1)
    return total % (2**61 - 1)


@pytest.mark.parametrize("num_elements", [0, 1, 5, 2**16, 2**16 + 3, 3 * 2**16 - 1])
def test_it_is_the_formula_of_its_docstring(num_elements):
    generator = torch.Generator().manual_seed(num_elements)
    tensor = torch.randn(num_elements, generator=generator)
    assert tensor_checksum(tensor) == by_hand(tensor)


def test_largest_and_smallest_words_do_not_overflow():
    for word in (-1, -(2**63), 2**63 - 1, 0xFFFFFFFF, -(2**32)):
        tensor = torch.full((2**15,), word, dtype=torch.int64)
        assert tensor_checksum(tensor) == by_hand(tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool]
)
def test_every_dtype_counts_by_its_bits(dtype):
    tensor = (torch.arange(70_001) % 3 == 0).to(dtype)
    changed = tensor.clone()
    changed[-1] = 1 - changed[-1].float()
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    assert tensor_checksum(tensor) == tensor_checksum(tensor.view(torch.uint8))
    assert tensor_checksum(changed) != tensor_checksum(tensor)


@given(
    i=st.integers(0, 199_999),
    j=st.integers(0, 199_999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_two_elements_that_swap_places_are_noticed(i, j, dtype):
    # Values of few bits, the same over long stretches: what sums modulo a power of two confuse.
    tensor = torch.ones(200_000, dtype=dtype)
    tensor[i], tensor[j] = -1.0, 2.0
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].item(), tensor[i].item()
    assert (tensor_checksum(swapped) == tensor_checksum(tensor)) == torch.equal(swapped, tensor)


@pytest.mark.parametrize("step", [1, 2, 2**10, 2**15, 2**16])
def test_the_flips_of_two_signs_do_not_cancel(step):
    tensor = torch.ones(2**17 + 2)
    flipped = tensor.clone()
    flipped[[1, 1 + step]] = -1.0
    assert tensor_checksum(flipped) != tensor_checksum(tensor)
    assert tensor_checksum(-tensor) != tensor_checksum(tensor)


def test_whole_blocks_that_swap_places_are_noticed():
    blocks = torch.randn(3, 2**16, generator=torch.Generator().manual_seed(1))
    assert tensor_checksum(blocks[[1, 0, 2]]) != tensor_checksum(blocks)


def test_zero_and_negative_zero_and_added_zeros_differ():
    zeros = torch.zeros(10)
    assert len({tensor_checksum(t) for t in (zeros, -zeros, torch.zeros(11), torch.zeros(9))}) == 4


def test_nan_payloads_are_bits_like_others():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_checksum(nan[:1]) != tensor_checksum(nan[1:])
    assert tensor_checksum(nan[:1]) == tensor_checksum(nan[:1].clone())


def test_strides_and_offsets_of_the_storage_do_not_matter():
    whole = torch.randn(300, 401, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for view in (whole.T, whole[1:], whole[:, 3:], whole.view(-1)[5:], whole[7, 11]):
        assert tensor_checksum(view) == tensor_checksum(view.clone(memory_format=torch.contiguous_format))


def test_the_number_of_threads_does_not_matter():
    tensor = torch.randn(500_000, generator=torch.Generator().manual_seed(3))
    alone = tensor_checksum(tensor)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert tensor_checksum(tensor) == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_matter():
    tensor = torch.randn(500_000, generator=torch.Generator().manual_seed(4))
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)
