"""Per-token log-probabilities and entropy of a model over a micro-batch, for trained tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.logprobs import chunked_logprobs


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of a micro-batch.

    Attributes:
        logprobs: ``[B, T]`` fp32, natural log-probability of ``targets`` at the sampling temperature; 0 where
            not trained. With grad when the model trains.
        entropy: ``[B, T]`` fp32 entropy of the distribution in nats, or None.
        teacher_kl: ``[B, T]`` fp32 divergence from the teacher in nats, 0 where not trained, or None.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    teacher_kl: torch.Tensor | None = None


class PrepareInputs(Protocol):
    """Turns a micro-batch into the arguments of a TorchTitan model."""

    def __call__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the tokens and the keyword arguments (positions, masks)."""
        ...


def token_scores(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    prepare: PrepareInputs,
    with_entropy: bool = False,
    divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> TokenScores:
    """Run a model that returns hidden states and score the trained tokens.

    Logits exist only in chunks and only for trained tokens; see
    :func:`titan_rl.functional.logprobs.chunked_logprobs`. Collective: every data-parallel rank must call it
    equally often, with an empty micro-batch if it has nothing.

    Args:
        model: A TorchTitan decoder with ``_skip_lm_head`` set: it returns hidden states ``[B, T, D]``.
        micro_batch: On the model's device.
        temperature: Logits are divided by it.
        prepare: Builds the model's arguments.
        with_entropy: Also return the entropy.
        divergence: From hidden states ``[N, D]`` and output projection ``[V, D]`` to the divergence ``[N]``
            from a teacher (:meth:`titan_rl.policy.teacher.Teacher.compare`), or None without one.
    """
    inputs, kwargs = prepare(micro_batch)
    hidden = model(inputs, **kwargs)
    mask = micro_batch.loss_mask
    head: Any = model.lm_head
    if isinstance(head, FSDPModule):
        # With fsdp_reshard_after_forward = "always" it is sharded again by now; otherwise nothing happens.
        head.unshard()
    trained = hidden[mask]
    logprobs, entropy = chunked_logprobs(
        trained,
        head.weight,
        micro_batch.targets[mask],
        temperature=temperature,
        with_entropy=with_entropy,
    )
    return TokenScores(
        logprobs=_scatter(logprobs, mask),
        entropy=None if entropy is None else _scatter(entropy, mask),
        teacher_kl=None if divergence is None else _scatter(divergence(trained, head.weight), mask),
    )


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put ``[N]`` values back to where the mask ``[B, T]`` is True; 0 elsewhere."""
    empty = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return empty.masked_scatter(mask, values)


class LogprobScorer:
    """A frozen or momentarily frozen model as a scorer: log-probabilities without grad, then resharded."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        prepare: PrepareInputs,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Bind a model.

        Args:
            model: Returns hidden states.
            temperature: Logits are divided by it.
            prepare: Builds the model's arguments.
            context: TorchTitan's context for a forward pass.
        """
        self._model, self._temperature = model, temperature
        self._prepare, self._context = prepare, context

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities ``[B, T]`` fp32 of the trained tokens. Collective."""
        with self._context():
            scores = token_scores(
                self._model, micro_batch, temperature=self._temperature, prepare=self._prepare
            )
        for module in fsdp_modules(self._model):
            # Without a backward pass FSDP keeps the last gathered weights, which the next step makes stale.
            module.reshard()
        return scores.logprobs


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP unit of a model."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
