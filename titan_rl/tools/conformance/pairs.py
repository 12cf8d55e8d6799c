"""Rows of losses on pairs (preferences and reward models), and of the critic's loss.

Of each group with two different scores the rollout with the highest score is the chosen completion of a pair
and that with the lowest the rejected one; the first of equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from titan_rl.algorithms.advantages import GAE
from titan_rl.algorithms.preference_interfaces import CompletionScores, PreferenceInputs
from titan_rl.algorithms.preference_registry import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from titan_rl.config.choice import Choice, build
from titan_rl.functional.segments import sample_sum
from titan_rl.policy.value_loss import ClippedValueLoss, ValueInputs
from titan_rl.tools.conformance.advantages import run_advantages
from titan_rl.tools.conformance.fixture import Fixture, LeftOutError, MissingFieldError
from titan_rl.tools.conformance.losses import described, outcome
from titan_rl.tools.conformance.options import Chosen, Options, Settings
from titan_rl.tools.conformance.parts import Baseline, ValueClip

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]

_KINDS = {"preference": PREFERENCE_LOSSES, "reward_model": REWARD_MODEL_LOSSES}


def option_rows() -> list[str]:
    """Names of the rows whose table is read here."""
    return [f"{kind}/{name}" for kind, registry in _KINDS.items() for name in registry]


def pair_rows(fixture: Fixture, options: Options) -> Rows:
    """A row per loss on pairs, and the critic's.

    Args:
        fixture: The data.
        options: Its hyperparameters.
    """
    rows = _Rows(fixture, options)
    for name in PREFERENCE_LOSSES:
        yield f"preference/{name}", lambda name=name: rows.preference(name)
    for name in REWARD_MODEL_LOSSES:
        yield f"reward_model/{name}", lambda name=name: rows.reward_model(name)
    yield "value_loss/clipped", lambda: rows.value_loss(is_clipped=True)
    yield "value_loss/squared", lambda: rows.value_loss(is_clipped=False)


class _Rows:
    def __init__(self, fixture: Fixture, options: Options) -> None:
        self.fixture, self.options = fixture, options

    def preference(self, name: str) -> Row:
        """On sums of log-probabilities over the trained tokens."""
        chosen = self._chosen("preference", name)
        loss_fn = build(chosen.config)
        policy = self.fixture.need("logp").clone().requires_grad_()
        ref = self._sums(self.fixture.need("ref")) if loss_fn.needs.reference else None
        settings, baseline = chosen.settings(), None
        if loss_fn.needs.kl_baseline:
            of_baseline = self.options.of_function("kto_loss", Baseline())
            baseline = torch.tensor(of_baseline.config.kl_baseline)
            settings = settings | of_baseline.settings()
        inputs = self._inputs(self._sums(policy), ref=ref, baseline=baseline)
        return outcome(loss_fn(inputs).loss, policy) | self._described(settings)

    def reward_model(self, name: str) -> Row:
        """On one reward per rollout."""
        chosen = self._chosen("reward_model", name)
        source = "rm_scores" if "rm_scores" in self.fixture.tensors else "scores"
        rewards = self.fixture.need(source).clone().requires_grad_()
        row = outcome(build(chosen.config)(self._inputs(rewards)).loss, rewards)
        return row | {"with_respect_to": source} | self._described(chosen.settings())

    def value_loss(self, *, is_clipped: bool) -> Row:
        """On the critic's values, towards the file's returns or those of GAE."""
        clip = self.options.of_function("clipped_value_loss", ValueClip())
        values = self.fixture.need("vpreds").clone().requires_grad_()
        returns, settings = self._returns()
        mask = self.fixture.mask
        inputs = ValueInputs(
            values=values,
            returns=returns,
            old_values=self.fixture.need("values"),
            loss_mask=mask,
            num_loss_tokens=int(mask.sum()),
        )
        loss, metrics = ClippedValueLoss(clip.config.clip if is_clipped else 0.0)(inputs)
        row = outcome(loss, values) | {"with_respect_to": "vpreds"}
        if is_clipped:
            row["clip_fraction"] = metrics["clip_fraction"].item()
            settings = settings | clip.settings()
        return row | described(settings)

    # ------------------------------------------------------------------------------------------ details

    def _chosen(self, kind: str, name: str) -> Chosen[Any]:
        config_type = Choice(_KINDS[kind]).config_type(name, "loss.type")
        if config_type is None:
            raise TypeError(f"{kind}/{name} has no Config")
        return self.options.of_row(f"{kind}/{name}", config_type())

    def _pairs(self) -> list[tuple[int, int]]:
        scores, lengths = self.fixture.need("scores").tolist(), self.fixture.lengths
        found = []
        for group in self.fixture.groups:
            rows = [i for i in group if lengths[i]]
            if rows:
                best, worst = max(rows, key=lambda i: scores[i]), min(rows, key=lambda i: scores[i])
                if scores[best] > scores[worst]:
                    found.append((best, worst))
        if not found:
            raise LeftOutError("needs a group with two different scores, to make a pair of")
        return found

    def _sums(self, logprobs: torch.Tensor) -> torch.Tensor:
        index = self.fixture.sample_index
        return sample_sum(logprobs, self.fixture.mask, index)[:, 0]

    def _inputs(
        self,
        values: torch.Tensor,
        *,
        ref: torch.Tensor | None = None,
        baseline: torch.Tensor | None = None,
    ) -> PreferenceInputs:
        pairs = self._pairs()
        lengths = torch.tensor(self.fixture.lengths, dtype=values.dtype)
        margins = self.fixture.tensors.get("margins", torch.zeros_like(lengths))
        sides = [torch.tensor(side) for side in zip(*pairs, strict=True)]
        chosen, rejected = (
            CompletionScores(
                values=values[side], lengths=lengths[side], ref_logprobs=None if ref is None else ref[side]
            )
            for side in sides
        )
        return PreferenceInputs(
            chosen=chosen,
            rejected=rejected,
            margins=margins[sides[0]],
            num_chosen=len(pairs),
            num_rejected=len(pairs),
            kl_baseline=baseline,
        )

    def _returns(self) -> tuple[torch.Tensor, Settings]:
        if "returns" in self.fixture.tensors:
            return self.fixture.tensors["returns"], Settings()
        chosen = self.options.of_row("advantage/gae", GAE.Config())
        returns = run_advantages(self.fixture, build(chosen.config)).returns
        if returns is None:
            raise MissingFieldError("returns")
        return returns, chosen.settings("gae.")

    def _described(self, settings: Settings) -> Row:
        return {"pairs": [list(pair) for pair in self._pairs()]} | described(settings)
