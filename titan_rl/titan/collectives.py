"""The few collectives that titan_rl needs besides TorchTitan's own: of scalars, flags, a text, barriers.

Rollouts go to the ranks that train on the same rows, and a sample to the rank that trains it; to no others.
Layers above receive a :class:`Collectives` and know no process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

Reduction = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_TEXT_BYTES = 2000


class Collectives:
    """Collectives of a run; each method says over which ranks.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of processes.
        data_rank: Index of this data-parallel rank.
        data_size: Number of data-parallel ranks.
    """

    def __init__(self, parallel_dims: ParallelDims, device: torch.device) -> None:
        """Find the data-parallel group.

        Args:
            parallel_dims: TorchTitan's mesh of the run.
            device: Device of this process; scalars travel on it.
        """
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device = device
        mesh = parallel_dims.get_mesh("batch") if parallel_dims.dp_enabled else None
        self._data_group = mesh.get_group() if mesh is not None else None
        self.data_rank = mesh.get_local_rank() if mesh is not None else 0
        self.data_size = mesh.size() if mesh is not None else 1
        self._row_group = self._find_row_group(parallel_dims)

    def _find_row_group(self, dims: ParallelDims) -> dist.ProcessGroup | None:
        """Group of the ranks that train on the same rows; all groups are made on all ranks."""
        if self.data_size == self.world_size:
            return None
        ranks = torch.arange(self.world_size).view(dims.pp, self.data_size, dims.cp * dims.tp)
        groups: list[Any] = [
            dist.new_group(ranks[:, index].flatten().tolist()) for index in range(self.data_size)
        ]
        return groups[self.data_rank]

    @property
    def is_first_of_its_rows(self) -> bool:
        """Whether no other rank trains on the same rows, or this is the first of those that do."""
        return self._row_group is None or dist.get_rank(self._row_group) == 0

    @property
    def shares_rows(self) -> bool:
        """Whether other ranks train on the same rows."""
        return self._row_group is not None

    def exchange(self, content: bytes) -> list[bytes]:
        """Give bytes to the ranks that train on the same rows. Collective.

        Args:
            content: This rank's.

        Returns:
            Those of all these ranks, this one's among them, in one order.
        """
        if self._row_group is None:
            return [content]
        parts = self._gather(_tensor(content), self._row_group)
        return [bytes(part.numpy()) for part in parts]

    def gather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Integers, such as the lengths of samples, of every data-parallel rank, in their order. Collective.

        Args:
            numbers: This rank's, of any number.
        """
        if self._data_group is None:
            return [list(numbers)]
        parts = self._gather(torch.tensor(numbers, dtype=torch.int64), self._data_group)
        return [part.tolist() for part in parts]

    def _gather(self, values: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """What each rank of a group gave, 1-d tensors of any length, on the CPU."""
        count = dist.get_world_size(group)
        sizes = torch.zeros(count, dtype=torch.int64, device=self._device)
        sizes[dist.get_rank(group)] = len(values)
        dist.all_reduce(sizes, group=group)
        padded = torch.zeros(int(sizes.max()), dtype=values.dtype)
        padded[: len(values)] = values
        if not len(padded):
            return [padded for _ in range(count)]
        parts = [torch.empty_like(padded, device=self._device) for _ in range(count)]
        dist.all_gather(parts, padded.to(self._device), group=group)
        return [part[:size].cpu() for part, size in zip(parts, sizes.tolist(), strict=True)]

    def send(self, parts: Sequence[bytes]) -> list[bytes]:
        """Give every data-parallel rank bytes of its own. Collective.

        Args:
            parts: For each of the ranks, in their order.

        Returns:
            What each of them gave to this rank.
        """
        if self._data_group is None:
            return list(parts)
        sent = torch.tensor([len(part) for part in parts], device=self._device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._data_group)
        sizes = received.tolist()
        content = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(
            content,
            _tensor(b"".join(parts)).to(self._device),
            output_split_sizes=sizes,
            input_split_sizes=sent.tolist(),
            group=self._data_group,
        )
        return [bytes(part.numpy()) for part in content.cpu().split(sizes)]

    def reduce(self, values: Mapping[str, float], how: Reduction) -> dict[str, float]:
        """Reduce named scalars over the data-parallel ranks; all ranks must pass the same names.

        Args:
            values: Scalars by name.
            how: ``sum``, ``max`` or ``min``.
        """
        names = sorted(values)
        if self._data_group is None or not names:
            return {name: float(values[name]) for name in names}
        packed = torch.tensor([float(values[n]) for n in names], dtype=torch.float64, device=self._device)
        dist.all_reduce(packed, op=_OPS[how], group=self._data_group)
        return dict(zip(names, packed.tolist(), strict=True))

    def reduce_scalar(self, value: float, how: Reduction) -> float:
        """Reduce one scalar over the data-parallel ranks."""
        return self.reduce({"": value}, how)[""]

    def gather(self, values: Mapping[str, float]) -> dict[str, list[float]]:
        """Named scalars of every rank of the run, in the order of ranks. Collective.

        Args:
            values: Scalars by name; all ranks must pass the same names.
        """
        names = sorted(values)
        if self.world_size == 1 or not names:
            return {name: [float(values[name])] for name in names}
        packed = torch.tensor([float(values[n]) for n in names], dtype=torch.float64, device=self._device)
        parts = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.all_gather(parts, packed)
        return {name: [float(part[index]) for part in parts] for index, name in enumerate(names)}

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank of the run, whatever its place in the mesh."""
        return self.first("" if flag else None) is not None

    def first(self, text: str | None) -> tuple[int, str] | None:
        """The text of the first rank of the run that has one, whatever its place in the mesh.

        Args:
            text: This rank's; None if it has none. More than 2,000 bytes are cut off.

        Returns:
            The rank and its text, the same on all ranks; None when no rank has one.
        """
        return _first(text, rank=self.rank, world_size=self.world_size, device=self._device)

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self.world_size > 1:
            dist.barrier()


class HostGroup:
    """All ranks of a run, agreeing over gloo: whatever the device, and without waiting for its queue.

    What a background thread asks and what the training loop asks must go through different groups.

    Attributes:
        rank: Global rank of this process.
        world_size: Number of processes.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        """Make the group. Collective.

        Args:
            timeout: How long a rank waits for the others.
        """
        is_distributed = dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None

    def maximum(self, value: int) -> int:
        """The largest value of any rank. Collective."""
        packed = torch.tensor(value)
        if self._group is not None:
            dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=self._group)
        return int(packed.item())

    def first(self, text: str | None) -> tuple[int, str] | None:
        """As :meth:`Collectives.first`."""
        device = torch.device("cpu")
        return _first(text, rank=self.rank, world_size=self.world_size, device=device, group=self._group)


def _tensor(content: bytes) -> torch.Tensor:
    """Bytes as a 1-d tensor; frombuffer() takes no empty ones."""
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first(
    text: str | None, *, rank: int, world_size: int, device: torch.device, group: Any = None
) -> tuple[int, str] | None:
    packed = torch.tensor(world_size if text is None else rank, device=device)
    if world_size > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MIN, group=group)
    source = int(packed.item())
    if source == world_size:
        return None
    content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device)
    encoded = (text or "").encode()[:_TEXT_BYTES]
    content[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    if world_size > 1:
        dist.broadcast(content, src=source, group=group)
    return source, bytes(content.tolist()).rstrip(b"\0").decode(errors="ignore")
