"""An integer checksum of a tensor's bits, cheap enough to run on every weight push."""

import functools

import torch

_WORDS = 2**15
"""64-bit words of a block. With weights of at most 2**15, no sum of 32-bit halves leaves 63 bits."""
_ROWS_AT_ONCE = {"cpu": 8}
"""Blocks handled together: on a CPU few enough for its cache."""
_MODULUS = 2**61 - 1
_BASE = 0x9E3779B97F4A7C15 % _MODULUS


def tensor_checksum(tensor: torch.Tensor) -> int:
    r"""Checksum of the bits of a tensor, sensitive to the position of every element.

    The bytes are read as 64-bit words in blocks of :math:`2^{15}`, each word as an upper half :math:`u_i` and
    a lower half :math:`l_i`. With weights :math:`w_i`, a permutation of :math:`1 \dots 2^{15}`, block k gives
    :math:`U_k = \sum_i w_i u_i` and :math:`L_k = \sum_i w_i l_i`, and the checksum is

    .. math:: \Big(\text{number of bytes} + \sum_k (U_k + 3 L_k + 1) g^{k+1}\Big) \bmod 2^{61}-1.

    All sums are exact integer sums, so the result does not depend on the order of addition, the number of
    threads or the device: two sides agree exactly or hold different bits. The halves are summed apart because
    modulo a power of two the flips of two sign bits would cancel.

    Args:
        tensor: Any shape, any real dtype, any device; not modified.

    Returns:
        An integer in [0, 2**61 - 1).

    >>> a = torch.tensor([1.0, 2.0, 3.0])
    >>> tensor_checksum(a) == tensor_checksum(a.clone())
    True
    >>> tensor_checksum(a) == tensor_checksum(torch.tensor([1.0, 3.0, 2.0]))
    False
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()  # words must be aligned to be read
    num_bytes = content.numel()
    whole = num_bytes // 8 // _WORDS * 8 * _WORDS
    blocks = [content[:whole].view(torch.int64).view(-1, _WORDS)]
    if whole < num_bytes:
        last = content[whole:]
        if num_bytes % 8:
            last = torch.nn.functional.pad(last, (0, -num_bytes % 8))
        blocks.append(last.view(torch.int64).view(1, -1))  # what it lacks to a block would be zeros
    total, power = num_bytes, 1
    for upper, lower in _block_sums(blocks):
        power = power * _BASE % _MODULUS
        total = (total + (upper + 3 * lower + 1) * power) % _MODULUS
    return total


def parameter_checksums(model: torch.nn.Module) -> dict[str, int]:
    """:func:`tensor_checksum` of every parameter of a model, by name; empty ones are left out."""
    return {name: tensor_checksum(p) for name, p in model.named_parameters() if p.numel()}


def _block_sums(parts: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Weighted sums of the upper and the lower halves of each block; parts are int64 ``[R, W]``."""
    device = parts[0].device
    weights = _weights(device)
    rows = _ROWS_AT_ONCE.get(device.type, 128)
    uppers, wrapped = [], []
    for part in parts:
        some_weights = weights[: part.shape[1]]
        for some in part.split(rows):
            uppers.append(_weighted_sums(some >> 32, some_weights))
            wrapped.append(_weighted_sums(some, some_weights))
    sums = zip(torch.cat(uppers).tolist(), torch.cat(wrapped).tolist(), strict=True)
    # A word is 2**32 u + l, and int64 sums wrap around modulo 2**64; the lower sum itself is below 2**63.
    return [(upper, (whole - (upper << 32)) % 2**64) for upper, whole in sums]


def _weighted_sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums ``[R]`` of weighted rows ``[R, W]``, modulo 2**64."""
    if words.device.type == "cpu":
        return torch.mv(words, weights)  # one pass; CUDA has no product of integer matrices
    return (words * weights).sum(1)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """``[2**15]`` int64: i(2i + 1) modulo 2**15 takes every value once, without an arithmetic progression."""
    index = torch.arange(_WORDS, dtype=torch.int64, device=device)
    return index * (2 * index + 1) % _WORDS + 1
