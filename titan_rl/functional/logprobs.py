"""Log-probabilities and entropy of given tokens, straight from hidden states, without ``[N, V]`` logits.

The output projection, the temperature and the softmax are one autograd function that works on chunks of
tokens: it keeps the ``logsumexp`` of every token and recomputes the logits in backward. Which tokens are
trained, and gathering an output weight that is sharded, is the caller's business.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from titan_rl.functional.precision import (
    accumulation_dtype,
    add_matmul_,
    matmul,
    matmul_operand,
    scaled_matmul,
)

_CHUNK_LOGITS = 2**26
_LEAST_CHUNK_TOKENS, _MOST_CHUNK_TOKENS = 64, 1024  # fewer make thin matrix products, more gain nothing


class VocabularyShard(Protocol):
    """Rows of an output projection whose other rows are on other ranks, and reductions over all of them."""

    start: int
    """Token id of the first row."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest value over the shards, element by element."""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the shards, element by element."""
        ...


class ChunkStatistics(NamedTuple):
    """What a chunk of ``n`` tokens needs to know about its logits ``z``: four numbers a token."""

    max: torch.Tensor
    """[n], largest logit."""
    sum_exp: torch.Tensor
    """[n], sum over the vocabulary of ``exp(z - max)``."""
    target: torch.Tensor
    """[n], logit of the target token."""
    sum_exp_shifted: torch.Tensor | None
    """[n], sum over the vocabulary of ``exp(z - max) (z - max)``; None when no entropy is asked for."""

    def logsumexp(self) -> torch.Tensor:
        """[n], ``log sum exp z``."""
        return self.max + self.sum_exp.log()

    def merged(self, shard: VocabularyShard) -> ChunkStatistics:
        """Those of the whole vocabulary, from those of every shard: four numbers a token travel, no logits.

        With ``m`` the maximum over all and ``d = max - m`` of a shard, ``exp(z - m) = exp(d) exp(z - max)``
        and ``exp(z - m) (z - m) = exp(d) exp(z - max) ((z - max) + d)``.
        """
        largest = shard.max(self.max.clone())
        shift = self.max - largest
        factor = shift.exp()
        parts = [self.sum_exp * factor, self.target]
        if self.sum_exp_shifted is not None:
            parts.append((self.sum_exp_shifted + shift * self.sum_exp) * factor)
        sums = shard.sum(torch.stack(parts))
        return ChunkStatistics(largest, sums[0], sums[1], sums[2] if len(parts) == 3 else None)

    def entropy(self) -> torch.Tensor | None:
        """[n], ``-sum p log p`` in nats, or None when it was not asked for."""
        if self.sum_exp_shifted is None:
            return None
        return self.sum_exp.log() - self.sum_exp_shifted / self.sum_exp


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Log-probability of each target token under ``softmax(hidden @ weight.T / temperature)``.

    With ``z = hidden @ weight.T / temperature`` and ``p = softmax(z)``::

        logprob = z[target] - logsumexp(z)            entropy = -sum_v p_v log p_v

        d logprob / d z_v = 1[v = target] - p_v       d entropy / d z_v = -p_v (log p_v + entropy)

    Both results carry gradients to ``hidden`` and ``weight``. At most a few ``[chunk_tokens, V]`` buffers
    exist at any time, in forward and in backward. Logits, sums and the gradient of ``weight`` are accumulated
    in fp32 when the inputs are bf16 or fp16 (on CUDA by tensor cores with an fp32 result, elsewhere by
    casting), and in float64 when they are float64. The chunked recomputation is that of "Cut Your Losses"
    (Wijmans et al. 2024, arXiv 2411.09009) without its kernels and without dropping small gradients.

    Args:
        hidden: ``[N, D]`` states before the output projection; N may be 0. Gradient flows.
        weight: ``[V, D]`` output projection, or a shard of its rows. Gradient flows; with N = 0 zeros,
            so that collectives that hang on the gradient still happen.
        targets: ``[N]`` int64 token ids in ``0..V-1``.
        temperature: What the logits are divided by, > 0; the one the generator sampled with.
        chunk_tokens: Tokens whose logits exist at the same time, >= 1; by default
            :func:`default_chunk_tokens`. Results do not depend on it beyond rounding.
        with_entropy: Whether to return the entropy. Detach it when it is only logged: its share of the
            backward pass is then skipped.
        shard: The rows of the vocabulary that ``weight`` holds, on ranks that have equal ``hidden`` and
            ``targets``; None when it holds all. Results are those of the whole vocabulary. The gradient of
            ``hidden`` is this shard's part, to be added up over the ranks.

    Returns:
        ``logprobs``: ``[N]`` natural logarithms, fp32 (float64 for float64 inputs).
        ``entropy``: ``[N]`` nats, same dtype, or None.

    Raises:
        ValueError: When shapes or dtypes do not fit, or a number is out of range.

    >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> logprobs, _ = chunked_logprobs(hidden, weight, torch.tensor([1, 0]))
    >>> [round(x, 4) for x in logprobs.tolist()]
    [-0.5514, -1.5514]
    """
    _check_inputs(hidden, weight, targets)
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite; got {temperature}.")
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(weight.shape[0])
        num_chunks = max(-(-hidden.shape[0] // chunk_tokens), 1)
        chunk_tokens = max(-(-hidden.shape[0] // num_chunks), 1)  # of equal size: a small rest is slow
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}.")
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    outputs = _ChunkedLogprobs.apply(
        hidden.to(dtype), weight.to(dtype), targets, 1.0 / temperature, chunk_tokens, with_entropy, shard
    )
    return outputs if with_entropy else (outputs[0], None)


def default_chunk_tokens(vocab_size: int) -> int:
    """Tokens whose fp32 logits take at most 256 MiB: 64 to 1,024.

    Args:
        vocab_size: Rows of the output projection, or of a shard of it.

    >>> default_chunk_tokens(32_000), default_chunk_tokens(151_936), default_chunk_tokens(10_000_000)
    (1024, 441, 64)
    """
    return min(max(_CHUNK_LOGITS // max(vocab_size, 1), _LEAST_CHUNK_TOKENS), _MOST_CHUNK_TOKENS)


def _check_inputs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [N, D] and weight [V, D] with the same D; "
            f"got {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape {tuple(hidden.shape[:1])}; "
            f"got {targets.dtype} of shape {tuple(targets.shape)}."
        )


class _ChunkedLogprobs(torch.autograd.Function):
    """The autograd function behind :func:`chunked_logprobs`; both inputs have one dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        chunk_tokens: int,
        with_entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[torch.Tensor, ...]:
        num_tokens = hidden.shape[0]
        dtype = accumulation_dtype(hidden.dtype)
        logprobs, logsumexp, entropy = (hidden.new_empty(num_tokens, dtype=dtype) for _ in range(3))
        head = matmul_operand(weight)
        if shard is not None:
            targets = targets - shard.start
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = scaled_matmul(matmul_operand(hidden[rows]), head.T, scale)
            is_shard = shard is not None
            statistics = _chunk_statistics(
                logits, targets[rows], with_entropy=with_entropy, is_shard=is_shard
            )
            if shard is not None:
                statistics = statistics.merged(shard)
            logsumexp[rows] = statistics.logsumexp()
            logprobs[rows] = statistics.target - logsumexp[rows]
            chunk_entropy = statistics.entropy()
            if chunk_entropy is not None:
                entropy[rows] = chunk_entropy
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy if with_entropy else None)
        ctx.scale, ctx.chunk_tokens, ctx.is_shard = scale, chunk_tokens, shard is not None
        return (logprobs, entropy) if with_entropy else (logprobs,)

    @staticmethod
    @once_differentiable  # its type makes ctx positional-only, hence the waiver
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        grad_logprobs, grad_entropy = grad_outputs if len(grad_outputs) == 2 else (grad_outputs[0], None)
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dtype = logsumexp.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        nothing_flows = grad_logprobs is None and grad_entropy is None
        head = matmul_operand(weight)
        for start in range(0, 0 if nothing_flows else hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden_rows = matmul_operand(hidden[rows])
            logprobs = scaled_matmul(hidden_rows, head.T, ctx.scale).sub_(logsumexp[rows, None])
            grad_logits = _grad_logits(
                logprobs,
                targets[rows],
                grad_logprobs=None if grad_logprobs is None else grad_logprobs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                entropy=None if entropy is None else entropy[rows],
                is_shard=ctx.is_shard,
            )
            grad_logits = grad_logits.to(head.dtype)  # without the factor, which comes after the products
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_logits, head).mul_(ctx.scale)
            if grad_weight is not None:
                add_matmul_(grad_weight, grad_logits.T, hidden_rows, scale=ctx.scale)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 5,
        )


def _chunk_statistics(
    logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool, is_shard: bool
) -> ChunkStatistics:
    """Reduce ``[n, V]`` logits, which are overwritten, to four numbers a token.

    The target may be in another shard: its logit is 0 then.
    """
    largest = logits.amax(dim=-1)
    if is_shard:
        row, is_here = in_shard(targets, logits.shape[-1])
        target = logits.gather(-1, row[:, None]).squeeze(-1).where(is_here, 0.0)
    else:
        target = logits.gather(-1, targets[:, None]).squeeze(-1)
    shifted = logits.sub_(largest[:, None])
    if not with_entropy:
        return ChunkStatistics(largest, shifted.exp_().sum(-1), target, None)
    exponential = shifted.exp()
    sum_exp = exponential.sum(-1)
    # One row times one column a token: reads both once and writes nothing of their size.
    sum_exp_shifted = torch.bmm(exponential[:, None, :], shifted[:, :, None]).flatten()
    return ChunkStatistics(largest, sum_exp, target, sum_exp_shifted)


def in_shard(targets: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each target among the first ``num_rows``, clamped to them, and whether it is one of them."""
    return targets.clamp(0, num_rows - 1), (targets >= 0) & (targets < num_rows)


def _grad_logits(
    logprobs: torch.Tensor,
    targets: torch.Tensor,
    *,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
    is_shard: bool,
) -> torch.Tensor:
    """``[n, V]`` gradient of the logits; ``logprobs`` (``[n, V]``) is overwritten.

    ``grad_logprobs (1[v = target] - p_v) - grad_entropy p_v (log p_v + entropy)``
    """
    if grad_entropy is not None and entropy is not None:
        gradient = logprobs.exp()
        factor = logprobs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        gradient.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None]))
    else:
        gradient = logprobs.exp_()
        gradient.mul_(0.0 if grad_logprobs is None else -grad_logprobs[:, None])
    if grad_logprobs is not None:
        if is_shard:
            targets, is_here = in_shard(targets, gradient.shape[-1])
            grad_logprobs = grad_logprobs.where(is_here, 0.0)
        gradient.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    return gradient
