"""What test_fsdp_two_ranks.py computes, on one rank or on two: called by launching.py."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module as TitanModule

from tests.distributed import launching
from tests.distributed.fsdp_exchange import check_collectives, check_handshake
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.titan import buckets
from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.experts import use_cpu_experts
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.models import build_adapter, build_sharded, build_sibling, copy_shards
from titan_rl.titan.sharded_model import ShardedModel, fsdp_modules
from titan_rl.titan.weights import WeightStream, load_hf
from titan_rl.trainers.optimization import StepBatch, align_ranks, forward_backward
from titan_rl.types import Sample

# Before install(), which replaces it; the same function afterwards if something has installed already.
_TITAN_INIT = TitanModule._init_self_parameters

BUCKETS = (1, 40_000, 2**28)
LENGTHS = (12, 3, 9, 5, 17, 2, 8, 11)
LONGEST, VOCAB = max(LENGTHS), 96
PADDING_TOKEN = VOCAB - 1  # occurs in no sample
TEMPERATURE = 0.8
FSDP, HSDP = {"data_parallel_shard_degree": -1}, {"data_parallel_replicate_degree": 2}


class Rank(SimpleNamespace):
    """The attributes of a trainer that the project's code reads."""


@functools.cache
def parallel_dims(*degrees: tuple[str, Any]) -> ParallelDims:
    """One for each layout, as a run has one: annotations of different meshes do not mix."""
    return ParallelDims.from_config(ParallelismConfig(**dict(degrees)), dist.get_world_size())


def without_models(
    spec: Any,
    *,
    rows: int = 8,
    seq_len: int = 2048,
    activation_checkpoint: Any = None,
    compile: CompileConfig | None = None,
    **parallel: Any,
) -> Rank:
    """What a trainer holds before its models are built.

    Args:
        spec: The policy's.
        rows: ``training.local_batch_size``.
        seq_len: ``training.seq_len``.
        activation_checkpoint: ``[activation_checkpoint]``.
        compile: ``[compile]``; off by default.
        parallel: ``[parallelism]``.
    """
    parallelism = ParallelismConfig(**parallel)
    _clear_sharding_prop_cache()  # it gives equal meshes of earlier layouts, which FSDP takes for others
    dims = parallel_dims(*sorted(item for item in parallel.items() if item[0].endswith("_degree")))
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    use_cpu_attention(spec.model, per_document=parallelism.context_parallel_degree == 1)
    use_cpu_experts(spec.model)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    training = TrainingConfig(mixed_precision_param="float32", local_batch_size=rows, seq_len=seq_len)
    return Rank(
        config=SimpleNamespace(
            model_spec=spec,
            training=training,
            parallelism=parallelism,
            compile=compile or CompileConfig(enable=False),
            activation_checkpoint=activation_checkpoint,
            dump_folder="",
        ),
        parallel_dims=dims,
        model_config=spec.model,
        device=torch.device("cpu"),
        train_context=dist_utils.get_spmd_context(parallel_dims=dims),
    )


def build(model: Path | ModelSpec, **options: Any) -> Rank:
    """A policy under TorchTitan's parallelism, randomly initialised after ``torch.manual_seed(5)``.

    Args:
        model: A directory in Hugging Face layout, or a spec.
        options: As for :func:`without_models`; FSDP over all ranks by default.
    """
    spec = spec_from_hf(model) if isinstance(model, Path) else model
    rank = without_models(spec, **(options or FSDP))
    rank.adapter = build_adapter(spec, spec.model)
    torch.manual_seed(5)
    rank.policy = build_sharded(rank, spec, spec.model, ac_config=rank.config.activation_checkpoint)
    rank.model_parts, rank.module = rank.policy.parts, rank.policy.parts[0]
    return rank


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def logits(rank: Rank, tokens: list[list[int]]) -> torch.Tensor:
    ids = torch.tensor(tokens)
    batch = dataclasses.replace(MicroBatch.empty(*ids.shape), input_ids=ids)
    with torch.no_grad(), rank.train_context():
        return rank.policy.forward(batch).states


def whole_gradients(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Full gradients by parameter, taken from the model. Collective."""
    gradients = {name: gradient.clone() for name, gradient in model.full_gradients()}
    for part in model.parts:
        part.zero_grad()
    return gradients


@contextmanager
def leaking(model: ShardedModel) -> Iterator[None]:
    """Planted fault: attention sees one document a row. Positions within documents stay right."""

    def prepare(rows: Any) -> Any:
        inputs, kwargs, index = ShardedModel.prepare(model, rows)
        row = torch.arange(rows.positions.shape[1]).expand_as(rows.positions)
        return inputs, kwargs | {"attention_masks": model.parts[0].get_attention_masks(row)}, index

    model.prepare = prepare
    try:
        yield
    finally:
        del model.prepare


# ------------------------------------------------------------------------------- random initialisation


def check_init(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Whole parameters, and this rank's shards by their checksum, with and without our initialisation."""
    result = {}
    for name in ("llama", "qwen3_tied"):
        policy = build(directory / name).module
        result[name] = {key: tensor_checksum(_shard(p)) for key, p in policy.named_parameters()}
        tensors |= {f"init/{name}/{key}": full(p) for key, p in policy.named_parameters()}
    ours = TitanModule._init_self_parameters
    TitanModule._init_self_parameters = _TITAN_INIT
    try:
        policy = build(directory / "llama").module
    finally:
        TitanModule._init_self_parameters = ours
    result["without"] = {key: tensor_checksum(_shard(p)) for key, p in policy.named_parameters()}
    return result


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --------------------------------------------------------------------------------- loading and the stream


def check_weights(
    directory: Path, prompt: list[list[int]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Logits after load_hf, and whether the stream is the file bit for bit."""
    result = {}
    for name in ("llama", "llama_tied", "qwen3", "qwen3_tied"):
        rank = build(directory / name)
        load_hf(rank.policy, rank.adapter, str(directory / name))
        tensors[f"logits/{name}"] = logits(rank, prompt)
        stored = load_file(directory / name / "model.safetensors")
        stream = dict(WeightStream(rank.policy, rank.adapter))
        if name.endswith("_tied"):
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
        result[name] = {
            "buckets": [_read_in_buckets(rank, stream, size) for size in BUCKETS],
            "same_names": set(stream) == set(stored),
            "order": list(stream),
            "bit_exact": all(torch.equal(stored[key], stream[key]) for key in stored),
            "cuts_a_head": _cuts_a_head(rank.module),
        }
    return result


@torch.no_grad()
def _read_in_buckets(rank: Rank, expected: dict[str, torch.Tensor], bucket_bytes: int) -> dict[str, Any]:
    """Whether the stream is the same, and the most that was gathered and not read yet, in bytes."""
    begin, begun, read, peak, largest = buckets._begin, 0, 0, 0, 0

    def counted(value: torch.Tensor) -> torch.Tensor:
        nonlocal begun, peak, largest
        size = value.numel() * value.element_size()
        begun, largest = begun + size, max(largest, size)
        peak = max(peak, begun - read)
        return begin(value)

    buckets._begin = counted
    try:
        for _, tensor in rank.policy.full_state(bucket_bytes=bucket_bytes):
            read += tensor.numel() * tensor.element_size()
    finally:
        buckets._begin = begin
    stream = list(WeightStream(rank.policy, rank.adapter, bucket_bytes=bucket_bytes))
    is_same = [name for name, _ in stream] == list(expected)
    is_same = is_same and all(torch.equal(expected[name], tensor) for name, tensor in stream)
    return {"is_same": is_same, "peak": peak, "largest": largest, "all": read}


def _cuts_a_head(policy: Any) -> bool:
    """Whether this rank's shard of the keys' projection ends inside a head of 8 rows."""
    return bool(_shard(policy.layers["0"].attention.qkv_linear.wk.weight).shape[0] % 8)


# ---------------------------------------------------------------------------------------- a step of GRPO


def make_samples() -> tuple[list[Sample], list[float]]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index, length in enumerate(LENGTHS):
        prompt = 1 + index % 3 if length > 3 else 1
        mask = [position >= prompt for position in range(length)]
        logprobs = (-torch.rand(length, generator=generator) * torch.tensor(mask)).tolist()
        tokens = torch.randint(PADDING_TOKEN, (length,), generator=generator).tolist()
        samples.append(Sample(tokens, mask, logprobs, float(index % 2), index // 2, index % 2, False))
    return samples, torch.randn(len(LENGTHS), generator=generator).tolist()


def lay_out(ids: list[int], layout: str) -> list[MicroBatch]:
    """Micro-batches of these samples, with ``sample_index`` counting all samples of the step."""
    samples, advantages = make_samples()
    chosen = [samples[i] for i in ids], [advantages[i] for i in ids]
    if layout == "packed":
        batches = pack(*chosen, token_budget=24, rows_per_micro_batch=1)
    else:
        rows = {"eight_of_one": 1, "one_of_eight": 8}[layout]
        batches = [_padded(ids[start : start + rows]) for start in range(0, len(ids), rows)]
        return [dataclasses.replace(b, input_ids=_mark_padding(b)) for b in batches]
    numbers = torch.tensor([*ids, -1])
    return [
        dataclasses.replace(b, sample_index=numbers[b.sample_index], input_ids=_mark_padding(b))
        for b in batches
    ]


def _padded(ids: list[int]) -> MicroBatch:
    """One sample a row, without packing."""
    samples, advantages = make_samples()
    options = {"token_budget": LONGEST, "rows_per_micro_batch": 1}
    rows = [pack([samples[i]], [advantages[i]], pad_to="token_budget", **options)[0] for i in ids]
    names = ("input_ids", "positions", "targets", "loss_mask", "generator_logprobs", "advantages")
    index = torch.cat([row.sample_index for row in rows])
    return MicroBatch(
        **{name: torch.cat([getattr(row, name) for row in rows]) for name in names},
        sample_index=torch.where(index >= 0, torch.tensor(ids)[:, None], -1),
        document_lengths=[row.document_lengths[0] for row in rows],
    )


def _mark_padding(batch: MicroBatch) -> torch.Tensor:
    return torch.where(batch.sample_index < 0, PADDING_TOKEN, batch.input_ids)


class Step:
    """A policy and a reference of other weights, and the gradient of one GRPO step in some layout."""

    def __init__(self, directory: Path, name: str = "llama", **parallel: Any) -> None:
        self.rank = build(directory / name, **parallel)
        load_hf(self.rank.policy, self.rank.adapter, str(directory / name))
        self.reference = build_sibling(self.rank)
        copy_shards(self.rank.policy, self.reference)
        for index, parameter in enumerate(self.reference.parameters()):
            with torch.no_grad():
                _shard(parameter).mul_(1.0 + 0.02 * (index % 5))
        self.scorers = [LogprobScorer(m, temperature=TEMPERATURE) for m in (self.rank.policy, self.reference)]
        self._prepare()

    def _prepare(self) -> None:
        self.rank.policy.skip_head()
        self.collectives = Collectives(self.rank.parallel_dims, torch.device("cpu"))
        generator = torch.Generator().manual_seed(4)
        self.noise = 0.3 * torch.randn(len(LENGTHS), LONGEST, generator=generator)
        self.loss_fn = PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.1)).build()

    def batch(self, layout: str, ids: list[int] | None = None) -> StepBatch:
        """This rank's scored micro-batches; old is the policy plus noise that belongs to the token."""
        if ids is None:
            ids = list(range(len(LENGTHS)))[self.collectives.data_rank :: self.collectives.data_size]
        batch = align_ranks(
            lay_out(ids, layout), num_samples=len(ids), collectives=self.collectives, device=self.rank.device
        )
        scored, batch.ref_logprobs = (scorer(batch.micro_batches) for scorer in self.scorers)
        for micro_batch, logprobs in zip(batch.micro_batches, scored, strict=True):
            place = micro_batch.sample_index.clamp(min=0), micro_batch.positions.clamp(max=LONGEST - 1)
            noise = torch.where(micro_batch.loss_mask, self.noise[place], 0.0)
            batch.old_logprobs.append(logprobs + noise)
        return batch

    def backward(self, batch: StepBatch) -> list[dict[str, torch.Tensor]]:
        return forward_backward(
            self.rank.policy,
            self.loss_fn,
            batch,
            temperature=TEMPERATURE,
            max_tokens=LONGEST,
        )

    def gradients(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        """Whole gradients by parameter."""
        self.rank.module.zero_grad()
        self.backward(batch)
        return whole_gradients(self.rank.policy)


def check_gradients(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Gradients of the same step in several layouts, and under planted faults."""
    step = Step(directory)
    world_size = dist.get_world_size()
    batches = {layout: step.batch(layout) for layout in ("eight_of_one", "one_of_eight", "packed")}
    gradients = {layout: step.gradients(batch) for layout, batch in batches.items()}
    gradients |= {"fault/mean_per_micro_batch": _mean_per_micro_batch(step, batches["packed"])}
    with leaking(step.rank.policy):
        gradients |= {"fault/leaking": step.gradients(batches["packed"])}
    gradients |= {"again": step.gradients(batches["packed"])}
    result = {
        "micro_batches": {layout: len(batch.micro_batches) for layout, batch in batches.items()},
        "num_documents": {
            layout: [len(row) for b in batch.micro_batches for row in b.document_lengths]
            for layout, batch in batches.items()
        },
        "counts": [batches["packed"].num_loss_tokens, batches["packed"].num_samples],
        "masked": masked_gradient(step.rank.policy, batches["packed"], step.backward),
    }
    if world_size == 2:
        only_first = step.batch("packed", ids=list(range(len(LENGTHS))) if dist.get_rank() == 0 else [])
        result["empty"] = [b.num_loss_tokens for b in only_first.micro_batches]
        gradients["one_rank_empty"] = step.gradients(only_first)
        for module in fsdp_modules(step.rank.module):
            module.set_gradient_divide_factor(2.0)
        gradients["fault/averaged_over_ranks"] = step.gradients(batches["packed"])
        for name, parallel in (
            ("resharded", FSDP | {"fsdp_reshard_after_forward": "always"}),
            ("replicated", HSDP),
        ):
            other = Step(directory, **parallel)
            gradients[name] = other.gradients(other.batch("packed"))
        result["reductions"] = {}
        for name, parallel in (("sharded", FSDP), ("replicated", HSDP)):
            other = Step(directory, **parallel)
            for when in ("every_micro_batch", "last_micro_batch"):
                other.rank.policy.reduce_gradients(when)
                case = f"reduced_{when}/{name}"
                with CommDebugMode() as counted:
                    gradients[case] = other.gradients(batches["eight_of_one"])
                result["reductions"][case] = {str(op): n for op, n in counted.get_comm_counts().items()}
    tied = Step(directory, "qwen3_tied")
    gradients["tied"] = tied.gradients(tied.batch("packed"))
    tensors |= {f"gradient/{c}/{name}": g for c, named in gradients.items() for name, g in named.items()}
    return result


def _mean_per_micro_batch(step: Step, batch: StepBatch) -> dict[str, torch.Tensor]:
    """Planted fault: every micro-batch is a mean of its own, and the step is the mean of those."""
    count = len(batch.micro_batches)
    for index, micro_batch in enumerate(batch.micro_batches):
        tokens = step.collectives.reduce_scalar(micro_batch.num_loss_tokens, "sum") * count
        step.backward(
            StepBatch(
                [micro_batch],
                num_loss_tokens=int(tokens),
                num_samples=batch.num_samples,
                old_logprobs=[batch.old_logprobs[index]],
                ref_logprobs=[batch.ref_logprobs[index]],
            )
        )
    return whole_gradients(step.rank.policy)


def masked_gradient(
    model: ShardedModel, batch: StepBatch, backward: Callable[[StepBatch], Any]
) -> dict[str, float]:
    """Largest gradient of hidden states at masked and at trained tokens, over this rank's micro-batches."""
    hidden: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    handle = model.parts[0].norm.register_forward_hook(keep)
    backward(batch)
    handle.remove()
    whole_gradients(model)
    largest = {"masked": 0.0, "trained": 0.0}
    for states, micro_batch in zip(hidden, batch.micro_batches, strict=True):
        size = states.grad.abs().amax(-1)
        for name, mask in (("masked", ~micro_batch.loss_mask), ("trained", micro_batch.loss_mask)):
            largest[name] = max([largest[name], *size[mask].tolist()])
    return largest


# ------------------------------------------------------------------------------------------------- all of it


def run(directory: Path) -> None:
    """Compute everything on this rank and write it."""
    tensors: dict[str, torch.Tensor] = {}
    prompt = json.loads((directory / "prompt.json").read_text())
    result = {
        "init": check_init(directory, tensors),
        "weights": check_weights(directory, prompt, tensors),
        "step": check_gradients(directory, tensors),
        "handshake": check_handshake(build(directory / "llama")),
        "collectives": check_collectives(build(directory / "llama")),
    }
    launching.write(directory, result, tensors)
