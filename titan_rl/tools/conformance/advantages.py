"""Rows of advantages, and the advantages of a whole algorithm: what a trainer's credit gives.

``titan_rl.trainers.credit`` does the same for scored batches of a run; a test holds the two together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from titan_rl.algorithms.advantages import GAE, GroupNormalized
from titan_rl.algorithms.interfaces import (
    KL,
    Advantage,
    GroupRewards,
    TokenAdvantage,
    TokenCredit,
    TokenRewards,
)
from titan_rl.algorithms.registries import ADVANTAGES
from titan_rl.algorithms.shaping import ShapingSection, shape_reward
from titan_rl.config.choice import Choice, build
from titan_rl.functional.segments import is_last_trained
from titan_rl.functional.whitening import whiten, whitening_sums
from titan_rl.tools.conformance.fixture import Fixture
from titan_rl.tools.conformance.options import Chosen, Options, Settings
from titan_rl.tools.conformance.parts import MORE_ADVANTAGES, LengthAdaptive, SoftOverlong, Whitening

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]

_PLAIN = ShapingSection()


def run_advantages(
    fixture: Fixture,
    advantage: Advantage,
    *,
    shaping: ShapingSection = _PLAIN,
    kl: KL | None = None,
    max_tokens: int = 1,
    whitening: Whitening | None = None,
) -> TokenCredit:
    """Advantages at every trained token, and returns where there is a critic.

    Args:
        fixture: With ``scores``; ``tok_rew`` replaces the scores of an advantage per token; a greedy baseline
            needs ``greedy``, GAE ``values``, and a penalty in the reward ``ref``.
        advantage: Per rollout or per token.
        shaping: Of the rewards; a greedy rollout's length is not known and not punished.
        kl: A penalty, which is subtracted from the rewards if it is placed there and on.
        max_tokens: For the punishment of length.
        whitening: Of the advantages, when shaping asks for it.

    Raises:
        MissingFieldError: The fixture lacks what is needed.
    """
    penalty = _penalty(fixture, kl)
    if isinstance(advantage, TokenAdvantage):
        credit = _per_token(fixture, advantage, penalty, shaping, max_tokens)
    else:
        per_rollout = advantage_of_rollouts(
            fixture, advantage, shaping=shaping, max_tokens=max_tokens, penalty=penalty
        )
        credit = TokenCredit(_spread(per_rollout, fixture), None)
    if shaping.whiten:
        eps = (whitening or Whitening()).eps
        sums = whitening_sums(credit.advantages, fixture.mask)
        credit = credit._replace(advantages=whiten(credit.advantages, fixture.mask, *sums, eps=eps))
    return credit


def advantage_of_rollouts(
    fixture: Fixture,
    advantage: Advantage,
    *,
    shaping: ShapingSection,
    max_tokens: int,
    penalty: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B]`` float64: what an advantage gives to each rollout, in the order of the file."""
    scores, lengths = fixture.need("scores").tolist(), fixture.lengths
    greedy = fixture.need("greedy").tolist() if advantage.needs.greedy_baseline else None
    subtracted = [0.0] * len(scores) if penalty is None else penalty.double().sum(1).tolist()

    def shaped(reward: float, length: int) -> float:
        return shape_reward(reward, num_tokens=length, section=shaping, max_tokens=max_tokens)

    groups = [
        GroupRewards(
            rewards=[shaped(scores[i], lengths[i]) - subtracted[i] for i in rows],
            num_tokens=[lengths[i] for i in rows],
            baseline=None if greedy is None else shaped(greedy[rows[0]], 0),
        )
        for rows in fixture.groups
    ]
    found = torch.zeros(len(scores), dtype=torch.float64)
    found[[i for rows in fixture.groups for i in rows]] = torch.tensor(advantage(groups), dtype=torch.float64)
    return found


def _per_token(
    fixture: Fixture,
    advantage: TokenAdvantage,
    penalty: torch.Tensor | None,
    shaping: ShapingSection,
    max_tokens: int,
) -> TokenCredit:
    mask, index = fixture.mask, fixture.sample_index
    rewards = fixture.tensors.get("tok_rew")
    if rewards is None:
        outcomes = advantage_of_rollouts(fixture, advantage, shaping=shaping, max_tokens=max_tokens)
        rewards = torch.where(is_last_trained(mask, index), _spread(outcomes, fixture), 0.0)
    return advantage.over_tokens(
        TokenRewards(
            rewards=rewards if penalty is None else rewards - penalty,
            loss_mask=mask,
            sample_index=index,
            values=fixture.need("values") if advantage.needs.critic else None,
        )
    )


def _penalty(fixture: Fixture, kl: KL | None) -> torch.Tensor | None:
    """Coefficient times estimate, of the old policy, which sampled the tokens, against the reference."""
    if kl is None or not kl.is_in_reward or kl.coefficient == 0:
        return None
    estimate = kl(fixture.need("old"), fixture.need("ref"))
    return kl.coefficient * torch.where(fixture.mask, estimate, 0.0)


def _spread(values: torch.Tensor, fixture: Fixture) -> torch.Tensor:
    return torch.where(fixture.mask, values.to(fixture.need("logp").dtype)[:, None], 0.0)


def option_rows() -> list[str]:
    """Names of the rows whose table is read here."""
    return [f"advantage/{name}" for name in ADVANTAGES | MORE_ADVANTAGES]


def advantage_rows(fixture: Fixture, options: Options) -> Rows:
    """A row per advantage, and variants: whitened, centred, with a lambda of the sample's length.

    Args:
        fixture: The data.
        options: Its hyperparameters.
    """
    registry = ADVANTAGES | MORE_ADVANTAGES
    rows = _Rows(fixture, options)
    for name in registry:
        yield f"advantage/{name}", lambda name=name: rows.row(rows.chosen(registry, name))
    for name in ("returns", "gae", "group_normalized"):
        yield (
            f"advantage/{name}|whitened",
            lambda name=name: rows.row(rows.chosen(registry, name), is_whitened=True),
        )
    yield "advantage/group_normalized|centred", lambda: rows.row(rows.centred())
    yield (
        "advantage/group_normalized|centred|whitened",
        lambda: rows.row(rows.centred(), is_whitened=True),
    )
    yield "advantage/gae|length_adaptive", rows.length_adaptive
    yield "advantage/group_normalized|centred|soft_overlong", rows.soft_overlong


class _Rows:
    def __init__(self, fixture: Fixture, options: Options) -> None:
        self.fixture, self.options = fixture, options

    def chosen(self, registry: Mapping[str, str], name: str) -> Chosen[Any]:
        config_type = Choice(registry).config_type(name, "advantage.type")
        if config_type is None:
            raise TypeError(f"advantage/{name} has no Config")
        return self.options.of_row(f"advantage/{name}", config_type())

    def centred(self) -> Chosen[GroupNormalized.Config]:
        chosen = self.options.of_row("advantage/group_normalized", GroupNormalized.Config())
        config = dataclasses.replace(chosen.config, normalise_std=False)
        return Chosen(config, chosen.given | {"normalise_std"})

    def row(self, chosen: Chosen[Any], *, is_whitened: bool = False) -> Row:
        whitening = self.options.of_function("whiten", Whitening())
        credit = run_advantages(
            self.fixture,
            build(chosen.config),
            shaping=ShapingSection(whiten=is_whitened),
            whitening=whitening.config,
        )
        settings = chosen.settings("advantage.")
        return _shown(credit, settings | whitening.settings("whiten.") if is_whitened else settings)

    def length_adaptive(self) -> Row:
        chosen = self.options.of_row("advantage/gae", GAE.Config())
        adaptive = self.options.of_function("length_adaptive_lambda", LengthAdaptive())
        config = dataclasses.replace(chosen.config, length_adaptive_alpha=adaptive.config.alpha)
        given = chosen.given | ({"length_adaptive_alpha"} if adaptive.given else frozenset())
        return self.row(Chosen(config, given))

    def soft_overlong(self) -> Row:
        default = SoftOverlong(max_tokens=self.options.max_tokens.config.max_tokens)
        overlong = self.options.of_function("soft_overlong", default)
        centred = self.centred()
        shaping = ShapingSection(
            overlong_buffer_tokens=overlong.config.overlong_buffer_tokens,
            overlong_penalty=overlong.config.overlong_penalty,
        )
        credit = run_advantages(
            self.fixture,
            build(centred.config),
            shaping=shaping,
            max_tokens=overlong.config.max_tokens,
        )
        return _shown(credit, centred.settings("advantage.") | overlong.settings("soft_overlong."))


def _shown(credit: TokenCredit, settings: Settings) -> Row:
    row: Row = {"advantages": credit.advantages.tolist()}
    if credit.returns is not None:
        row["returns"] = credit.returns.tolist()
    return row | {"hyperparameters": settings.values, "defaults": settings.defaults}
