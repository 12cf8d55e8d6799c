"""The handshake after a push and the collectives of scalars, of a rank of fsdp_worker.py."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from titan_rl.errors import GeneratorError, HandshakeError
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.weights import WeightStream
from titan_rl.types import WeightReceipt
from titan_rl.weight_sync.push import WeightSync, WeightSyncSection


class FakeGenerator:
    """Receives what it is sent; scores with given log-probabilities; may forget the last tensor, or fail."""

    def __init__(self, logprobs: tuple[float, ...], *, forgets: bool = False, fails: bool = False) -> None:
        self.logprobs, self.forgets, self.fails = logprobs, forgets, fails

    def altered_weights(self) -> tuple[str, ...]:
        return ()

    def load_weights(self, update: Any) -> WeightReceipt:
        checksums: dict[str, int] = {}
        for name, tensor in update.tensors:
            checksums[name] = tensor_checksum(tensor)
            if self.fails and len(checksums) == 3:
                raise GeneratorError(f"No room for {name}.")
        if self.forgets:
            checksums.popitem()
        return WeightReceipt(update.version, checksums)

    def prompt_logprobs(self, token_ids: Any, temperature: float = 1.0) -> list[tuple[float, ...]]:
        return [self.logprobs]


def check_handshake(rank: SimpleNamespace) -> dict[str, Any]:
    """Rank 1's generator is at fault in three ways; rank 0's is not."""
    collectives = Collectives(rank.parallel_dims, torch.device("cpu"))
    is_faulty = dist.get_rank() == dist.get_world_size() - 1

    def push(generator: FakeGenerator) -> str:
        sync = WeightSync(
            WeightSyncSection(),
            stream=WeightStream(rank.policy, rank.adapter),
            generator=generator,
            policy_logprobs=lambda token_ids: [-1.0, -2.0],
            probe=[1, 2, 3],
            collectives=collectives,
        )
        try:
            return f"version {sync.push(7).version}"
        except HandshakeError as error:
            return str(error)

    return {
        "sound": push(FakeGenerator((-1.0, -2.0))),
        "forgets": push(FakeGenerator((-1.0, -2.0), forgets=is_faulty)),
        "fails": push(FakeGenerator((-1.0, -2.0), fails=is_faulty)),
        "other": push(FakeGenerator((-1.0, math.nan if is_faulty else -2.0))),
    }


def check_collectives(rank: SimpleNamespace) -> dict[str, Any]:
    """Numbers by name, flags and texts of two ranks, and samples sent between them."""
    collectives = Collectives(rank.parallel_dims, torch.device("cpu"))
    number = dist.get_rank()
    mine = {"b": 2.0**53 + number * 2, "a": number + 0.5}
    collectives.barrier()
    sent = [
        [
            f"from {number} to {to}".encode() if to != number or number else b""
            for to in range(collectives.data_size)
        ],
        [b""] * collectives.data_size,
    ]
    return {
        "integers": [
            collectives.gather_integers(n) for n in ([2**40 + number] * (1 + number), [7] * number, [])
        ],
        "sent": [[part.decode() for part in collectives.send(parts)] for parts in sent],
        "place": [collectives.rank, collectives.world_size, collectives.data_rank, collectives.data_size],
        "sum": collectives.reduce(mine, "sum"),
        "max": collectives.reduce(mine, "max"),
        "min": collectives.reduce(mine, "min"),
        "nothing": collectives.reduce({}, "sum"),
        "scalar": collectives.reduce_scalar(dist.get_rank() + 1, "sum"),
        "any": [collectives.any(flag) for flag in (False, dist.get_rank() == 0, True)],
        "first": [
            collectives.first(text)
            for text in (None, f"é{dist.get_rank()}", "late" if dist.get_rank() == 1 else None, "x" * 3000)
        ],
    }
