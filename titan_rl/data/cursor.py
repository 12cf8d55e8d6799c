"""The order in which prompts are drawn: a function of the seed and of one global cursor, and of nothing else.

Which rank generates for which prompt is decided elsewhere; world size, rank and the size of a batch cannot
change the n-th prompt.
"""

from __future__ import annotations

import random

from titan_rl.data.datasets import PromptDataset
from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Prompt


class PromptStream:
    r"""An endless draw from a dataset, addressed by position.

    With N prompts, draw :math:`n` is in epoch :math:`e = \lfloor n/N \rfloor` and is
    :math:`\text{dataset}[\pi_e(n \bmod N)]`, where :math:`\pi_e` is a permutation that depends on
    (seed, e, N) alone, or the identity without shuffling. So every prompt comes exactly once per epoch.
    """

    def __init__(self, dataset: PromptDataset, seed: int, *, shuffle: bool = True) -> None:
        """Prepare the draw; nothing is drawn yet.

        Args:
            dataset: Where the prompts are.
            seed: The run's seed.
            shuffle: False draws in the order of the dataset, in every epoch.

        Raises:
            ConfigError: The dataset is empty.
        """
        if len(dataset) == 0:
            raise ConfigError(f"Dataset {dataset.name}", "hold at least one prompt", 0, "Check its section.")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}

    def at(self, cursor: int) -> tuple[Prompt, int]:
        """Return draw number ``cursor`` (>= 0) and its epoch, counted from 0.

        Raises:
            ValueError: ``cursor`` is negative.
        """
        if cursor < 0:
            raise ValueError(f"cursor must be at least 0; got {cursor}")
        epoch, position = divmod(cursor, len(self._dataset))
        index = self._order(epoch)[position] if self._shuffle else position
        return self._dataset[index], epoch

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Return draws ``cursor`` to ``cursor + count - 1``.

        The caller owns the cursor: it advances it by ``count`` and puts it into the checkpoint.

        Raises:
            ValueError: ``cursor`` or ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0; got {count}")
        return [self.at(position)[0] for position in range(cursor, cursor + count)]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = _permutation(len(self._dataset), derive_seed(self._seed, "prompt order", epoch))
            # A batch can straddle two epochs, so two are kept; more would only hold memory.
            recent = list(self._orders.items())[-1:]
            self._orders = dict([*recent, (epoch, order)])
        return self._orders[epoch]


def _permutation(length: int, seed: int) -> list[int]:
    # Fisher-Yates over random(), whose numbers Python promises never to change; it does not for shuffle().
    draw = random.Random(seed).random
    order = list(range(length))
    for last in range(length - 1, 0, -1):
        other = int(draw() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order
