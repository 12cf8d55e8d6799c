"""The reference's log-probability of every completion, computed once and kept on disk.

A completion is known by its tokens, the reference by a fingerprint of its weights: whatever changes is scored
anew, everything else is read. Who scores is the caller's business.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from titan_rl.functional.checksum import tensor_checksum
from titan_rl.titan.api import logger
from titan_rl.titan.sharded_model import ShardedModel


def completion_key(token_ids: Sequence[int], num_trained: int) -> int:
    """A 63-bit name of a completion behind its prompt.

    Args:
        token_ids: Of prompt and completion.
        num_trained: How many of them, at the end, are the completion's.

    >>> completion_key([1, 2, 3], 1) == completion_key([1, 2, 3], 2)
    False
    """
    text = f"{num_trained}:{','.join(map(str, token_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@torch.no_grad()
def weights_fingerprint(model: ShardedModel, *settings: str) -> str:
    """SHA-256, in hexadecimal, of all weights of a model, sharded or not. Collective.

    Args:
        model: A TorchTitan decoder.
        settings: What else decides its log-probabilities, such as the dtype that it computes in.
    """
    lines = list(settings)
    for name, full in model.full_state():
        lines.append(f"{name}={tensor_checksum(full)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class ReferenceCache:
    """Log-probabilities by completion, under one reference."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Read what is there.

        Args:
            folder: Where caches are, one file a reference.
            fingerprint: From :func:`weights_fingerprint`.
        """
        self.path = folder / f"reference-{fingerprint[:16]}.safetensors"
        self._values: dict[int, float] = {}
        if self.path.is_file():
            try:
                stored = load_file(self.path)
                pairs = zip(stored["keys"].tolist(), stored["logprobs"].tolist(), strict=True)
                self._values = dict(pairs)
            except (SafetensorError, KeyError, OSError, ValueError) as error:
                logger.warning("%s cannot be read (%s); the reference is scored anew.", self.path, error)

    def __len__(self) -> int:
        return len(self._values)

    def missing(self, keys: Sequence[int]) -> list[int]:
        """Indices of the keys without a value, each key once."""
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        return sorted(index for key, index in first.items() if key not in self._values)

    def add(self, keys: Sequence[int], logprobs: Sequence[float]) -> None:
        """Keep some values."""
        self._values.update(zip(keys, logprobs, strict=True))

    def lookup(self, keys: Sequence[int]) -> list[float]:
        """The values of some keys.

        Raises:
            KeyError: one has none.
        """
        return [self._values[key] for key in keys]

    def save(self) -> None:
        """Write everything, whole or not at all. One process calls it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".partial-{os.getpid()}")
        keys = sorted(self._values)
        content = {
            "keys": torch.tensor(keys, dtype=torch.int64),
            "logprobs": torch.tensor(self.lookup(keys), dtype=torch.float64),
        }
        save_file(content, str(partial))
        os.replace(partial, self.path)
