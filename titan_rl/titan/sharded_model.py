"""A decoder under a run's parallelism, run over micro-batches: with gradient, or only to score them.

Tensor, context and pipeline parallelism end here. What computes a loss or a score gets the last hidden states
with the places of their tokens, and gives whole rows: the layers above see neither stages nor slices of rows.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from titan_rl import heartbeat
from titan_rl.titan.branches import has_branches, knows_branches, sharers
from titan_rl.titan.buckets import BUCKET_BYTES, full_buckets, one_by_one
from titan_rl.titan.lora import adapters_off
from titan_rl.titan.pipeline import Pipeline
from titan_rl.titan.router_load import RouterLoad
from titan_rl.titan.row_slices import gather_rows
from titan_rl.titan.state import full_gradients

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

Metrics = dict[str, torch.Tensor]
ReduceGradients = Literal["auto", "every_micro_batch", "last_micro_batch"]
MOST_DEFERRED_BYTES = 2**30
"""``"auto"``: the whole gradient of a model is kept on every rank up to this size."""


class Rows(Protocol):
    """What a model is run over."""

    @property
    def input_ids(self) -> torch.Tensor:
        """``[B, T]`` int64 token ids."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """``[B, T]`` int64, position of each token in its document."""
        ...

    @property
    def sample_index(self) -> torch.Tensor:
        """``[B, T]`` int64, negative in the padding."""
        ...


@dataclass(frozen=True, slots=True)
class Hidden:
    """The model's last hidden states on this rank, and where in the rows their tokens stand.

    Attributes:
        states: ``[B, t, D]`` after the last norm, or what the head gave where it was not skipped: a value
            model's ``[B, t, 1]``. Of all T tokens, or with context parallelism of this
            rank's t = T / cp tokens.
        index: ``[B, t]`` int64, the tokens' places in their rows, 0 to T - 1.
    """

    states: torch.Tensor
    index: torch.Tensor

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of ``[B, T]`` values of whole rows."""
        return values.gather(1, self.index)


class TensorParallelVocabulary:
    """This rank's rows of an output projection that is cut over tensor-parallel ranks, and how to reduce.

    Attributes:
        start: Token id of the first row.
        size: Rows over all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, vocab_size: int) -> None:
        """Find this rank's rows.

        Args:
            group: The tensor-parallel ranks.
            vocab_size: Rows over all ranks.
        """
        self._group, self.size = group, vocab_size
        per_rank = -(-vocab_size // dist.get_world_size(group))
        self.start = min(vocab_size, per_rank * dist.get_rank(group))

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest value over the ranks, element by element, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, element by element, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """``[S, ...]``, the values of each of S ranks; of one shape on all of them."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, values.contiguous(), group=self._group)
        return torch.stack(parts)


class ShardedModel:
    """The parts of a decoder that this rank holds, and how rows go through them.

    Attributes:
        parts: One module, or with pipeline parallelism this rank's stages in their order.
        head: The last module of the decoder, None on a rank without the last stage.
        vocabulary: How the head's rows are cut over ranks; None when this rank has all of them.
    """

    def __init__(
        self, trainer: Trainer, parts: Sequence[nn.Module], model_config: Any, *, schedule: Any = None
    ) -> None:
        """Bind a model that TorchTitan parallelised like a trainer's.

        Args:
            trainer: After its ``__init__``.
            parts: From TorchTitan's ``parallelize_fn`` or ``pipelining_fn``.
            model_config: Its configuration.
            schedule: The pipeline schedule of its stages; None without pipeline parallelism.
        """
        self.parts, self._config = list(parts), model_config
        self._knows_branches = knows_branches(model_config)
        self._dims, self._parallelism = trainer.parallel_dims, trainer.config.parallelism
        self._device, self._train_context = trainer.device, trainer.train_context
        self._dtype = TORCH_DTYPE_MAP[trainer.config.training.mixed_precision_param]
        pipeline_mesh = self._dims.get_optional_mesh("pp")
        self._pipeline = None
        if pipeline_mesh is not None:
            self._pipeline = Pipeline(
                self.parts, schedule, group=pipeline_mesh.get_group(), device=self._device
            )
        self.head: Any = next((part.lm_head for part in self.parts if part.lm_head is not None), None)
        tensor_mesh = self._dims.get_optional_mesh("tp")
        self.vocabulary = None
        if tensor_mesh is not None:
            self.vocabulary = TensorParallelVocabulary(tensor_mesh.get_group(), model_config.vocab_size)
        context_mesh = self._dims.get_optional_mesh("cp")
        self._context_mesh = context_mesh
        self._context_group = None if context_mesh is None else context_mesh.get_group()
        self._router_load: RouterLoad | None = None
        self._reduces: ReduceGradients = "auto"

    @classmethod
    def of_trainer(cls, trainer: Trainer) -> ShardedModel:
        """The model that a trainer trains."""
        schedule = getattr(trainer, "pp_schedule", None)
        return cls(trainer, trainer.model_parts, trainer.model_config, schedule=schedule)

    def reduce_gradients(self, when: ReduceGradients) -> None:
        """Choose when :meth:`forward_backward` adds gradients up over ranks; ``"auto"`` if not called.

        Reduced only after the last micro-batch, they travel once per step, but until then every rank keeps
        the whole gradient of the model instead of its shard, and the weights whole from one micro-batch to
        the next, which then does not gather them again. The sum over replicas (HSDP) waits for the last
        micro-batch in any case, because that takes no memory, and so does a pipeline's schedule.

        Args:
            when: ``"auto"``: after the last one where the whole gradient takes at most 1 GiB.
        """
        self._reduces = when

    def skip_head(self) -> None:
        """Make the model give hidden states; the head is applied by what they are given to."""
        for part in self.parts:
            part._skip_lm_head = True  # pyrefly: ignore[bad-argument-type]  # typed as any nn.Module

    def unsharded_head(self) -> Any:
        """The head with its weight gathered over data-parallel ranks; to be called in the forward pass."""
        if isinstance(self.head, FSDPModule):
            # With fsdp_reshard_after_forward = "always" it is sharded again by now; else nothing happens.
            self.head.unshard()
        return self.head

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds a shard of."""
        return (parameter for part in self.parts for parameter in part.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers that this rank holds."""
        return (buffer for part in self.parts for buffer in part.buffers())

    def state_dict(self) -> dict[str, Any]:
        """Weights and buffers that this rank holds a shard of, by TorchTitan's names."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: Of all parts.
            strict: Whether it must hold everything.
        """
        for part in self.parts:
            names = part.state_dict().keys()
            part.load_state_dict({n: state[n] for n in names if strict or n in state}, strict=strict)

    def full_state(
        self, *, bucket_bytes: int = BUCKET_BYTES, names: Container[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and buffers as full tensors, in one order on all ranks, in buckets. Collective.

        Args:
            bucket_bytes: Most that is gathered at once, of what is not read yet.
            names: TorchTitan's names of what is wanted; None: everything.

        Yields:
            TorchTitan's name and the tensor. Every rank must consume all of them.
        """
        gather = functools.partial(full_buckets, bucket_bytes=bucket_bytes, names=names)
        buckets = gather(self.parts[0]) if self._pipeline is None else self._pipeline.shared(gather)
        return one_by_one(buckets)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Accumulated gradients as full tensors, one at a time; zeros where there is none. Collective.

        Yields:
            The parameter's name, without the wrappers of activation checkpointing, and its gradient. Every
            rank must consume all of them.
        """
        if self._pipeline is None:
            return full_gradients(self.parts[0])
        return one_by_one(
            self._pipeline.shared(lambda part: (deque([pair]) for pair in full_gradients(part)))
        )

    def union(self, names: set[str]) -> set[str]:
        """Names of the parts of all pipeline ranks together. Collective.

        Args:
            names: This rank's.
        """
        return names if self._pipeline is None else self._pipeline.union(names)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within it the model is that of its frozen weights; the adapters of ``[lora]`` add nothing."""
        return adapters_off(self.parts)

    # ---------------------------------------------------------------------------------------- running

    def forward_backward(
        self, batches: Sequence[Rows], loss: Callable[[int, Hidden], tuple[torch.Tensor, Metrics]]
    ) -> list[Metrics]:
        """Accumulate the gradient of a sum of losses, one per micro-batch. Collective.

        FSDP sums gradients over data- and context-parallel ranks: a loss is to be divided by the counts of
        the whole step. All ranks that share rows compute the same loss.

        Args:
            batches: This rank's micro-batches, as many as every other rank has.
            loss: From a micro-batch's number and hidden states to its loss, 0-d with grad, and its metrics.
                Called where the hidden states are, within TorchTitan's context.

        Returns:
            The metrics by micro-batch, on all ranks.
        """
        if self._pipeline is not None:
            prepared = [self.prepare(rows) for rows in self._pipeline.padded(batches)]
            with self._train_context():
                return self._pipeline.forward_backward(
                    prepared, len(batches), lambda number, states, index: loss(number, Hidden(states, index))
                )
        metrics = []
        for number, rows in enumerate(batches):
            heartbeat.beat()
            self._hold_reduction(is_last=number == len(batches) - 1)
            inputs, kwargs, index = self.prepare(rows)
            with self._train_context():
                value, measured = loss(number, Hidden(self.parts[0](inputs, **kwargs), index))
                value.backward()
            metrics.append(measured)
        return metrics

    def _hold_reduction(self, *, is_last: bool) -> None:
        """Whether the next backward pass adds gradients up over ranks, those of the passes before it too."""
        defers = self._reduces == "last_micro_batch"
        if self._reduces == "auto":
            # TorchTitan reduces in fp32; a parameter counts whole here, however it is sharded.
            defers = sum(4 * parameter.numel() for parameter in self.parameters()) <= MOST_DEFERRED_BYTES
        for part in self.parts:
            if isinstance(part, FSDPModule) and defers:
                part.set_requires_gradient_sync(is_last)
                # Where there is room for whole gradients there is room for the weights, until the next pass.
                part.set_reshard_after_backward(is_last)
            elif isinstance(part, FSDPModule):
                part.set_requires_all_reduce(is_last)

    @property
    def has_stages(self) -> bool:
        """Whether the last hidden states are on the ranks of a pipeline's last stage only."""
        return self._pipeline is not None

    @torch.no_grad()
    def scores_of_last_stage(
        self, batches: Sequence[Rows], score: Callable[[int, Hidden], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Run without gradient, and leave nothing gathered. Collective.

        Args:
            batches: As for :meth:`forward_backward`.
            score: From a micro-batch's number and hidden states to a tensor.

        Returns:
            What it gave, by the micro-batch's number; nothing on a rank without the last stage.
        """
        scores: dict[int, torch.Tensor] = {}
        for number, rows in enumerate(batches):
            heartbeat.beat()
            with self._train_context():
                hidden = self.forward(rows)
                if hidden is not None:
                    scores[number] = score(number, hidden)
        self.reshard()
        if self._pipeline is not None:
            self._pipeline.wait_for_sends()
        return scores

    def scores(
        self, batches: Sequence[Rows], score: Callable[[int, Hidden], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run without gradient, and leave nothing gathered. Collective.

        Args:
            batches: As for :meth:`forward_backward`.
            score: From a micro-batch's number and hidden states to ``[B, T]`` fp32.

        Returns:
            What it gave for every micro-batch, on all ranks.
        """
        scores = self.scores_of_last_stage(batches, score)
        if self._pipeline is None:
            return list(scores.values())
        return self._pipeline.from_last_stage(scores, [tuple(rows.input_ids.shape) for rows in batches])

    def forward(self, rows: Rows) -> Hidden | None:
        """The hidden states of one micro-batch; None on a rank without the last stage. Collective.

        Without gradient where there are several stages. To be called within TorchTitan's context.

        Args:
            rows: This rank's micro-batch.
        """
        inputs, kwargs, index = self.prepare(rows)
        if self._pipeline is None:
            return Hidden(self.parts[0](inputs, **kwargs), index)
        # Between stages the tokens are cut over tensor-parallel ranks, with sequence parallelism.
        slices = self._dims.tp if self._parallelism.enable_sequence_parallel else 1
        shape = (inputs.shape[0], inputs.shape[1] // slices, self._config.dim)
        states = self._pipeline.forward(inputs, kwargs, shape=shape, dtype=self._dtype)
        return None if states is None else Hidden(states, index)

    def whole_rows(self, values: torch.Tensor, hidden: Hidden) -> torch.Tensor:
        """Put this rank's tokens' values back into whole rows, with those of the other slices. Collective.

        Gradients flow to this rank's values alone: every rank computes the same loss on the whole rows, and
        the ranks' gradients of the weights are added up.

        Args:
            values: ``[B, t]``, one for each of the hidden states.
            hidden: Says where they belong.

        Returns:
            ``[B, T]``.
        """
        group = self._context_group
        return values if group is None else gather_rows(values, hidden.index, group)

    def reshard(self) -> None:
        """Shard everything again. Without a backward pass FSDP keeps gathered weights, soon stale ones."""
        for part in self.parts:
            for module in fsdp_modules(part):
                module.reshard()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradient down to a norm. Collective.

        Args:
            max_norm: Largest norm over all parameters of all ranks.

        Returns:
            The norm before.
        """
        norm = clip_grad_norm_(
            list(self.parameters()),
            max_norm,
            foreach=True,
            pp_mesh=self._dims.get_optional_mesh("pp"),
            ep_enabled=self._dims.ep_enabled,
        )
        return float(norm)

    def watch_routers(self) -> None:
        """Count what the routers of a mixture of experts do in training passes; nothing for a dense model."""
        if any(getattr(layer, "moe", None) is not None for layer in self._config.layers):
            self._router_load = RouterLoad(self.parts, self._dims)

    def take_router_load(self) -> torch.Tensor:
        """Give TorchTitan's load-balancing hook the step's counts, and return them. Collective.

        To be called between the last backward pass of a step and the optimiser's step, also if that is then
        skipped: the next step counts anew.

        Returns:
            ``[L, E]``, on all ranks how often each of E experts was chosen in each of the L layers that have
            experts, over all stages, ranks and micro-batches; no layers for a dense model, or when no real
            token was trained on.
        """
        nothing = torch.zeros(0, 0)
        if self._router_load is None:
            return nothing
        layers = self._router_load.take()
        if self._pipeline is not None:
            texts = self._pipeline.texts(json.dumps(layers))
            layers = {name: counts for text in texts for name, counts in json.loads(text).items()}
        counts = torch.tensor([layers[name] for name in sorted(layers)])
        return counts if bool(counts.any()) else nothing

    def prepare(self, rows: Rows) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        """What TorchTitan's trainer does to a batch between data loader and model.

        Args:
            rows: A micro-batch.

        Returns:
            This rank's tokens, the model's keyword arguments, and the tokens' places in their rows.

        Raises:
            ValueError: rows share prompts, which the model's attention cannot follow.
        """
        inputs, positions = rows.input_ids, rows.positions
        if not self._knows_branches and has_branches(positions):
            raise ValueError("This model's attention cannot follow positions that restart within a document.")
        index = torch.arange(inputs.shape[1], device=inputs.device).repeat(inputs.shape[0], 1)
        kwargs: dict[str, Any] = {"positions": positions}
        attention = getattr(self._config.first_attention, "inner_attention", None)
        if isinstance(attention, FlexAttention.Config | VarlenAttention.Config):
            model: Any = self.parts[0]
            kwargs["attention_masks"] = model.get_attention_masks(positions=positions)
        if self._context_mesh is not None:
            inputs, index, kwargs = prepare_context_parallel_input(
                inputs,
                index,
                kwargs,
                self._context_mesh,
                self._device,
                self._parallelism.context_parallel_load_balancer,
                self._parallelism.context_parallel_ptrr_mask_key,
            )
        if self._parallelism.spmd_backend == "spmd_types":
            inputs, index, kwargs = annotate_input_spmd_types(self._dims, inputs, index, kwargs)
        if self._router_load is not None and torch.is_grad_enabled():
            weights = sharers(positions) * (rows.sample_index >= 0)
            self._router_load.expect(kwargs["positions"], weights.gather(1, index))
        return inputs, kwargs, index


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP unit of a model."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
