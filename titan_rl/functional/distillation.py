"""Divergence from a policy's next-token distribution to a teacher's, without ``[N, V]`` logits.

Both output projections, the temperature, the softmaxes and the divergence are one autograd function that
works on chunks of tokens and recomputes the logits in backward, like :mod:`titan_rl.functional.logprobs`.
Which tokens are compared, and gathering output weights that are sharded over data-parallel ranks, is the
caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from titan_rl.functional.logprobs import in_shard
from titan_rl.functional.precision import accumulation_dtype, matmul, matmul_operand

Divergence = Literal["reverse", "forward"]


class SharedVocabulary(Protocol):
    """Rows of both output projections whose other rows are on other ranks, and what joins all of them."""

    start: int
    """Token id of the first row."""
    size: int
    """Rows over all shards."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the shards, element by element."""
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """``[S, ...]``, the values of each of S shards."""
        ...


class _Whole:
    """The only shard."""

    start = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[None]


def chunked_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "reverse",
    top_k: int = 0,
    chunk_tokens: int = 1024,
    shard: SharedVocabulary | None = None,
) -> torch.Tensor:
    r"""KL divergence per token between a policy ``p`` and a teacher ``q``, over all tokens or the largest.

    With ``z = hidden @ weight.T / temperature``, ``p = softmax(z)``, and ``q`` of the teacher likewise::

        reverse = KL(p || q) = sum_v p_v (log p_v - log q_v)      d/dz_v = p_v (log p_v - log q_v - reverse)
        forward = KL(q || p) = sum_v q_v (log q_v - log p_v)      d/dz_v = p_v - q_v

    These are the divergences of Agarwal et al. 2024 (GKD, arXiv 2306.13649, section 2); the tokens at which
    they are taken come from the caller. Both are exact sums over the vocabulary, not estimates from the
    sampled token, whose variance they do not have.

    With ``top_k = k`` the vocabulary is coarsened to k + 1 classes: k tokens of their own and one class for
    all others, whose probability is their sum (the tail). The divergence is that of the two coarsened
    distributions, so it is 0 where they agree, at most the full divergence (data processing), and equal to
    it at ``k >= V``. The k tokens are the largest of the distribution that the expectation is taken over:
    the policy's for reverse, the teacher's for forward. The policy's k largest with a class for the tail is
    how Hübotter et al. 2026 (SDPO, arXiv 2601.20802) truncate; renormalising over k tokens, as others do,
    would leave the mass that the policy puts elsewhere without a gradient.

    Where the vocabulary is cut into shards, two numbers a token of each shard travel to all of them, the
    logarithms of both normalisers, and one comes back as a sum; with top_k also k candidates of each shard,
    and the log-probabilities of the k tokens. No logits do, and nothing does in backward.

    At most a few ``[chunk_tokens, V]`` buffers exist at any time, in forward and in backward; 2 numbers a
    token are kept in between, and with top_k ``2 (k + 1)`` more. Sums are fp32 for low-precision inputs and
    float64 for float64. The chunked recomputation is that of "Cut Your Losses"
    (Wijmans et al. 2024, arXiv 2411.09009) without its kernels.

    Args:
        hidden: ``[N, D]`` states of the policy before its output projection; N may be 0. Gradient flows.
        weight: ``[V, D]`` output projection of the policy, or a shard of its rows. Gradient flows; with N = 0
            it is a tensor of zeros, so that collectives that hang on the gradient still happen.
        teacher_hidden: ``[N, E]`` states of the teacher at the same tokens. No gradient.
        teacher_weight: ``[V, E]`` output projection of the teacher, the same rows. No gradient.
        temperature: What both models' logits are divided by, > 0.
        divergence: ``"reverse"`` or ``"forward"``.
        top_k: Tokens with a class of their own, >= 0; 0 is the whole vocabulary.
        chunk_tokens: Tokens whose logits exist at the same time, >= 1. Results do not depend on it beyond
            rounding.
        shard: The rows of the vocabulary that both weights hold, on ranks that have equal states; None when
            they hold all. The result is that of the whole vocabulary. The gradient of ``hidden`` is this
            shard's part, to be added up over the ranks.

    Returns:
        ``[N]`` nats, fp32 (float64 for float64 inputs), >= 0 up to rounding.

    Raises:
        ValueError: When shapes do not fit, or a number is out of range.

    >>> hidden = torch.ones(1, 1)
    >>> policy, teacher = torch.tensor([[0.0], [math.log(3)]]), torch.zeros(2, 1)  # 1/4, 3/4 and 1/2, 1/2
    >>> round(chunked_divergence(hidden, policy, hidden, teacher).item(), 4)
    0.1308
    >>> round(chunked_divergence(hidden, policy, hidden, teacher, divergence="forward").item(), 4)
    0.1438
    """
    _check_inputs(hidden, weight, teacher_hidden, teacher_weight)
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite; got {temperature}.")
    if divergence not in ("reverse", "forward"):
        raise ValueError(f"divergence must be 'reverse' or 'forward'; got {divergence!r}.")
    if top_k < 0 or chunk_tokens < 1:
        raise ValueError(f"top_k must be >= 0 and chunk_tokens >= 1; got {top_k} and {chunk_tokens}.")
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    teacher_dtype = torch.promote_types(teacher_hidden.dtype, teacher_weight.dtype)
    shard = _Whole(weight.shape[0]) if shard is None else shard
    top_k = top_k if top_k < shard.size else 0
    options = _Options(1.0 / temperature, divergence, top_k, chunk_tokens, shard)
    return _ChunkedDivergence.apply(
        hidden.to(dtype),
        weight.to(dtype),
        teacher_hidden.detach().to(teacher_dtype),
        teacher_weight.detach().to(teacher_dtype),
        options,
    )


def _check_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
) -> None:
    for name, states, head in (("", hidden, weight), ("teacher_", teacher_hidden, teacher_weight)):
        if states.ndim != 2 or head.ndim != 2 or states.shape[1] != head.shape[1]:
            raise ValueError(
                f"{name}hidden must be [N, D] and {name}weight [V, D] with the same D; "
                f"got {tuple(states.shape)} and {tuple(head.shape)}."
            )
    if hidden.shape[0] != teacher_hidden.shape[0] or weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            "policy and teacher must have the same N and V; "
            f"got N = {hidden.shape[0]} and {teacher_hidden.shape[0]}, "
            f"V = {weight.shape[0]} and {teacher_weight.shape[0]}."
        )


class _Options(NamedTuple):
    """What is computed, and over which rows."""

    scale: float
    divergence: Divergence
    top_k: int  # 0: the whole vocabulary
    chunk_tokens: int
    shard: SharedVocabulary


class _ChunkedDivergence(torch.autograd.Function):
    """The autograd function behind :func:`chunked_divergence`; each model's inputs have one dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        count, dtype = hidden.shape[0], accumulation_dtype(hidden.dtype)
        num_kept = options.top_k + 1 if options.top_k else 0
        values = hidden.new_empty(count, dtype=dtype)
        normalisers = hidden.new_empty(2, count, dtype=dtype)
        chosen = torch.empty(count, options.top_k, dtype=torch.int64, device=hidden.device)
        classes = hidden.new_empty(2, count, num_kept, dtype=dtype)
        heads = matmul_operand(weight), matmul_operand(teacher_weight)
        for start in range(0, count, options.chunk_tokens):
            rows = slice(start, start + options.chunk_tokens)
            logits = [
                _logits(states[rows], head, options.scale, dtype)
                for states, head in zip((hidden, teacher_hidden), heads, strict=True)
            ]
            own = torch.stack([z.logsumexp(-1) for z in logits])
            normalisers[:, rows] = options.shard.gather(own).logsumexp(0)
            both = [z.sub_(n[rows, None]) for z, n in zip(logits, normalisers, strict=True)]
            if options.top_k:
                larger = both[0] if options.divergence == "reverse" else both[1]
                chosen[rows] = _largest(larger, options.top_k, options.shard)
                classes[:, rows] = _classes(both, chosen[rows], options.shard)
                values[rows] = _sum_of(classes[:, rows], options.divergence)
            else:
                values[rows] = options.shard.sum(_sum_of(both, options.divergence))
        ctx.save_for_backward(
            hidden, weight, teacher_hidden, teacher_weight, normalisers, chosen, classes, values
        )
        ctx.options = options
        return values

    @staticmethod
    @once_differentiable  # its type makes ctx positional-only, hence the waiver
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        (grad,) = grad_outputs
        hidden, weight, teacher_hidden, teacher_weight, normalisers, chosen, classes, values = (
            ctx.saved_tensors
        )
        options: _Options = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dtype = values.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        head, teacher_head = matmul_operand(weight), matmul_operand(teacher_weight)
        for start in range(0, hidden.shape[0], options.chunk_tokens):
            rows = slice(start, start + options.chunk_tokens)
            hidden_rows = matmul_operand(hidden[rows])
            policy = _logits(hidden[rows], head, options.scale, dtype).sub_(normalisers[0, rows, None])
            if options.top_k:
                gradient = _grad_of_classes(
                    policy,
                    *classes[:, rows],
                    row_of=in_shard(chosen[rows] - options.shard.start, policy.shape[-1]),
                    values=values[rows],
                    divergence=options.divergence,
                )
            else:
                teacher = _logits(teacher_hidden[rows], teacher_head, options.scale, dtype)
                teacher.sub_(normalisers[1, rows, None])
                gradient = _grad_logits(policy, teacher, values=values[rows], divergence=options.divergence)
            gradient = gradient.mul_(options.scale * grad[rows, None]).to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(gradient, head)
            if grad_weight is not None:
                grad_weight += matmul(gradient.T, hidden_rows)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 3,
        )


def _logits(hidden: torch.Tensor, head: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``[n, V]`` logits at the temperature."""
    return matmul(matmul_operand(hidden), head.T).to(dtype).mul_(scale)


def _sum_of(both: Sequence[torch.Tensor] | torch.Tensor, divergence: Divergence) -> torch.Tensor:
    """``[n]``: what the models' log-probabilities of tokens, or of classes, add to the divergence."""
    over, under = (both[0], both[1]) if divergence == "reverse" else (both[1], both[0])
    return (over.exp() * (over - under)).sum(-1)


def _largest(log_probs: torch.Tensor, top_k: int, shard: SharedVocabulary) -> torch.Tensor:
    """``[n, k]`` token ids of the largest over all shards."""
    largest, rows = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1, sorted=False)
    missing = (0, top_k - largest.shape[-1])  # a shard smaller than k
    largest = torch.nn.functional.pad(largest, missing, value=-math.inf)
    rows = torch.nn.functional.pad(rows + shard.start, missing)
    candidates, ids = (shard.gather(x).movedim(0, 1).flatten(1) for x in (largest, rows))
    return ids.gather(-1, candidates.topk(top_k, dim=-1, sorted=False).indices)


def _classes(
    log_probs: Sequence[torch.Tensor], chosen: torch.Tensor, shard: SharedVocabulary
) -> torch.Tensor:
    """``[2, n, k + 1]`` log-probabilities of the chosen tokens and of all others together, for both models.

    Those of the others are added up where they are: exact where 1 - sum would cancel.
    """
    row, is_here = in_shard(chosen - shard.start, log_probs[0].shape[-1])
    kept = shard.sum(torch.stack([x.gather(-1, row).where(is_here, 0.0) for x in log_probs]))
    hidden = torch.zeros_like(kept[0]).masked_fill_(is_here, -math.inf)
    tails = [x.scatter_add(-1, row, hidden).logsumexp(-1, keepdim=True) for x in log_probs]
    return torch.cat([kept, shard.gather(torch.stack(tails)).logsumexp(0)], dim=-1)


def _grad_logits(
    policy: torch.Tensor, teacher: torch.Tensor, *, values: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    """``[n, V]`` gradient with respect to the policy's logits, from both models' log-probabilities."""
    if divergence == "reverse":
        return (policy - teacher).sub_(values[:, None]).mul_(policy.exp())
    return policy.exp().sub_(teacher.exp())


def _grad_of_classes(
    policy: torch.Tensor,
    classes: torch.Tensor,
    teacher_classes: torch.Tensor,
    *,
    row_of: tuple[torch.Tensor, torch.Tensor],
    values: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """``[n, V]`` gradient with respect to the policy's logits, from both models' classes.

    With ``P`` and ``Q`` of the class that holds ``v``: reverse ``p_v (log P - log Q - KL)``, forward
    ``p_v - p_v Q / P``.
    """
    value, (row, is_here) = values[:, None], row_of
    kept, teacher_kept = classes[:, :-1], teacher_classes[:, :-1]
    tail = classes[:, -1:] - teacher_classes[:, -1:]
    if divergence == "reverse":
        gradient = policy.exp().mul_(tail - value)
        of_kept = kept.exp() * (kept - teacher_kept - value)
    else:
        gradient = policy.exp().sub_((policy - tail).exp_())  # p_v Q / P as one exponential: P may underflow
        of_kept = kept.exp() - teacher_kept.exp()
    # Added and not written: a token of another shard stands for row 0 here.
    return gradient.scatter_add_(-1, row, (of_kept - gradient.gather(-1, row)).where(is_here, 0.0))
