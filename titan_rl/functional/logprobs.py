"""Log-probabilities and entropy of given tokens, straight from hidden states, without ``[N, V]`` logits.

The output projection, the temperature and the softmax are one autograd function that works on chunks of
tokens: it keeps the ``logsumexp`` of every token and recomputes the logits in backward. Which tokens are
trained, and gathering an output weight that is sharded, is the caller's business.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from titan_rl.functional.precision import accumulation_dtype, matmul, matmul_operand


class ChunkStatistics(NamedTuple):
    """What a chunk of ``n`` tokens needs to know about its logits ``z``: four numbers a token.

    A vocabulary-parallel variant computes these on each shard and merges them: ``max`` by a maximum, the two
    sums after rescaling by ``exp(max_shard - max)`` (and shifting ``sum_exp_shifted``), ``target`` by a sum.
    """

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
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
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
        weight: ``[V, D]`` output projection, unsharded. Gradient flows; with N = 0 it is a tensor of zeros,
            so that collectives that hang on the gradient still happen.
        targets: ``[N]`` int64 token ids in ``0..V-1``.
        temperature: What the logits are divided by, > 0; the one the generator sampled with.
        chunk_tokens: Tokens whose logits exist at the same time, >= 1. Results do not depend on it beyond
            rounding.
        with_entropy: Whether to return the entropy. Detach it when it is only logged: its share of the
            backward pass is then skipped.

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
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}.")
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    outputs = _ChunkedLogprobs.apply(
        hidden.to(dtype), weight.to(dtype), targets, 1.0 / temperature, chunk_tokens, with_entropy
    )
    return outputs if with_entropy else (outputs[0], None)


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
    ) -> tuple[torch.Tensor, ...]:
        num_tokens = hidden.shape[0]
        dtype = accumulation_dtype(hidden.dtype)
        logprobs, logsumexp, entropy = (hidden.new_empty(num_tokens, dtype=dtype) for _ in range(3))
        head = matmul_operand(weight)
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = matmul(matmul_operand(hidden[rows]), head.T).mul_(scale)
            statistics = _chunk_statistics(logits, targets[rows], with_entropy=with_entropy)
            logsumexp[rows] = statistics.logsumexp()
            logprobs[rows] = statistics.target - logsumexp[rows]
            chunk_entropy = statistics.entropy()
            if chunk_entropy is not None:
                entropy[rows] = chunk_entropy
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy if with_entropy else None)
        ctx.scale, ctx.chunk_tokens = scale, chunk_tokens
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
            logprobs = matmul(hidden_rows, head.T).mul_(ctx.scale).sub_(logsumexp[rows, None])
            grad_logits = _grad_logits(
                logprobs,
                targets[rows],
                grad_logprobs=None if grad_logprobs is None else grad_logprobs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                entropy=None if entropy is None else entropy[rows],
            )
            grad_logits = grad_logits.mul_(ctx.scale).to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_logits, head)
            if grad_weight is not None:
                grad_weight += matmul(grad_logits.T, hidden_rows)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


def _chunk_statistics(logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool) -> ChunkStatistics:
    """Reduce ``[n, V]`` logits, which are overwritten, to four numbers a token."""
    largest = logits.amax(dim=-1)
    target = logits.gather(-1, targets[:, None]).squeeze(-1)
    shifted = logits.sub_(largest[:, None])
    if not with_entropy:
        return ChunkStatistics(largest, shifted.exp_().sum(-1), target, None)
    exponential = shifted.exp()
    sum_exp = exponential.sum(-1)
    return ChunkStatistics(largest, sum_exp, target, exponential.mul_(shifted).sum(-1))


def _grad_logits(
    logprobs: torch.Tensor,
    targets: torch.Tensor,
    *,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, V]`` gradient of the logits; ``logprobs`` (``[n, V]``, whole vocabulary) is overwritten.

    ``grad_logprobs (1[v = target] - p_v) - grad_entropy p_v (log p_v + entropy)``
    """
    gradient = logprobs.exp().neg_()
    if grad_entropy is not None and entropy is not None:
        factor = logprobs.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        gradient.mul_(factor if grad_logprobs is None else factor.add_(grad_logprobs[:, None]))
    elif grad_logprobs is not None:
        gradient.mul_(grad_logprobs[:, None])
    if grad_logprobs is not None:
        gradient.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    return gradient
