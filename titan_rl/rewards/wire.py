"""What crosses the pipes between the trainer and a reward worker: framing, and rollouts and rewards as JSON.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON holding one object. Nothing is ever
pickled. Log-probabilities do not cross: no reward may depend on them, and they are most of a rollout's bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.types import Completion, FinishReason, Json, Message, Prompt, Reward, Rollout, Turn

HEADER = struct.Struct(">I")
"""The length of the JSON that follows, in bytes."""

FailureReason = Literal["raised", "invalid", "timeout", "crashed", "too_large"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a rollout has no reward.

    Attributes:
        reason: ``raised``: the reward raised. ``invalid``: it returned no finite number. ``timeout``: it ran
            past its deadline. ``crashed``: its process ended. ``too_large``: its reply exceeded the limit.
        message: One paragraph for the log.
    """

    reason: FailureReason
    message: str


class FrameError(ValueError):
    """The stream is not what the protocol allows."""


class FrameTooLargeError(FrameError):
    """A frame announces more bytes than are allowed."""


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """Encode one message.

    Args:
        message: A JSON object.

    Returns:
        Header and body.

    Raises:
        TypeError: Something in it is not JSON.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages.

    >>> decoder = FrameDecoder(max_bytes=100)
    >>> frame = encode_frame({"id": 1})
    >>> list(decoder.feed(frame[:3])), list(decoder.feed(frame[3:]))
    ([], [{'id': 1}])
    """

    def __init__(self, max_bytes: int) -> None:
        """Start at the beginning of a stream.

        Args:
            max_bytes: Largest body accepted, in bytes.
        """
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that ``data`` completes.

        Args:
            data: The next bytes of the stream.

        Yields:
            One decoded object per frame.

        Raises:
            FrameTooLargeError: A header announces more than ``max_bytes``.
            FrameError: A body is not a JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > self._max_bytes:
                raise FrameTooLargeError(f"a frame of {size} bytes exceeds the limit of {self._max_bytes}")
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            try:
                message = json.loads(body)
            except ValueError as error:
                raise FrameError(f"a frame is not JSON: {error}") from error
            if not isinstance(message, dict):
                raise FrameError(f"a frame must hold an object, not {type(message).__name__}")
            yield message


def rollout_to_json(rollout: Rollout, *, with_logprobs: bool = False) -> dict[str, Json]:
    """Write a rollout as JSON, without a reward.

    Args:
        rollout: Any rollout.
        with_logprobs: Log-probabilities too, which no reward needs.

    Returns:
        A JSON object. :func:`rollout_from_json` is its inverse up to what is left out.
    """
    prompt = rollout.prompt
    return {
        "prompt": {
            "id": prompt.id,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        },
        "sample_index": rollout.sample_index,
        "seed": rollout.seed,
        "turns": [_turn_to_json(turn, with_logprobs) for turn in rollout.turns],
    }


def rollout_from_json(value: Mapping[str, Any]) -> Rollout:
    """Read what :func:`rollout_to_json` wrote.

    Args:
        value: The JSON object.

    Returns:
        The rollout; ``logprobs`` of every completion is empty where it was left out.
    """
    prompt = value["prompt"]
    return Rollout(
        prompt=Prompt(
            id=prompt["id"],
            messages=tuple(Message(**message) for message in prompt["messages"]),
            answer=prompt["answer"],
            metadata=prompt["metadata"],
        ),
        sample_index=value["sample_index"],
        seed=value["seed"],
        turns=[_turn_from_json(turn) for turn in value["turns"]],
    )


def _turn_to_json(turn: Turn, with_logprobs: bool) -> dict[str, Json]:
    completion = turn.completion
    return {
        "prompt_token_ids": list(turn.prompt_token_ids),
        "text": turn.text,
        "completion": {
            "request_id": completion.request_id,
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs) if with_logprobs else [],
            "finish_reason": completion.finish_reason.value,
            "policy_versions": [list(segment) for segment in completion.policy_versions],
        },
    }


def _turn_from_json(value: Mapping[str, Any]) -> Turn:
    completion = value["completion"]
    return Turn(
        prompt_token_ids=tuple(value["prompt_token_ids"]),
        completion=Completion(
            request_id=completion["request_id"],
            token_ids=tuple(completion["token_ids"]),
            logprobs=tuple(completion["logprobs"]),
            finish_reason=FinishReason(completion["finish_reason"]),
            policy_versions=tuple((first, version) for first, version in completion["policy_versions"]),
        ),
        text=value["text"],
    )


def reward_to_json(reward: Reward) -> dict[str, Any]:
    """Write a reward as JSON; :func:`reward_from_json` is its inverse."""
    per_turn = None if reward.per_turn is None else list(reward.per_turn)
    return {"total": reward.total, "parts": dict(reward.parts), "per_turn": per_turn}


def reward_from_json(value: Mapping[str, Any]) -> Reward:
    """Read what :func:`reward_to_json` wrote."""
    per_turn = None if value["per_turn"] is None else tuple(value["per_turn"])
    return Reward(total=value["total"], parts=value["parts"], per_turn=per_turn)
