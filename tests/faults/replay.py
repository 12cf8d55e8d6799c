"""A generator that answers with the rollouts that another run has recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration import runs
from titan_rl.generation.local import LocalGenerator
from titan_rl.types import Completion, FinishReason, GenerationRequest


class ReplayGenerator(LocalGenerator):
    """Training requests are found by their seeds, which depend on no rank; evaluations are sampled."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalGenerator.Config):
        recorded: str = ""
        """``dump_folder`` of the other run."""

    def __init__(self, config: Config, context: Any) -> None:
        super().__init__(config, context)
        rollouts = runs.existing(Path(config.recorded)).rollouts()
        self._recorded = {rollout["seed"]: rollout for rows in rollouts.values() for rollout in rows}

    def _begin(self, request: GenerationRequest) -> None:
        if request.sampling.temperature == 0:
            super()._begin(request)
            return
        recorded = self._recorded[request.seed]
        assert self._policy_version is not None
        self._finished.append(
            Completion(
                request_id=request.id,
                token_ids=tuple(recorded["completion_token_ids"]),
                logprobs=tuple(recorded["generator_logprobs"]),
                finish_reason=FinishReason(recorded["finish_reason"]),
                policy_versions=((0, self._policy_version),),
            )
        )
