"""Products of low-precision matrices with an fp32 result, for the chunked functions over a vocabulary."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of ``dtype`` are kept in: float64 for float64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_operand(tensor: torch.Tensor) -> torch.Tensor:
    """Cast low precision to fp32 where the device has no product of low precision with an fp32 result."""
    return tensor if tensor.is_cuda else tensor.to(accumulation_dtype(tensor.dtype))


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` with an fp32 result (float64 for float64 operands)."""
    dtype = accumulation_dtype(left.dtype)
    return torch.mm(left, right) if left.dtype == dtype else torch.mm(left, right, out_dtype=dtype)


def scaled_matmul(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale left @ right`` as :func:`matmul` gives it, the factor on ``left`` where that loses no digits.

    Args:
        left: ``[n, k]`` with n k much below the size of the result.
        right: ``[k, m]``.
        scale: In low precision it multiplies the fp32 result, because a rounded operand would lose digits.
    """
    if left.dtype == accumulation_dtype(left.dtype):
        return torch.mm(left * scale, right)
    return matmul(left, right).mul_(scale)


def add_matmul_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, scale: float = 1.0) -> None:
    """``total += scale left @ right`` in the dtype of ``total``, if it can be without a tensor of its size.

    Args:
        total: fp32, or float64 for float64 operands; changed in place.
        left: As for :func:`matmul`.
        right: The same.
        scale: Factor of the product.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(matmul(left, right), alpha=scale)
