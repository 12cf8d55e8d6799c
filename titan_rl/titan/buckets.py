"""Whole tensors of a sharded model, a bucket at a time: which travel together, and when they are gathered.

What is gathered is held until it is read, so that a bucket bounds the memory that a weight push takes beside
the shards. Names and order are :mod:`titan_rl.titan.state`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from titan_rl.titan.state import parts

BUCKET_BYTES = 256 * 2**20
"""Size of a bucket where nothing else is said."""

T = TypeVar("T")
Bucket = deque[tuple[str, torch.Tensor]]
"""Names and tensors. Whoever reads them takes them out, so that nobody else holds what was read."""


def in_buckets(
    units: Iterable[Sequence[T]], *, size_of: Callable[[T], int], bucket_bytes: int
) -> Iterator[list[T]]:
    """Cut a sequence into buckets of half the size, so that one can be gathered while another is read.

    The items of a unit stay together if they fit: an engine that fuses them holds them until it has all. An
    item that is larger than a bucket is one by itself.

    Args:
        units: Items in order, grouped.
        size_of: Bytes of an item.
        bucket_bytes: Size of a bucket.

    >>> list(in_buckets([[1, 2], [3], [9], [1]], size_of=lambda size: size, bucket_bytes=8))
    [[1, 2], [3], [9], [1]]
    """
    limit, bucket, total = bucket_bytes // 2, [], 0
    for unit in units:
        if total + sum(map(size_of, unit)) > limit and bucket:
            yield bucket
            bucket, total = [], 0
        for item in unit:
            if total + size_of(item) > limit and bucket:
                yield bucket
                bucket, total = [], 0
            bucket.append(item)
            total += size_of(item)
    if bucket:
        yield bucket


def peak_bytes(sizes: Iterable[int], *, bucket_bytes: int) -> int:
    """Most that is held at once: two neighbours, unless they are together more than a bucket.

    Args:
        sizes: Of the buckets of :func:`in_buckets`, in order.
        bucket_bytes: Size of a bucket.

    >>> peak_bytes([3, 3, 9, 1], bucket_bytes=8), peak_bytes([3, 3, 1], bucket_bytes=8)
    (9, 6)
    """
    peak = before = 0
    for size in sizes:
        together = before + size
        peak = max(peak, size, together if together <= bucket_bytes else 0)
        before = size
    return peak


@torch.no_grad()
def full_buckets(
    model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, names: Container[str] | None = None
) -> Iterator[Bucket]:
    """Gather the state dict. Collective over the ranks that shard the model.

    While a bucket is read the next one is on its way, if both are no more than ``bucket_bytes``.

    Args:
        model: A TorchTitan decoder, or some of its layers.
        bucket_bytes: Most that is gathered at once. A larger tensor is gathered alone.
        names: TorchTitan's names of what is gathered; None: everything.

    Yields:
        TorchTitan's names and the full tensors.
    """
    units = (
        [item for item in module.state_dict(prefix=prefix).items() if names is None or item[0] in names]
        for prefix, module in parts(model)
    )
    ahead: Bucket = deque()
    for bucket in in_buckets(units, size_of=_full_bytes, bucket_bytes=bucket_bytes):
        if ahead and sum(map(_full_bytes, (*ahead, *bucket))) > bucket_bytes:
            yield _gathered(ahead)
        begun = deque((name, _begin(value)) for name, value in bucket)
        bucket.clear()
        if ahead:
            yield _gathered(ahead)
        ahead = begun
    if ahead:
        yield _gathered(ahead)


def one_by_one(buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of buckets, each released when the next one is asked for."""
    for bucket in buckets:
        while bucket:
            yield bucket.popleft()


def _full_bytes(item: tuple[str, torch.Tensor]) -> int:
    return item[1].numel() * item[1].element_size()  # of a DTensor the whole one's


def _begin(value: torch.Tensor) -> torch.Tensor:
    """Start to gather, without waiting where the collective can run by itself."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim, async_op=True)


def _gathered(begun: Bucket) -> Bucket:
    """Wait for everything, and hand it over: nothing stays in ``begun``."""
    whole: Bucket = deque()
    while begun:
        name, value = begun.popleft()
        tensor = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        whole.append((name, tensor.detach()))
    return whole
