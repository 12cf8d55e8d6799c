"""Training a policy on preferences: the loss of ``[loss]`` on log-probabilities of whole completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from titan_rl.algorithms.preference_losses import DEFAULT
from titan_rl.algorithms.preference_registry import PREFERENCE_LOSSES
from titan_rl.config.choice import Choice
from titan_rl.data.preferences import Preference
from titan_rl.errors import NonFiniteError, StopRequestedError
from titan_rl.functional.documents import document_sum
from titan_rl.policy.reference_cache import ReferenceCache, completion_key, weights_fingerprint
from titan_rl.policy.token_scores import token_scores
from titan_rl.titan.api import Trainer, logger
from titan_rl.titan.sharded_model import Hidden
from titan_rl.trainers.pair_batches import PairBatch
from titan_rl.trainers.pair_sections import PairReferenceSection
from titan_rl.trainers.pair_trainer import PairTrainer

_REDUCED_AT_ONCE, _SCORED_AT_ONCE = 4096, 64


class PreferenceTrainer(PairTrainer):
    """Preference optimisation as a TorchTitan trainer.

    The reference is the policy before the first step. Its log-probabilities are computed before a checkpoint
    is restored, by the policy itself, and kept on disk: no second model is ever held.
    """

    kind = "preference"

    @dataclass(kw_only=True, slots=True)
    class Config(PairTrainer.Config):
        """The sections of a preference run."""

        loss: Annotated[object, Choice(PREFERENCE_LOSSES)] = field(  # pyrefly: ignore[bad-override]
            default_factory=DEFAULT
        )
        """What is minimised: table ``[loss]`` with ``type``."""
        reference: PairReferenceSection = field(default_factory=PairReferenceSection)
        """The frozen policy of before the first step."""

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        """Build as :class:`PairTrainer` does; the head is applied to trained tokens only, in chunks."""
        super().__init__(config)
        self.policy.skip_head()

    @classmethod
    def pairs_for(cls, config: Any) -> str:
        """The loss by its name."""
        return f'loss.type = "{Choice(PREFERENCE_LOSSES).name_of(config.loss)}"'

    def values(self, batch: PairBatch, hidden: Hidden) -> torch.Tensor:
        """Log-probability of each completion under the policy, ``[N]``."""
        micro_batch = batch.micro_batch
        scores = token_scores(self.policy, hidden, micro_batch, temperature=1.0)
        return document_sum(scores.logprobs, micro_batch.loss_mask, micro_batch.sample_index, len(batch.keys))

    def prepare(self) -> None:
        """Score with the reference what this run is going to see and no earlier run has scored.

        Raises:
            NonFiniteError: a log-probability is not finite.
            StopRequestedError: some rank was asked to stop; what was scored until then is kept.
        """
        if not self.loss_fn.needs.reference:
            return
        config = self.config
        folder = Path(config.reference.cache_folder or Path(config.dump_folder) / "reference")
        training = config.training
        fingerprint = weights_fingerprint(self.policy, training.dtype, training.mixed_precision_param)
        self.reference = ReferenceCache(folder, fingerprint)
        wanted = self._to_score()
        keys, owners = self._keys(wanted)
        # Ranks that do not see one file system alike must still score alike.
        lacking = set(self.reference.missing(keys))
        flags = self._sum_over_ranks([float(index in lacking) for index in range(len(keys))])
        missing = [index for index, flag in enumerate(flags) if flag]
        if missing:
            self._score_reference([wanted[i] for i in sorted({owners[index] for index in missing})])
        logger.info(
            "Reference: %d completions, %d of them scored now, the others read from %s.",
            len(set(keys)),
            len(missing),
            self.reference.path,
        )

    def _to_score(self) -> list[Preference]:
        """Everything that training and evaluation look up, with the mismatched completions."""
        config, data = self.config, self.data
        train = data.drawn(config.training.steps * config.data.preferences_per_step)
        held_out = data.held_out_preferences(config.evaluation.num_preferences)
        wanted = [*train, *held_out]
        if self.loss_fn.needs.kl_baseline:
            wanted += [data.train.mismatched(preference) for preference in train]
            if data.held_out is not None:
                wanted += [data.held_out.mismatched(preference) for preference in held_out]
        return wanted

    def _keys(self, preferences: Sequence[Preference]) -> tuple[list[int], list[int]]:
        """Keys of all completions, and for each the index of its preference."""
        keys, owners = [], []
        for index, encoded in enumerate(self.data.encode(preferences)):
            for _, ids, mask in encoded.documents:
                keys.append(completion_key(ids, sum(mask)))
                owners.append(index)
        return keys, owners

    def _score_reference(self, preferences: Sequence[Preference]) -> None:
        """Score with the model as it is, each rank its share, and give every rank all numbers."""
        if self.reference is None:
            return
        keys, _ = self._keys(preferences)
        place = {key: index for index, key in reversed(list(enumerate(keys)))}
        local = [0.0] * len(keys)
        seen = [0.0] * len(keys)
        step = _SCORED_AT_ONCE * self.collectives.data_size
        given_up = None
        try:
            for start in self.unless_stopping(range(0, len(preferences), step)):
                batches = self.make_batches(preferences[start : start + step])
                for batch, values in zip(batches, self.frozen_values(batches), strict=True):
                    for key, value in zip(batch.keys, values.tolist(), strict=True):
                        local[place[key]], seen[place[key]] = value, 1.0
        except StopRequestedError as error:
            given_up = error
        totals, counts = self._sum_over_ranks(local), self._sum_over_ranks(seen)
        chosen = sorted(index for index in place.values() if counts[index])
        logprobs = [totals[i] / counts[i] for i in chosen]
        if not all(math.isfinite(value) for value in logprobs):
            raise NonFiniteError("A log-probability under the reference is not finite. Check the weights.")
        self.reference.add([keys[i] for i in chosen], logprobs)
        if self.collectives.rank == 0:
            self.reference.save()
        self.collectives.barrier()
        if given_up is not None:
            raise given_up

    def _sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Add up one number a completion over the data-parallel ranks."""
        total: list[float] = []
        for start in range(0, len(values), _REDUCED_AT_ONCE):
            part = {f"{i:06d}": v for i, v in enumerate(values[start : start + _REDUCED_AT_ONCE])}
            total += self.collectives.reduce(part, "sum").values()
        return total
