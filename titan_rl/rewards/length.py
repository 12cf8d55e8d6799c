"""The ``length`` reward: a penalty that grows as a completion nears the length limit."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from titan_rl.errors import ConfigError
from titan_rl.types import Rollout


class Length:
    r"""Soft overlong punishment. With n sampled tokens, limit M and buffer b,

    .. math::
        r(y) = \begin{cases} 0 & n \le M - b \\ (M - b - n) / b & M - b < n \le M \\ -1 & n > M. \end{cases}

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13; there M = 20,480 and b = 4,096). n counts the
    sampled tokens of all turns, the stop token included; prompts do not count. With ``buffer_tokens = 0`` the
    penalty is a step: -1 past M.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Where the penalty starts and ends."""

        max_tokens: Annotated[int, Ge(1)]
        """Number of sampled tokens at which the penalty is -1. Usually ``sampling.max_tokens``."""

        buffer_tokens: Annotated[int, Ge(0)]
        """Width in tokens of the ramp from 0 to -1 that ends at ``max_tokens``."""

    def __init__(self, config: Config) -> None:
        """Check that the ramp fits below the limit.

        Args:
            config: See :class:`Config`.

        Raises:
            ConfigError: The limit or the buffer is impossible.
        """
        if config.max_tokens < 1:
            raise ConfigError(
                "reward.max_tokens", "be at least 1", config.max_tokens, "Set a positive limit."
            )
        if not 0 <= config.buffer_tokens <= config.max_tokens:
            raise ConfigError(
                "reward.buffer_tokens",
                f"lie between 0 and max_tokens = {config.max_tokens}",
                config.buffer_tokens,
                "DAPO uses a fifth of max_tokens.",
            )
        self.config = config

    def __call__(self, rollout: Rollout) -> float:
        """Score one rollout.

        Args:
            rollout: Any rollout; no answer is needed.

        Returns:
            A value in [-1, 0].
        """
        num_tokens = sum(len(turn.completion.token_ids) for turn in rollout.turns)
        limit, buffer = self.config.max_tokens, self.config.buffer_tokens
        if num_tokens <= limit - buffer:
            return 0.0
        if num_tokens > limit:
            return -1.0
        return (limit - buffer - num_tokens) / buffer
