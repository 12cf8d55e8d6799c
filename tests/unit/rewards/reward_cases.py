"""Rollouts for the tests of rewards."""

from titan_rl.types import Completion, FinishReason, Message, Prompt, Rollout, Turn


def make_rollout(
    text, *, answer="4", num_tokens=2, prompt_id="train/7", num_turns=1, metadata=None
) -> Rollout:
    completion = Completion(
        request_id=f"{prompt_id}/0/0",
        token_ids=tuple(range(num_tokens)),
        logprobs=(-0.5,) * num_tokens,
        finish_reason=FinishReason.STOP,
        policy_versions=((0, 3),),
    )
    prompt = Prompt(
        id=prompt_id, messages=(Message("user", "2 + 2?"),), answer=answer, metadata=metadata or {"level": 1}
    )
    turns = [Turn(prompt_token_ids=(5, 6), completion=completion, text=text) for _ in range(num_turns)]
    return Rollout(prompt=prompt, sample_index=1, seed=2**62 + 1, turns=turns)
