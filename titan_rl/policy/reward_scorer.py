"""A trained reward model as a scorer: micro-batches in, one reward per sample out.

It has the policy's parallelism and reads the policy's tokens. Where it comes from is in
:mod:`titan_rl.titan.reward_models`; how its rewards are weighted against others is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.documents import at_last_token
from titan_rl.policy.token_scores import PrepareInputs, fsdp_modules
from titan_rl.titan.value_model import token_values


def document_rewards(
    model: nn.Module, micro_batch: MicroBatch, num_documents: int, *, prepare: PrepareInputs
) -> torch.Tensor:
    """The reward of each document: the scalar head's value at its last token.

    Args:
        model: A value model (:mod:`titan_rl.titan.value_model`).
        micro_batch: On the model's device; ``sample_index`` counts the documents from 0.
        num_documents: N; each number below it occurs.
        prepare: Builds the model's arguments.

    Returns:
        ``[N]`` fp32, with grad where the model trains.
    """
    inputs, kwargs = prepare(micro_batch)
    values = token_values(model, inputs, **kwargs)
    return at_last_token(values, micro_batch.sample_index, num_documents)


class RewardScorer:
    """A frozen reward model. Collective: every data-parallel rank calls it equally often."""

    def __init__(
        self,
        model: nn.Module,
        *,
        prepare: PrepareInputs,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Bind a model.

        Args:
            model: From :func:`titan_rl.titan.reward_models.open_reward_model`.
            prepare: Builds the model's arguments.
            context: TorchTitan's context for a forward pass.
        """
        self._model, self._prepare, self._context = model, prepare, context

    @torch.no_grad()
    def __call__(self, micro_batches: Iterable[MicroBatch], num_samples: int) -> torch.Tensor:
        """Reward of every sample of this rank.

        Args:
            micro_batches: On the device, as many as every other rank has, empty ones among them;
                ``sample_index`` counts the rank's samples, over all its micro-batches.
            num_samples: N, this rank's samples. Those that no micro-batch holds get NaN.

        Returns:
            ``[N]`` fp32.
        """
        rewards: torch.Tensor | None = None
        for micro_batch in micro_batches:
            index = micro_batch.sample_index
            rewards = (
                torch.full((num_samples,), torch.nan, device=index.device) if rewards is None else rewards
            )
            with self._context():
                inputs, kwargs = self._prepare(micro_batch)
                values = token_values(self._model, inputs, **kwargs)
            present = index[index >= 0].unique()
            local = torch.searchsorted(present, index.clamp(min=0))
            local = torch.where(index >= 0, local, -1)
            rewards[present] = at_last_token(values, local, len(present))
            for module in fsdp_modules(self._model):
                # Without a backward pass FSDP would keep the gathered weights.
                module.reshard()
        return torch.full((num_samples,), torch.nan) if rewards is None else rewards
