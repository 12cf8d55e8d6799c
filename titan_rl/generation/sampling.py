"""From logits to sampled tokens, for generators that sample themselves. Pure functions on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from titan_rl.types import SamplingParams


def processed_logprobs(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    r"""Log-probabilities of the distribution that each row is drawn from.

    :math:`\log\mathrm{softmax}(z / \tau)`, then :func:`truncate`. A greedy row (temperature 0) gets those of
    temperature 1, not truncated, as vLLM reports them.

    Args:
        logits: ``[B, V]``, any floating dtype.
        sampling: One for each row.

    Returns:
        ``[B, V]`` fp32; ``-inf`` where a token cannot be drawn.
    """
    temperatures = torch.tensor([params.temperature or 1.0 for params in sampling], device=logits.device)
    logprobs = F.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    for row, params in enumerate(sampling):
        if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0):
            logprobs[row] = truncate(logprobs[row], params)
    return logprobs


def truncate(logprobs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Keep the likely tokens of one distribution and renormalise: ``min_p``, then ``top_k``, then ``top_p``.

    Each works on what the one before has left, in vLLM's order. Tokens that tie with the k-th are all kept.

    Args:
        logprobs: ``[V]`` log-probabilities.
        params: What to keep.

    Returns:
        ``[V]``; ``-inf`` at dropped tokens. The most likely token is always kept.

    >>> p = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    >>> truncate(p, SamplingParams(max_tokens=1, top_p=0.7)).exp()
    tensor([0.6250, 0.3750, 0.0000, 0.0000])
    """
    if params.min_p > 0:
        logprobs = _keep(logprobs, logprobs >= logprobs.max() + math.log(params.min_p))
    if 0 < params.top_k < len(logprobs):
        logprobs = _keep(logprobs, logprobs >= logprobs.topk(params.top_k).values[-1])
    if params.top_p < 1:
        ordered, tokens = logprobs.sort(descending=True, stable=True)
        probs = ordered.double().exp()
        before = probs.cumsum(0) - probs
        kept = torch.zeros_like(logprobs, dtype=torch.bool)
        kept[tokens[before < params.top_p]] = True
        logprobs = _keep(logprobs, kept)
    return logprobs


def _keep(logprobs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logprobs.masked_fill(~kept, -math.inf), dim=-1)


def draw(logprobs: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    r"""Draw one token per row by inverting its distribution function, in fp64.

    The smallest v with :math:`\sum_{w \le v} p_w > u`. One uniform number decides a token, so a row's draw
    depends on nothing but its own number and logits. A change of the probabilities in their last bits moves
    the boundaries by as little: it changes the token only when u lies that close to one (about one draw in a
    million for fp32 logits).

    Args:
        logprobs: ``[B, V]`` log-probabilities; ``-inf`` is never drawn.
        uniforms: B numbers in [0, 1).

    Returns:
        ``[B]`` int64 tokens.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3).log(), [0.0, 0.24, 0.26]).tolist()
    [0, 0, 2]
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    threshold = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None] * total
    # u < 1, but u * total can round up to the total, beyond which there is no token.
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # Only NaN gets past the last token; its log-probability is NaN, and the completion is refused for that.
    return tokens.clamp(max=logprobs.shape[-1] - 1)
