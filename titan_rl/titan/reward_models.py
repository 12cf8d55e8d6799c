"""Reward models as files: in Hugging Face layout with one label, and as a frozen model beside the policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.experts import use_cpu_experts
from titan_rl.titan.hf_config import REWARD_ARCHITECTURES, spec_from_hf
from titan_rl.titan.models import frozen
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.value_model import build_value_model, load_value_checkpoint, value_config
from titan_rl.titan.weights import SCALAR_HEAD, TIED_HEAD, load_hf

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def initial_head_std(dim: int) -> float:
    """Standard deviation of a new scalar head: ``1 / sqrt(dim + 1)``.

    Source: Ziegler et al. 2019 (arXiv 1909.08593) in their code, as documented by Huang et al. 2024
    (arXiv 2403.17031). Rewards then start with a deviation of about 1.
    """
    return 1 / math.sqrt(dim + 1)


def with_reward_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a language model, turned into that of the reward model made from it.

    ``transformers`` loads it as a sequence classifier with one label, whose only logit is the reward.

    Args:
        hf_config: Of a Llama or dense Qwen3 language model.

    Raises:
        ConfigError: another architecture.
    """
    kind = {name.replace("SequenceClassification", "CausalLM"): name for name in REWARD_ARCHITECTURES}
    names = [kind[name] for name in hf_config.get("architectures") or [] if name in kind]
    if not names:
        raise ConfigError(
            "model",
            f"be one of {', '.join(kind)} to be exported as a reward model",
            hf_config.get("architectures"),
            "Set model.export = false.",
        )
    return dict(hf_config) | {
        "architectures": names[:1],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "num_labels": 1,
        "reward_head": SCALAR_HEAD,
        "tie_word_embeddings": False,
    }


def renamed_head(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A reward model's weight stream with the head under its name in a sequence classifier."""
    return ((SCALAR_HEAD if name == TIED_HEAD else name, tensor) for name, tensor in stream)


def open_reward_model(trainer: Trainer, path: str, *, where: str) -> ShardedModel:
    """Build a frozen reward model under a policy's parallelism. Collective.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        path: The export of a reward-model run, of any Llama or dense Qwen3 size with the policy's tokenizer;
            or a ``step-N`` checkpoint of one whose architecture is the policy's.
        where: The key that names the path, for errors.

    Returns:
        The sharded model in evaluation mode; it gives ``[B, T, 1]`` rewards.

    Raises:
        ConfigError: the path is no reward model, or does not fit the policy.
    """
    directory = Path(path)
    is_export = (directory / "config.json").is_file()
    if is_export:
        spec, model_config = _exported_spec(trainer, directory, where)
    else:
        spec, model_config = cast(ModelSpec, trainer.config.model_spec), trainer.model_config
    model = build_value_model(trainer, spec, model_config)
    if is_export:
        make_adapter: Any = spec.state_dict_adapter
        has_head = load_hf(model, make_adapter(value_config(model_config), None), path, has_scalar_head=True)
    else:
        has_head = load_value_checkpoint(model, path, where=where)
    if not has_head:
        raise ConfigError(
            where,
            "be a reward model, with a scalar head",
            path,
            'Train one with trainer = "reward_model" and name its export or checkpoint.',
        )
    return frozen(model)


def _exported_spec(trainer: Trainer, directory: Path, where: str) -> tuple[ModelSpec, Any]:
    spec = spec_from_hf(directory, architectures=REWARD_ARCHITECTURES)
    ours: Any = spec.model
    theirs: Any = trainer.model_config
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(
            where,
            f"have the policy's vocabulary of {theirs.vocab_size} tokens, since it reads the same tokens",
            ours.vocab_size,
            "Train the reward model from a model with the policy's tokenizer.",
        )
    if titan_utils.device_type == "cpu":
        use_cpu_attention(ours, per_document=trainer.config.parallelism.context_parallel_degree == 1)
        use_cpu_experts(ours)
    ours.update_from_config(config=trainer.config)
    return spec, ours
