"""Push weights to the generator and accept the new version only after a handshake.

*Delivered*: the generator's checksum of every tensor equals the trainer's, no name is missing, and no
parameter of the generator's own model was left unwritten. *Served*: the generator's log-probabilities of a
probe text equal the trainer's, and its parameters still hold what was written to them, now and before the
next push. What is not confirmed is never trained on.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Gt

from titan_rl.errors import HandshakeError, TitanRLError
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.resilience import faults
from titan_rl.titan.collectives import Collectives
from titan_rl.types import WeightReceipt, WeightUpdate

Kind = Literal["full", "delta", "lora"]
PolicyLogprobs = Callable[[Sequence[int]], Sequence[float]]
"""Log-probabilities of tokens 1 to N - 1 of one text under the policy, at temperature 1. Collective."""


class WeightReceiver(Protocol):
    """What a push needs of a generator."""

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace the weights, and say what arrived."""
        ...

    def altered_weights(self) -> Sequence[str]:
        """Name the parameters that do not hold what was written to them."""
        ...

    def prompt_logprobs(
        self, token_ids: Sequence[tuple[int, ...]], temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """Score given texts under the served weights."""
        ...


@dataclass(kw_only=True, slots=True)
class WeightSyncSection:
    """Table ``[weight_sync]``."""

    max_probe_difference: Annotated[float, Gt(0)] = 5e-4
    """Largest difference of a probe token's log-probability, generator against trainer, in nats. The default
    is for fp32; in bf16 the two engines round differently, and 0.1 is a start."""
    bucket_mib: Annotated[float, Gt(0)] = 256.0
    """Most of the weights that a rank holds beyond its own shards and the generator's copy, in MiB. While one
    half is loaded the other is on its way. A larger tensor is gathered alone, whole."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mib`` in bytes."""
        return int(self.bucket_mib * 2**20)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a step can change of a policy whose other weights are frozen.

    Attributes:
        kind: Of the update: merged weights (``"delta"``), which are in the full stream too, or adapters
            (``"lora"``), which are not and follow it.
        stream: Iterating it gathers and yields them as they are then.
    """

    kind: Literal["delta", "lora"]
    stream: Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a confirmed push took.

    Attributes:
        version: The version now served.
        num_tensors: Tensors sent; 0 when the version was served already.
        num_bytes: Their size.
        seconds: Wall-clock time of the whole push, handshake included.
        probe_difference: Largest difference of the probe's log-probabilities, in nats.
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    probe_difference: float


class WeightSync:
    """Pushes versions of the policy to one generator."""

    def __init__(
        self,
        section: WeightSyncSection,
        *,
        stream: Iterable[tuple[str, torch.Tensor]],
        generator: WeightReceiver,
        policy_logprobs: PolicyLogprobs,
        probe: Sequence[int],
        collectives: Collectives,
        changes: Changes | None = None,
    ) -> None:
        """Bind both sides.

        Args:
            section: Bounds.
            stream: Iterating it gathers and yields the policy's weights as they are then.
            generator: The receiving side.
            policy_logprobs: Scores the probe under the policy.
            probe: Token ids of the probe text, at least two.
            collectives: To reject a push on all ranks alike.
            changes: Those of the policy's weights that training can change, where others are frozen: all that
                is sent after the first push. None: all of them.
        """
        self._changes = changes
        self._section, self._stream, self._generator = section, stream, generator
        self._policy_logprobs, self._probe, self._collectives = policy_logprobs, tuple(probe), collectives
        self._served: int | None = None

    def push(self, version: int) -> PushReport:
        """Send the weights and confirm them: all of them at first, then those that can have changed.

        A version that is served already is confirmed, not sent again.

        Args:
            version: ``policy_version`` of the policy as it is now: the same number means the same weights.

        Raises:
            HandshakeError: on every rank, if any rank's generator does not provably serve these weights.
        """
        started = time.perf_counter()
        sent: dict[str, int] = {}
        sizes: list[int] = []
        faults.at("sync.begin")
        self._agree(self._alteration())  # of the version that was served until now
        if version != self._served:
            base, self._served = self._served, None
            for kind, stream in self._needed(base):
                arriving: dict[str, int] = {}
                broken: list[Exception] = []
                tensors = self._checksummed(stream, arriving, sizes, broken)
                update = WeightUpdate(kind, version, base if kind == "delta" else None, tensors)
                self._agree(self._deliver(update, arriving, broken))
                sent |= arriving
        fault, difference = self._probe_served()
        self._agree(fault or self._alteration())
        self._served = version
        faults.at("sync.end")
        return PushReport(
            version=version,
            num_tensors=len(sent),
            num_bytes=sum(sizes),
            seconds=time.perf_counter() - started,
            probe_difference=difference,
        )

    def _needed(self, base: int | None) -> Iterator[tuple[Kind, Iterable[tuple[str, torch.Tensor]]]]:
        """The updates that bring the generator from the version that it serves, if any, to the next."""
        changes = self._changes
        if base is None or changes is None:
            yield "full", self._stream
        if changes is not None and (base is not None or changes.kind == "lora"):
            yield changes.kind, changes.stream

    def _deliver(self, update: WeightUpdate, sent: dict[str, int], broken: list[Exception]) -> str | None:
        """Hand the stream to the generator; returns what went wrong on this rank.

        Every tensor of the stream takes a collective. Whatever the generator does with it, this rank goes
        through all of them: the others would wait for it for ever.
        """
        receipt, fault = None, None
        try:
            receipt = self._generator.load_weights(update)
        except Exception as error:  # whatever it is, all ranks have to hear of it
            fault = _raised("loading them", error)
        for _ in update.tensors:
            pass
        if broken:
            raise broken[0]  # by the stream, which is the same on all ranks
        return fault if receipt is None else delivery_fault(sent, receipt, update.version)

    def _checksummed(
        self,
        stream: Iterable[tuple[str, torch.Tensor]],
        sent: dict[str, int],
        sizes: list[int],
        broken: list[Exception],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in stream:
                faults.at("sync.bucket", len(sent))
                sent[name] = tensor_checksum(tensor)
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor
        except Exception as error:
            broken.append(error)
            raise

    def _alteration(self) -> str | None:
        """What the probe may not show: a row of the embedding that it has no token for, or a small change."""
        try:
            altered = self._generator.altered_weights()
        except Exception as error:  # as above
            return _raised("looking at its weights", error)
        if not altered:
            return None
        return (
            f"{len(altered)} parameters of the generator were changed after loading, {altered[0]} among them"
        )

    def _probe_served(self) -> tuple[str | None, float]:
        """Compare log-probabilities of the probe: what is wrong, and the largest difference in nats."""
        ours = self._policy_logprobs(self._probe)
        try:
            theirs = self._generator.prompt_logprobs([self._probe])[0]
        except Exception as error:  # as above
            return _raised("scoring the probe", error), math.inf
        difference = math.inf
        if len(ours) == len(theirs):
            differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            # max() alone would pass over a NaN that is not the first.
            difference = max(differences) if all(map(math.isfinite, differences)) else math.inf
        bound = self._section.max_probe_difference
        if difference <= bound:
            return None, difference
        fault = (
            f"its log-probabilities of the probe differ from the policy's by {difference:.2e}, more "
            f"than weight_sync.max_probe_difference = {bound:.0e}: it does not serve what was delivered"
        )
        return fault, difference

    def _agree(self, fault: str | None) -> None:
        """Raise on all ranks, with the first rank's cause, if any rank has a fault."""
        first = self._collectives.first(fault)
        if first is None:
            return
        rank, cause = first
        whose = "" if rank == self._collectives.rank else f" by the generator of rank {rank}"
        raise HandshakeError(f"Weight push refused{whose}: {cause}.")


def _raised(what: str, error: Exception) -> str:
    """Describe an exception of the generator; one that is not ours leaves its traceback on standard error."""
    if not isinstance(error, TitanRLError):
        traceback.print_exception(error)
    return f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}"


def delivery_fault(sent: dict[str, int], receipt: WeightReceipt, version: int) -> str | None:
    """Compare what was sent with what arrived.

    Args:
        sent: Checksum by name on the trainer's side.
        receipt: The generator's side.
        version: The version that was sent.

    Returns:
        What is wrong, or None.
    """
    if receipt.version != version:
        return f"the generator acknowledged version {receipt.version} instead of {version}"
    missing = sorted(set(sent) - set(receipt.checksums))
    if missing:
        return f"{len(missing)} tensors did not arrive, {missing[0]} among them"
    if receipt.unwritten:
        return (
            f"{len(receipt.unwritten)} parameters of the generator were not written, "
            f"{receipt.unwritten[0]} among them: they keep older values"
        )
    changed = sorted(name for name, value in sent.items() if receipt.checksums[name] != value)
    if changed:
        return f"{len(changed)} tensors arrived with other contents, {changed[0]} among them"
    return None
