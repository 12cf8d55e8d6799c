"""The stages of a pipeline: forward-backward on torch's schedule, and a forward pass of its own for scoring.

A schedule's number of micro-batches is fixed and all have one shape, so that a step is filled up with empty
rows. Scoring does not use the schedule: evaluating on an interleaved one spoils the next training step in
torch 2.14.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_rl import heartbeat
from titan_rl.titan.buckets import Bucket

Prepared = tuple[torch.Tensor, dict[str, Any], torch.Tensor]
Metrics = dict[str, torch.Tensor]

_MOST_SENDS = 4  # activations of scoring that a rank holds until the next stage has taken them


class Pipeline:
    """This rank's stages among those of all pipeline ranks; stage ``s`` lies on rank ``s`` modulo ranks."""

    def __init__(
        self, parts: Sequence[nn.Module], schedule: Any, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Bind the stages.

        Args:
            parts: This rank's, in order.
            schedule: Torch's, over these stages, or None for a model that is only scored.
            group: The ranks of one pipeline.
            device: Where activations are received.
        """
        self._parts, self._schedule, self._group, self._device = list(parts), schedule, group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    # ------------------------------------------------------------------------------------- training

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one run of the schedule."""
        return self._schedule._n_microbatches

    def padded(self, batches: Sequence[Any]) -> list[Any]:
        """Fill up with empty rows to a multiple of :attr:`micro_batches`.

        Args:
            batches: With ``input_ids``, ``positions`` and ``sample_index`` of one shape; at least one.

        Raises:
            ValueError: their shapes differ, which a schedule cannot take.
        """
        shapes = {tuple(rows.input_ids.shape) for rows in batches}
        if len(shapes) != 1:
            raise ValueError(f"The micro-batches of a pipeline must have one shape; got {sorted(shapes)}.")
        first = batches[0].input_ids
        tokens = torch.arange(first.shape[1], device=first.device).repeat(first.shape[0], 1)
        nothing = torch.full_like(first, -1)
        empty = SimpleNamespace(input_ids=torch.zeros_like(first), positions=tokens, sample_index=nothing)
        return [*batches, *[empty] * (-len(batches) % self.micro_batches)]

    def forward_backward(
        self,
        prepared: Sequence[Prepared],
        num_real: int,
        loss: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Metrics]],
    ) -> list[Metrics]:
        """Accumulate the gradient of a sum of losses. Collective.

        Args:
            prepared: Inputs, arguments and places by micro-batch, a multiple of :attr:`micro_batches`.
            num_real: How many of them, at the start, have a loss. The others only keep the schedule full.
            loss: From a micro-batch's number, its hidden states and places to its loss and metrics; called on
                the rank of the last stage.

        Returns:
            The metrics of the real micro-batches, on all ranks of the pipeline.
        """
        metrics: dict[int, Metrics] = {}

        def of_micro_batch(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            number = int(target)
            if number >= num_real:
                return states.sum() * 0.0
            # The first call is torch's own, to learn the shapes of gradients; the second one overwrites it.
            value, metrics[number] = loss(number, states, prepared[number][2])
            return value

        self._schedule._loss_fn = of_micro_batch
        is_first, is_last = self._rank == 0, self._rank == self._ranks - 1
        for start in range(0, len(prepared), self.micro_batches):
            heartbeat.beat()
            chosen = prepared[start : start + self.micro_batches]
            numbers = [torch.tensor(start + offset) for offset in range(len(chosen))]
            self._schedule.step(
                arg_mbs=[(inputs,) for inputs, _, _ in chosen] if is_first else None,
                kwarg_mbs=[kwargs for _, kwargs, _ in chosen],
                target_mbs=numbers if is_last else None,
                losses=[] if is_last else None,
                return_outputs=False,
            )
        found = [metrics[number] for number in range(num_real)] if is_last else None
        return self._metrics_of_last_stage(found)

    def _metrics_of_last_stage(self, metrics: list[Metrics] | None) -> list[Metrics]:
        text = None
        if metrics is not None:
            text = json.dumps([{name: float(value) for name, value in part.items()} for part in metrics])
        values = json.loads(self.text_of_last_stage(text))
        return [{n: torch.tensor(v, dtype=torch.float64) for n, v in part.items()} for part in values]

    # -------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def forward(
        self, inputs: torch.Tensor, kwargs: dict[str, Any], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Run one micro-batch through all stages, without gradient. Collective.

        Micro-batches follow one another through the stages: a rank goes on to the next one when its part is
        sent. With several stages a rank it waits for the others in between.

        Args:
            inputs: Token ids, known to all ranks.
            kwargs: The model's arguments.
            shape: Of what one stage hands to the next.
            dtype: The same.

        Returns:
            What the last stage gives, on its rank; None on the others.
        """
        states = inputs
        for position, part in enumerate(self._parts):
            stage, last = position * self._ranks + self._rank, len(self._parts) * self._ranks - 1
            if stage > 0:
                states = torch.empty(shape, dtype=dtype, device=self._device)
                dist.recv(states, group=self._group, group_src=(stage - 1) % self._ranks)
            states = part(states, **kwargs)
            if stage == last:
                return states
            self._send(states, stage + 1)
        return None

    def _send(self, states: torch.Tensor, stage: int) -> None:
        # gloo says that a send is complete only to who waits for it, so what is kept has a bound of its own.
        while len(self._sends) >= _MOST_SENDS:
            self._sends.popleft()[0].wait()
        states = states.contiguous()
        work = dist.isend(states, group=self._group, group_dst=stage % self._ranks)
        self._sends.append((work, states))  # kept until it is sent

    def wait_for_sends(self) -> None:
        """Until the next stages have what :meth:`forward` sent them."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def from_last_stage(
        self, scores: Mapping[int, torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Give every rank the scores that the rank of the last stage has. Collective.

        Args:
            scores: fp32, by number; empty on the other ranks.
            shapes: Of all scores, known to all ranks.
        """
        found = []
        for number, shape in enumerate(shapes):
            score = scores.get(number)
            values = torch.empty(shape, device=self._device) if score is None else score.float().contiguous()
            dist.broadcast(values, group=self._group, group_src=self._ranks - 1)
            found.append(values)
        return found

    # ------------------------------------------------------------------------- what all stages hold

    def shared(self, buckets_of: Callable[[nn.Module], Iterator[Bucket]]) -> Iterator[Bucket]:
        """The tensors of all stages, stage by stage, sent by the rank of the stage to the others. Collective.

        Args:
            buckets_of: From a stage to its names and full tensors.
        """
        for position in range(len(self._parts)):
            for owner in range(self._ranks):
                if owner == self._rank:
                    yield from self._sent(buckets_of(self._parts[position]), owner)
                else:
                    yield from self._received(owner)

    def _sent(self, buckets: Iterator[Bucket], owner: int) -> Iterator[Bucket]:
        for bucket in buckets:
            descriptions = [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in bucket
            ]
            self.text_of(owner, json.dumps(descriptions))
            self._broadcast([tensor.contiguous() for _, tensor in bucket], owner)
            yield bucket
        self.text_of(owner, "null")

    def _received(self, owner: int) -> Iterator[Bucket]:
        while (descriptions := json.loads(self.text_of(owner, None))) is not None:
            bucket: Bucket = deque()
            for name, dtype, shape in descriptions:
                bucket.append((name, torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)))
            self._broadcast([tensor for _, tensor in bucket], owner)
            yield bucket

    def _broadcast(self, tensors: Sequence[torch.Tensor], owner: int) -> None:
        """Send some tensors at once, or receive them."""
        options: Any = {"group": self._group, "group_src": owner, "async_op": True}
        works: list[Any] = [dist.broadcast(tensor, **options) for tensor in tensors]
        for work in works:
            work.wait()

    def union(self, names: set[str]) -> set[str]:
        """The names of all ranks together. Collective."""
        return {name for part in self.texts(json.dumps(sorted(names))) for name in json.loads(part)}

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks of the pipeline, in their order. Collective.

        Args:
            text: This rank's.
        """
        return [self.text_of(owner, text) for owner in range(self._ranks)]

    def text_of_last_stage(self, text: str | None) -> str:
        """Give every rank a text of the rank of the last stage. Collective.

        Args:
            text: None on the other ranks.
        """
        return self.text_of(self._ranks - 1, text)

    def text_of(self, owner: int, text: str | None) -> str:
        """Give every rank a text of one rank. Collective.

        Args:
            owner: Rank in the pipeline.
            text: None on the other ranks.
        """
        content = torch.tensor(list((text or "").encode()), dtype=torch.uint8, device=self._device)
        size = torch.tensor(content.numel(), device=self._device)
        dist.broadcast(size, group=self._group, group_src=owner)
        if self._rank != owner:
            content = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(content, group=self._group, group_src=owner)
        return bytes(content.tolist()).decode()
