"""The training side of a run on a model of about 10M parameters: groups in, gradients out, no generator.

What the benchmarks time is the trainer's own code: :class:`titan_rl.trainers.batch_maker.BatchMaker` and
:func:`titan_rl.trainers.optimization.forward_backward`, on rollouts that are drawn at random.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from titan_rl.config.choice import build
from titan_rl.config.entry import read_checked
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import build_sharded
from titan_rl.titan.without_trainer import trainer_parts
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.optimization import StepBatch, forward_backward
from titan_rl.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Prompt,
    Reward,
    Rollout,
    Turn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = Path(__file__).parents[1] / "titan_rl" / "train_configs" / "tiny_grpo.toml"
TOKENIZER = Path(__file__).parents[1] / "titan_rl" / "assets" / "tiny_llama"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""About 10.4M parameters, 8.3M of them in the layers."""


class SmallRun:
    """What a trainer holds for its training side."""

    def __init__(self, **overrides: Any) -> None:
        """Build the policy, the same on every call. Collective.

        Args:
            overrides: Configuration keys with ``__`` for dots, over the tiny recipe's.
        """
        with TemporaryDirectory() as folder:
            directory = write_model(Path(folder), SIZES)
            keys = {"model.hf_assets_path": str(directory), "checkpoint.initial_load_path": ""}
            keys |= {name.replace("__", "."): value for name, value in overrides.items()}
            options = [text for key, value in keys.items() for text in (f"--{key}", _text(value))]
            document, trainer = read_checked(str(RECIPE), options)
            self.config = configure(document, trainer)
        parts: Any = trainer_parts(self.config)
        torch.manual_seed(0)
        self.policy = build_sharded(parts, self.config.model_spec, parts.model_config)
        self.policy.skip_head()
        self.collectives = Collectives(parts.parallel_dims, parts.device)
        self.advantage, self.loss_fn = build(self.config.advantage), self.config.loss.build()
        self.parts = parts

    def gradients(self, batches: Sequence[StepBatch]) -> dict[str, torch.Tensor]:
        """The gradient of one optimiser step for each batch, added up. Collective."""
        for batch in batches:
            forward_backward(
                self.policy,
                self.loss_fn,
                batch,
                temperature=self.config.sampling.temperature,
                max_tokens=self.config.sampling.max_tokens,
            )
        found = {name: gradient.clone() for name, gradient in self.policy.full_gradients()}
        for part in self.policy.parts:
            part.zero_grad(set_to_none=True)
        return found

    def trainer(self, **changes: Any) -> Any:
        """As much of a trainer as :class:`BatchMaker` reads.

        Args:
            changes: Attributes that are not this run's.
        """
        attributes = {
            **vars(self.parts),
            "policy": self.policy,
            "advantage": self.advantage,
            "loss_fn": self.loss_fn,
            "collectives": self.collectives,
            "critic": None,
            "state": SimpleNamespace(dropped_groups=0, mean_mismatch=float("inf")),
            "timer": SimpleNamespace(stage=lambda name: nullcontext()),
            "report": SimpleNamespace(
                record=lambda *_: None, packed=lambda *_, **__: None, measured=lambda *_: None
            ),
        }
        return cast(Any, SimpleNamespace(**attributes | changes))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_model(directory: Path, sizes: dict[str, Any]) -> Path:
    """A directory in Hugging Face layout without weights: the tiny model's, with other sizes."""
    for path in TOKENIZER.iterdir():
        shutil.copy(path, directory)
    config = json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")
    return directory


def make_groups(
    lengths: Sequence[tuple[int, Sequence[int]]], *, equal_rewards: Sequence[int] = (), seed: int = 0
) -> list[Group]:
    """Scored groups of random tokens.

    Args:
        lengths: For each group the tokens of its prompt and of each completion.
        equal_rewards: Groups whose rollouts all have reward 1; of the others half have 1 and half 0.
        seed: Of the tokens.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(SIZES["vocab_size"]) for _ in range(count))

    groups = []
    for index, (prompt_tokens, completions) in enumerate(lengths):
        prompt, start = Prompt(f"p{index}", (Message("user", "x"),)), tokens(prompt_tokens)
        rollouts = []
        for number, length in enumerate(completions):
            reward = 1.0 if index in equal_rewards else float(number % 2)
            completion = Completion("", tokens(length), (-8.0,) * length, FinishReason.STOP, ((0, 0),))
            rollouts.append(Rollout(prompt, number, 0, [Turn(start, completion, "")], Reward(reward)))
        groups.append(Group(prompt, index, rollouts, start))
    return groups


def log_normal_lengths(count: int, *, median: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Lengths whose logarithms are normal, cut at ``longest``: as completions of a reasoning model are."""
    draw = random.Random(seed)
    return [min(max(round(draw.lognormvariate(0.0, sigma) * median), 1), longest) for _ in range(count)]


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only rank of a gloo world."""
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
