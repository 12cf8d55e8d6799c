"""A generator, rewards and a tokenizer in memory, for tests of rollouts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

from titan_rl.rewards.wire import RewardFailure
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Group,
    Message,
    Prompt,
    Reward,
    Rollout,
    SamplingParams,
    Turn,
)

SAMPLING = SamplingParams(max_tokens=4)


def make_prompts(count: int, start: int = 0) -> list[tuple[int, Prompt]]:
    """Prompts with their index in the global draw."""
    return [
        (i, Prompt(id=f"p{i}", messages=(Message("user", "x" * (1 + i % 3)),), answer=str(i)))
        for i in range(start, start + count)
    ]


class FakeEncoder:
    """One token per character of the prompt; completions read as their numbers."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [len(message.content) for message in messages for _ in message.content]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def draw(request: GenerationRequest) -> tuple[int, ...]:
    """Tokens that depend on prompt and seed alone, one to ``max_tokens`` of them."""
    digest = hashlib.sha256(f"{request.prompt_token_ids} {request.seed}".encode()).digest()
    return tuple(digest[: 1 + digest[-1] % request.sampling.max_tokens])


class FakeGenerator:
    """Answers in the reverse of the order in which it was asked.

    ``change`` may put another completion in the place of one, or several, or none.
    """

    def __init__(
        self, *, version: int = 3, change: Callable[[Completion], list[Completion]] = lambda c: [c]
    ) -> None:
        self.version, self.change = version, change
        self.requests: list[GenerationRequest] = []
        self.timeouts: list[float] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(policy_version=self.version)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[str]:
        self.requests += requests
        return [request.id for request in requests]

    def completions(self, timeout_seconds: float) -> Iterator[Completion]:
        self.timeouts.append(timeout_seconds)
        for request in reversed(self.requests):
            yield from self.change(self.answer(request))

    def answer(self, request: GenerationRequest) -> Completion:
        token_ids = draw(request)
        is_cut = len(token_ids) == request.sampling.max_tokens
        return Completion(
            request_id=request.id,
            token_ids=token_ids,
            logprobs=tuple(-0.5 - 0.25 * (token % 4) for token in token_ids),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            policy_versions=((0, self.version),),
        )


class FakeRewards:
    """The reward is the number of tokens; ``fails`` says for which rollouts there is none."""

    def __init__(self, *, fails: Callable[[Rollout], bool] = lambda rollout: False) -> None:
        self.fails = fails
        self.submitted: dict[int, Rollout] = {}
        self.loses = 0

    def submit(self, key: int, rollout: Rollout) -> None:
        assert key not in self.submitted
        self.submitted[key] = rollout

    def results(self, timeout_seconds: float) -> Iterator[tuple[int, Reward | RewardFailure]]:
        for key, rollout in list(self.submitted.items())[self.loses :]:
            if self.fails(rollout):
                yield key, RewardFailure("timeout", "took too long")
            else:
                yield key, Reward(float(len(rollout.turns[-1].completion.token_ids)), {"length": 1.0})
        self.submitted.clear()


def make_rollout(
    *,
    prompt: Prompt | None = None,
    sample_index: int = 0,
    prompt_tokens: Sequence[int] = (5, 6),
    tokens: Sequence[int] = (7, 8),
    reward: float | None = 1.0,
    is_truncated: bool = False,
) -> Rollout:
    """A finished rollout; ``reward=None`` means that its reward failed."""
    completion = Completion(
        request_id="r",
        token_ids=tuple(tokens),
        logprobs=tuple(-0.1 * (i + 1) for i in range(len(tokens))),
        finish_reason=FinishReason.LENGTH if is_truncated else FinishReason.STOP,
        policy_versions=((0, 3),),
    )
    return Rollout(
        prompt=prompt or make_prompts(1)[0][1],
        sample_index=sample_index,
        seed=11,
        turns=[Turn(tuple(prompt_tokens), completion, "text")],
        reward=None if reward is None else Reward(reward, {"exact": reward}),
        reward_error=None if reward is not None else "timeout: took too long",
    )


def make_group(index: int, rewards: Sequence[float | None]) -> Group:
    prompt = make_prompts(1, start=index)[0][1]
    rollouts = [make_rollout(prompt=prompt, sample_index=i, reward=r) for i, r in enumerate(rewards)]
    return Group(prompt=prompt, index=index, rollouts=rollouts, prompt_token_ids=(5, 6))
