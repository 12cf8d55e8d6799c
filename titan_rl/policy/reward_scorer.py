"""A trained reward model as a scorer: micro-batches in, one reward per sample out.

It has the policy's parallelism and reads the policy's tokens. Where it comes from is in
:mod:`titan_rl.titan.reward_models`; how its rewards are weighted against others is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.documents import at_last_token
from titan_rl.titan.sharded_model import Hidden, ShardedModel


def token_values(model: ShardedModel, hidden: Hidden) -> torch.Tensor:
    """Values ``[B, T]`` fp32: the one at ``t`` has seen tokens 0 to ``t`` of its document. Collective.

    Args:
        model: A value model (:mod:`titan_rl.titan.value_model`), whose head has been applied.
        hidden: What it gave: one number a token.
    """
    return model.whole_rows(hidden.states.squeeze(-1), hidden)


def document_rewards(
    model: ShardedModel, hidden: Hidden, micro_batch: MicroBatch, num_documents: int
) -> torch.Tensor:
    """The reward of each document: the scalar head's value at its last token. Collective.

    Args:
        model: A value model.
        hidden: What it gave for the micro-batch.
        micro_batch: On the model's device; ``sample_index`` counts the documents from 0.
        num_documents: N; each number below it occurs.

    Returns:
        ``[N]`` fp32, with grad where the model trains.
    """
    return at_last_token(token_values(model, hidden), micro_batch.sample_index, num_documents)


class RewardScorer:
    """A frozen reward model. Collective: every data-parallel rank calls it equally often."""

    def __init__(self, model: ShardedModel) -> None:
        """Bind a model.

        Args:
            model: From :func:`titan_rl.titan.reward_models.open_reward_model`.
        """
        self._model = model

    def __call__(self, micro_batches: Sequence[MicroBatch], num_samples: int) -> torch.Tensor:
        """Reward of every sample of this rank.

        Args:
            micro_batches: On the device, as many as every other rank has, empty ones among them;
                ``sample_index`` counts the rank's samples, over all its micro-batches.
            num_samples: N, this rank's samples. Those that no micro-batch holds get NaN.

        Returns:
            ``[N]`` fp32.
        """
        rows = self._model.scores(micro_batches, lambda _, hidden: token_values(self._model, hidden))
        rewards = torch.full((num_samples,), torch.nan)
        for micro_batch, values in zip(micro_batches, rows, strict=True):
            index = micro_batch.sample_index
            present = index[index >= 0].unique()
            local = torch.searchsorted(present, index.clamp(min=0))
            local = torch.where(index >= 0, local, -1)
            rewards[present.cpu()] = at_last_token(values, local, len(present)).cpu()
        return rewards
