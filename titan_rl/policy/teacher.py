"""The teacher of distillation: a frozen model of its own architecture under the policy's parallelism.

It runs on the micro-batches that the policy trains on and hands out its hidden states; the divergence is in
:mod:`titan_rl.functional.distillation`, its place in the loss in :mod:`titan_rl.algorithms.penalties`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.data.chat import has_same_vocabulary
from titan_rl.errors import ConfigError
from titan_rl.functional.distillation import chunked_divergence
from titan_rl.titan.api import ModelSpec, logger
from titan_rl.titan.models import ModelSection, build_adapter, build_frozen, build_spec
from titan_rl.titan.sharded_model import Hidden, ShardedModel, TensorParallelVocabulary
from titan_rl.titan.weights import has_hf_weights, load_checkpoint, load_hf

TokenDivergence = Callable[[torch.Tensor, torch.Tensor, TensorParallelVocabulary | None], torch.Tensor]
"""From the policy's hidden states ``[N, D]`` at trained tokens, its output projection ``[V, D]`` and which
rows of the vocabulary these are, to the divergence ``[N]`` from the teacher there, in nats, with grad."""


class Teacher:
    """A frozen model whose next-token distributions a policy is drawn to."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Table ``[teacher]``. Without ``name`` and ``hf_assets_path`` the architecture is the policy's."""

        name: str = ""
        """A TorchTitan model or an importable module, as ``model.name``."""

        flavor: str = ""
        """Flavor of ``name``."""

        hf_assets_path: str = ""
        """Directory in Hugging Face layout: ``config.json``, from which the teacher is built unless ``name``
        is set, weights, and the tokenizer, which must be the policy's."""

        initial_load_path: str = ""
        """TorchTitan checkpoint (a ``step-N`` directory) with the teacher's weights. Empty: the safetensors
        in ``hf_assets_path``."""

        offload_to_cpu: bool = False
        """Keep its shards in host memory between uses. On a CPU there is nowhere to move them: refused."""

        divergence: Literal["reverse", "forward"] = "reverse"
        """KL(policy || teacher), which gives up what the teacher would not say, or KL(teacher || policy),
        which covers all that it would."""

        top_k: Annotated[int, Ge(0)] = 0
        """Compare the k likeliest tokens, and all others as one; 0: the whole vocabulary. Likeliest under the
        policy for the reverse divergence, under the teacher for the forward one."""

    def __init__(self, config: Config, *, model: ShardedModel, temperature: float) -> None:
        """Bind a model.

        Args:
            config: ``[teacher]``.
            model: Frozen and sharded, with its weights; gives hidden states.
            temperature: Both models' logits are divided by it; the one that the generator samples with.
        """
        self._model = model
        self._divergence = functools.partial(
            chunked_divergence, temperature=temperature, divergence=config.divergence, top_k=config.top_k
        )

    @contextmanager
    def comparing(self, micro_batches: Sequence[MicroBatch]) -> Generator[Callable[[int], TokenDivergence]]:
        """Compare a policy with the teacher while it is trained on these micro-batches. Collective.

        The teacher runs on each of them, without grad, when it is asked for. With pipeline parallelism it
        runs on all of them first, because the ranks without the last stage are in the schedule afterwards.
        The last stage then holds the states of all trained tokens.

        Args:
            micro_batches: On the model's device.

        Yields:
            From a micro-batch's number to what compares a policy with the teacher there. To be called where
            the policy's last hidden states are, within TorchTitan's context for a forward pass. The output
            projection stays gathered until the end, for the backward pass.
        """
        held: dict[int, torch.Tensor] | None = None
        if self._model.has_stages:
            held = self._model.scores_of_last_stage(
                micro_batches, lambda number, hidden: _trained(hidden, micro_batches[number])
            )

        def compare(number: int) -> TokenDivergence:
            states = self._states(micro_batches[number]) if held is None else held[number]
            weight = self._model.unsharded_head().weight
            # A teacher with more rows is cut to the policy's: those of the last shard.
            return lambda ours, output, shard: self._divergence(
                ours, output, states, weight[: output.shape[0]], shard=shard
            )

        try:
            yield compare
        finally:
            self._model.reshard()

    @torch.no_grad()
    def _states(self, micro_batch: MicroBatch) -> torch.Tensor:
        hidden = self._model.forward(micro_batch)
        if hidden is None:
            raise ValueError("A teacher that is cut into stages must run before the policy's schedule.")
        self._model.reshard()
        return _trained(hidden, micro_batch)


def _trained(hidden: Hidden, micro_batch: MicroBatch) -> torch.Tensor:
    """Hidden states ``[N, E]`` of the trained tokens of this rank."""
    return hidden.states[hidden.local(micro_batch.loss_mask)]


def check_teacher(
    config: Teacher.Config | None,
    *,
    coefficient: float,
    model: ModelSection,
    vocab_size: int,
    parallelism: Any,
) -> None:
    """Refuse a teacher that is missing, not asked for, without weights or of another vocabulary.

    Args:
        config: ``[teacher]``, or None without the table.
        coefficient: ``loss.distillation.coefficient``.
        model: ``[model]`` of the policy.
        vocab_size: The policy's, output rows.
        parallelism: TorchTitan's section.

    Raises:
        ConfigError: naming both keys.
    """
    if config is None:
        if coefficient > 0:
            raise ConfigError(
                "[teacher]",
                f"be a table with loss.distillation.coefficient = {coefficient}",
                "none",
                "Set teacher.initial_load_path or teacher.hf_assets_path, or the coefficient to 0.",
            )
        return
    if not coefficient > 0:
        raise ConfigError(
            "[teacher]",
            "be left out with loss.distillation.coefficient = 0, which needs no teacher",
            "a table",
            "Remove it, or set the coefficient.",
        )
    if not config.initial_load_path and not has_hf_weights(config.hf_assets_path):
        raise ConfigError(
            "teacher.initial_load_path",
            "name a checkpoint, or teacher.hf_assets_path a directory with safetensors weights",
            config.hf_assets_path,
            "A teacher with random weights teaches nothing.",
        )
    spec: Any = teacher_spec(config, model)
    _check_vocabulary(config, model, rows=spec.model.vocab_size, vocab_size=vocab_size)
    _check_shards(spec.model.vocab_size, vocab_size, parallelism.tensor_parallel_degree)


def _check_shards(rows: int, vocab_size: int, degree: int) -> None:
    """Tensor-parallel ranks compare the rows that they hold, which must be those of the same tokens."""
    ours, theirs = -(-vocab_size // degree), -(-rows // degree)
    if degree > 1 and ours != theirs:
        raise ConfigError(
            "parallelism.tensor_parallel_degree",
            f"cut the {vocab_size} output rows of [model] and the {rows} of [teacher] at the same tokens: a "
            f"rank would hold {ours} of the one and {theirs} of the other",
            degree,
            "Set 1, or choose a teacher with as many output rows.",
        )


def _check_vocabulary(config: Teacher.Config, model: ModelSection, *, rows: int, vocab_size: int) -> None:
    """The same tokens must have the same numbers, and the teacher a probability for each of them.

    Output rows beyond the tokenizer are padding: models of one family are padded differently. A teacher with
    more rows is cut to the policy's, which leaves its distribution given that the token is one that the
    policy can sample. With fewer rows it would give tokens of the policy the probability 0.
    """
    is_compared = has_same_vocabulary(
        config.hf_assets_path,
        model.hf_assets_path,
        where="teacher.hf_assets_path",
        why="distributions are compared token by token",
    )
    if rows != vocab_size and not (is_compared and rows > vocab_size):
        remedy = "Take a teacher with the policy's tokenizer."
        if rows > vocab_size:
            remedy = (
                "Put the teacher's tokenizer.json into teacher.hf_assets_path, to show that it is the same."
            )
        raise ConfigError(
            "teacher: the vocabulary",
            f"have the {vocab_size} output rows of [model], or more of them with the same tokenizer",
            rows,
            remedy,
        )


def teacher_spec(config: Teacher.Config, model: ModelSection) -> ModelSpec:
    """The teacher's architecture: its own, or the policy's where ``[teacher]`` names none.

    Raises:
        ConfigError: the model, flavor or directory does not exist or is not supported.
    """
    if not config.name and not config.hf_assets_path:
        return build_spec(model)
    section = replace(model, name=config.name, flavor=config.flavor, hf_assets_path=config.hf_assets_path)
    try:
        return build_spec(section)
    except ConfigError as error:
        where = (
            error.where.replace("model.", "teacher.", 1) if error.where.startswith("model.") else error.where
        )
        raise ConfigError(where, error.constraint, error.got, error.remedy) from error


def build_teacher(config: Teacher.Config, trainer: Any) -> Teacher:
    """Build a teacher with its weights. Collective.

    Args:
        config: ``[teacher]``, which passed :func:`check_teacher`.
        trainer: An RL trainer after TorchTitan's ``__init__``.

    Raises:
        ConfigError: the weights are not this model's, or it cannot run under the run's parallelism.
    """
    spec: Any = teacher_spec(config, trainer.config.model)
    try:
        model = build_frozen(trainer, spec, offload_to_cpu=config.offload_to_cpu)
    except ValueError as error:
        raise ConfigError(
            "[teacher]",
            "be a model that fits this run's parallelism and training.seq_len",
            f"{spec.name} {spec.flavor}",
            f"TorchTitan said: {error}.",
        ) from error
    if config.initial_load_path:
        load_checkpoint(model, config.initial_load_path, where="teacher.initial_load_path")
    else:
        adapter = build_adapter(spec, spec.model)
        load_hf(model, adapter, config.hf_assets_path)
    logger.info(
        "Teacher: %s %s, %s", spec.name, spec.flavor, config.initial_load_path or config.hf_assets_path
    )
    return Teacher(
        config,
        model=model,
        temperature=trainer.config.sampling.temperature,
    )
