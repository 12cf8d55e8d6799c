"""Build the collaborators of an RL run from its configuration: data, generator, rewards, runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from titan_rl.algorithms.refill import has_signal
from titan_rl.config.choice import build
from titan_rl.data.chat import PromptEncoder, check_prompts
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import PromptDataset
from titan_rl.errors import ConfigError
from titan_rl.generation.protocol import Generator, GeneratorContext
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.rewards.pool import RewardPool
from titan_rl.rewards.spec import RewardSpec
from titan_rl.rollout.runner import RolloutRunner
from titan_rl.rollout.share import Share
from titan_rl.rollout.source import GroupSource, SourceOptions
from titan_rl.titan.api import ModelSpec, logger
from titan_rl.titan.device import choose_device
from titan_rl.titan.hf_config import hf_from_spec, read_hf_config
from titan_rl.titan.hf_experts import refuse_router_bias
from titan_rl.titan.lora import changing_names
from titan_rl.titan.models import build_adapter
from titan_rl.titan.peft import AdapterStream
from titan_rl.titan.weights import WeightStream, adapted_layers_of, write_assets
from titan_rl.types import Prompt, SamplingParams
from titan_rl.weight_sync.push import Changes

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer

_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RunData:
    """Prompts, and how they become tokens.

    Attributes:
        train: The training prompts in the order in which they are drawn.
        held_out: Prompts never trained on; None when the source has none.
        encoder: The tokenizer with its chat template.
        sampling: How completions are drawn in training.
        num_held_out: Most held-out prompts to score.
        fingerprint: Of the training prompts and of how they are rendered.
    """

    train: PromptStream
    held_out: PromptDataset | None
    encoder: PromptEncoder
    sampling: SamplingParams
    num_held_out: int
    fingerprint: str

    def held_out_prompts(self) -> list[Prompt]:
        """The held-out prompts that an evaluation scores."""
        if self.held_out is None:
            return []
        return [self.held_out[i] for i in range(min(self.num_held_out, len(self.held_out)))]

    def probe(self) -> list[int]:
        """Tokens of the handshake's probe: the first training prompt, at most 64 tokens, at least two."""
        token_ids = self.encoder.encode(self.train.at(0)[0].messages)[:_PROBE_TOKENS]
        return token_ids if len(token_ids) > 1 else token_ids * 2


def open_data(config: RLTrainer.Config, run_seed: int) -> RunData:
    """Open both splits, encode every prompt once, and refuse what could fail later.

    Args:
        config: The whole configuration.
        run_seed: Decides the order of prompts.

    Raises:
        ConfigError: a file, column, tokenizer or length does not fit.
    """
    data, sampling = config.data, config.sampling
    encoder = PromptEncoder(
        config.hf_assets_path,
        system_prompt=data.system_prompt or None,
        max_prompt_tokens=data.max_prompt_tokens,
        use_chat_template={"auto": None, "on": True, "off": False}[data.chat_template],
    )
    spec: Any = config.model_spec
    if encoder.vocab_size > spec.model.vocab_size:
        raise ConfigError(
            "model.hf_assets_path",
            f"hold a tokenizer of at most {spec.model.vocab_size} tokens, the model's vocabulary",
            encoder.vocab_size,
            "The tokenizer belongs to another model.",
        )
    train, report = check_prompts(build(data.source, split="train"), encoder, too_long=data.too_long)
    if report.num_too_long:
        logger.warning("%d of %d prompts are too long and left out.", report.num_too_long, report.num_prompts)
    held_out = build(data.source, split="held_out")
    held_out = check_prompts(held_out, encoder, too_long=data.too_long)[0] if len(held_out) else None
    if not encoder.stop_token_ids:
        raise ConfigError(
            "model.hf_assets_path",
            "name a stop token in tokenizer_config.json or generation_config.json",
            "none",
            "Set eos_token; otherwise every completion runs to sampling.max_tokens.",
        )
    return RunData(
        train=PromptStream(train, run_seed, shuffle=data.shuffle),
        held_out=held_out,
        encoder=encoder,
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=encoder.stop_token_ids,
        ),
        num_held_out=config.evaluation.num_prompts,
        fingerprint=f"{train.fingerprint}/{encoder.fingerprint}",
    )


def state_dict_adapter(trainer: RLTrainer) -> Any:
    """TorchTitan's adapter between this model's names and Hugging Face's, or None."""
    return build_adapter(cast(ModelSpec, trainer.config.model_spec), trainer.model_config)


def weight_stream(trainer: RLTrainer) -> WeightStream:
    """The policy's weights, gathered anew at every iteration over it: all that the first push sends."""
    config = trainer.config
    return WeightStream(
        trainer.policy,
        state_dict_adapter(trainer),
        bucket_bytes=config.weight_sync.bucket_bytes,
        with_adapters=config.lora is None or config.lora.push == "merged",
    )


def changing_weights(trainer: RLTrainer) -> Changes | None:
    """Those of the policy's weights that training can change; None without low-rank adapters: all of them."""
    config = trainer.config
    if config.lora is None:
        return None
    adapter, bucket_bytes = state_dict_adapter(trainer), config.weight_sync.bucket_bytes
    if config.lora.push == "adapter":
        return Changes(
            "lora", AdapterStream(trainer.policy, adapter, bucket_bytes=bucket_bytes, is_scaled=True)
        )
    # vLLM keeps queries, keys and values in one layer, and gate and up.
    is_fused = isinstance(config.generator, VllmGenerator.Config)
    names = changing_names(adapted_layers_of(trainer.policy), with_siblings=is_fused)
    return Changes("delta", WeightStream(trainer.policy, adapter, bucket_bytes=bucket_bytes, names=names))


def needs_hf_config(config: Any) -> bool:
    """Whether a run writes its model in Hugging Face layout: for vLLM, or for the export."""
    return config.model.export or isinstance(getattr(config, "generator", None), VllmGenerator.Config)


def hf_config(config: Any) -> dict[str, Any]:
    """``config.json`` of the policy: the directory's own where the model was built from it.

    Args:
        config: A trainer's configuration, before TorchTitan's trainer is built from it.

    Raises:
        ConfigError: the model has no Hugging Face counterpart that can be written.
    """
    section = config.model
    if not section.name and section.hf_assets_path:
        layers = config.model_spec.model.layers
        refuse_router_bias([layer.moe for layer in layers if getattr(layer, "moe", None) is not None])
        return read_hf_config(Path(section.hf_assets_path))
    return hf_from_spec(cast(ModelSpec, config.model_spec))


def build_generator(trainer: RLTrainer) -> Generator:
    """Build the generator that ``[generator]`` names. Collective."""
    config = trainer.config
    model_dir = ""
    if isinstance(config.generator, VllmGenerator.Config):
        directory = Path(config.dump_folder) / "generator"
        if dist.get_rank() == 0:
            write_assets(directory, hf_config=trainer.hf_config or {}, assets=config.hf_assets_path)
        dist.barrier()
        model_dir = str(directory)
    context = GeneratorContext(
        model_dir=model_dir,
        model_config=trainer.model_config,
        adapter=state_dict_adapter(trainer),
        max_model_len=config.data.max_prompt_tokens + config.sampling.max_tokens,
        dtype=config.training.mixed_precision_param,
        seed=trainer.run_seed % 2**31,
        device_type=trainer.device.type,
        run_threads=torch.get_num_threads(),
        agree=_group_agreement(getattr(config.generator, "tensor_parallel_degree", 1)),
        is_stopping=trainer.control.should_interrupt,
        lora_rank=config.lora.rank if config.lora is not None and config.lora.push == "adapter" else None,
    )
    return build(config.generator, context=context)


def _group_agreement(degree: int) -> Callable[[bool], bool] | None:
    """Broadcast of a flag from the first rank of each generator group (consecutive ranks) to its group."""
    if degree == 1:
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups: list[Any] = [
        dist.new_group(list(range(i, i + degree)), backend="gloo") for i in range(0, world_size, degree)
    ]
    group, first = groups[rank // degree], rank // degree * degree

    def agree(flag: bool) -> bool:
        packed = torch.tensor([int(flag)])
        dist.broadcast(packed, src=first, group=group)
        return bool(packed.item())

    return agree


def reward_specs(tables: list[dict[str, Any]]) -> list[RewardSpec]:
    """The ``[[reward]]`` tables, checked as far as possible without importing a reward."""
    return [RewardSpec.from_table(table) for table in tables]


def build_rewards(config: RLTrainer.Config) -> RewardPool:
    """Start the reward workers of this rank."""
    return RewardPool(config.reward_workers, reward_specs(config.reward))


def build_runner(trainer: RLTrainer, data: RunData) -> RolloutRunner:
    """The runner of this rank's share."""
    config = trainer.config
    degree = getattr(config.generator, "tensor_parallel_degree", 1)
    return RolloutRunner(
        generator=trainer.generator,
        rewards=trainer.rewards,
        encoder=data.encoder,
        share=Share.of_rank(dist.get_rank(), dist.get_world_size(), degree),
        run_seed=trainer.run_seed,
        timeout_seconds=config.sampling.timeout_seconds,
        exchange=trainer.collectives.exchange if trainer.collectives.shares_rows else None,
        control=trainer.control,
    )


def build_source(trainer: RLTrainer, data: RunData) -> GroupSource:
    """Where an iteration's groups come from."""
    config = trainer.config
    options = SourceOptions(
        num_groups=config.data.prompts_per_iteration,
        group_size=config.sampling.group_size,
        sampling=data.sampling,
        needs_baseline=trainer.needs.greedy_baseline,
        max_refills=config.refill.max_rounds,
    )
    return GroupSource(
        trainer.runner,
        data.train,
        options,
        keep=has_signal,
        score=trainer.model_reward,
        sum_over_ranks=lambda value: trainer.collectives.reduce_scalar(value, "sum"),
    )


def device_type() -> str:
    """Device of this process."""
    return choose_device()


def world_size_from_env() -> int:
    """Number of ranks that torchrun started.

    Raises:
        ConfigError: the process was not started by torchrun.
    """
    value = os.environ.get("WORLD_SIZE", "")
    if not value.isdigit():
        raise ConfigError(
            "The process",
            "be started by torchrun, which sets WORLD_SIZE",
            value,
            "Run `torchrun --standalone --nproc-per-node 1 -m titan_rl.train CONFIG.toml`.",
        )
    return int(value)
