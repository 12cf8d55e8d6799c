"""Rows of policy losses: the named algorithms, every part, and compositions that the file spells out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch

from titan_rl.algorithms.aggregations import TokenMean
from titan_rl.algorithms.corrections import NoCorrection
from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.registries import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    CORRECTIONS,
    RATIOS,
    SURROGATES,
)
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.config.choice import Choice, build
from titan_rl.config.registry import resolve
from titan_rl.errors import ConfigError, NonFiniteError
from titan_rl.functional import kl
from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.distillation import Divergence, chunked_divergence
from titan_rl.functional.logprobs import chunked_logprobs
from titan_rl.tools.conformance.advantages import run_advantages
from titan_rl.tools.conformance.fixture import Fixture
from titan_rl.tools.conformance.options import Chosen, Options, Settings
from titan_rl.tools.conformance.parts import MORE_RATIOS, MORE_SURROGATES

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]

_KL_VALUES = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "absolute": kl.absolute}
_DIVERGENCES: tuple[Divergence, ...] = ("reverse", "forward")
_DEFAULT_AGGREGATION = "token_mean"


@dataclass(kw_only=True, slots=True)
class Sections:
    """The tables of an algorithm that a fixture can be computed with, under their names in a run's file."""

    advantage: Annotated[object, Choice(ADVANTAGES)]
    loss: PolicyLoss.Config = field(default_factory=PolicyLoss.Config)
    shaping: ShapingSection = field(default_factory=ShapingSection)


def option_rows() -> list[str]:
    """Names of the rows whose table is read here."""
    kinds = {
        "algorithm": ALGORITHMS,
        "surrogate": SURROGATES | MORE_SURROGATES,
        "ratio": RATIOS | MORE_RATIOS,
        "correction": CORRECTIONS,
        "aggregation": AGGREGATIONS,
    }
    names = [f"{kind}/{name}" for kind, registry in kinds.items() for name in registry]
    return [*names, "kl/reference", "entropy/bonus"]


def loss_rows(fixture: Fixture, options: Options) -> Rows:
    """Rows of everything that a policy loss is made of.

    Args:
        fixture: The data.
        options: Its hyperparameters.
    """
    rows = _Rows(fixture, options)
    for name in ALGORITHMS:
        yield f"algorithm/{name}", partial(rows.algorithm, name)
    for kind, registry in (("surrogate", SURROGATES | MORE_SURROGATES), ("ratio", RATIOS | MORE_RATIOS)):
        for name in registry:
            for aggregation in AGGREGATIONS:
                suffix = "" if aggregation == _DEFAULT_AGGREGATION else f"|{aggregation}"
                yield (
                    f"{kind}/{name}{suffix}",
                    partial(rows.part, kind, registry, name, aggregation=aggregation),
                )
    for name in AGGREGATIONS:
        yield f"aggregation/{name}", partial(rows.part, "aggregation", AGGREGATIONS, name)
    for name in CORRECTIONS:
        yield f"correction/{name}", partial(rows.correction, name)
    for name, function in _KL_VALUES.items():
        yield f"kl/{name}", partial(rows.kl_value, function)
    yield "kl/reference", partial(rows.kl_in_loss, None)
    for name in ("k2", "k3"):
        yield f"kl/reference|{name}", partial(rows.kl_in_loss, name)
    yield "entropy/mean", rows.entropy
    yield "entropy/bonus", rows.entropy_bonus
    for name in _DIVERGENCES:
        yield f"distillation/{name}", partial(rows.divergence, name)
    for name in options.compositions:
        yield name, partial(rows.composition, name)


class _Rows:
    def __init__(self, fixture: Fixture, options: Options) -> None:
        self.fixture, self.options = fixture, options

    def algorithm(self, name: str) -> Row:
        """Advantages of the scores, and the loss with them: what a run computes."""
        preset = resolve(name, ALGORITHMS, "algorithm.type")()
        default = Sections(advantage=preset.advantage, loss=preset.loss, shaping=preset.shaping)
        chosen = self.options.of_row(f"algorithm/{name}", default)
        sections = chosen.config
        for key in ("mask_truncated", "prompt_set_weights"):
            value = getattr(sections.shaping, key)
            if value:
                where = f"{self.fixture.file}: hyperparameters.algorithm/{name}.shaping.{key}"
                remedy = "A fixture has neither truncated rollouts nor prompt sets."
                raise ConfigError(where, "be absent", value, remedy)
        loss_fn = PolicyLoss(sections.loss)
        credit = run_advantages(
            self.fixture,
            build(sections.advantage),
            shaping=sections.shaping,
            kl=loss_fn.kl,
            max_tokens=self.options.max_tokens.config.max_tokens,
        )
        row = self._evaluate(loss_fn, credit.advantages)
        row["advantages"] = credit.advantages.tolist()
        settings = _relevant(chosen.settings(), sections.loss, chosen.given, prefix="loss.")
        return row | self._described(settings, sections.loss)

    def part(self, kind: str, registry: Mapping[str, str], name: str, *, aggregation: str = "") -> Row:
        """The clipped surrogate's composition with one part of another kind."""
        chosen = self._chosen(kind, registry, name)
        changes: dict[str, Any] = {kind: chosen}
        if aggregation:
            changes["aggregation"] = self._chosen("aggregation", AGGREGATIONS, aggregation)
        return self._composed(changes)

    def correction(self, name: str) -> Row:
        """The clipped surrogate under a correction, and the correction's weights."""
        chosen = self._chosen("correction", CORRECTIONS, name)
        row = self._composed({"correction": chosen})
        output = build(chosen.config)(self._inputs(self.fixture.need("adv")).masked())
        return row if output is None else row | {"weights": output.weights.tolist()}

    def kl_value(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Row:
        """The mean over tokens of an estimate, alone."""
        policy = self.fixture.need("logp").clone().requires_grad_()
        estimate = function(policy, self.fixture.need("ref"))
        mask = self.fixture.mask
        row = outcome(token_mean(estimate, mask, mask.sum()), policy)
        return row | {"values": torch.where(mask, estimate.detach(), 0.0).tolist()}

    def kl_in_loss(self, estimator: str | None) -> Row:
        """The clipped surrogate with the penalty of the distance to the reference."""
        chosen = self.options.of_row("kl/reference", KLPenalty.Config())
        changes: dict[str, Any] = {"placement": "loss"} | (
            {} if estimator is None else {"estimator": estimator}
        )
        config = dataclasses.replace(chosen.config, **changes)
        return self._composed({"kl": Chosen(config, chosen.given | changes.keys())})

    def entropy(self) -> Row:
        """The mean over tokens of the policy's entropy."""
        logits = self.fixture.need("logits").clone().requires_grad_()
        _, entropy = self._from_logits(logits)
        mask = self.fixture.mask
        return outcome(token_mean(entropy, mask, mask.sum()), logits) | {"with_respect_to": "logits"}

    def entropy_bonus(self) -> Row:
        """The clipped surrogate with the bonus, both of the logits."""
        chosen = self.options.of_row("entropy/bonus", PolicyLoss.Config().entropy)
        return self._composed({"entropy": chosen}, of_logits=True)

    def divergence(self, name: Divergence) -> Row:
        """The mean over tokens of the divergence between policy and teacher."""
        logits = self.fixture.need("logits").clone().requires_grad_()
        mask = self.fixture.mask
        value = token_mean(self._teacher_kl(logits, name), mask, mask.sum())
        return outcome(value, logits) | {"with_respect_to": "logits"}

    def composition(self, name: str) -> Row:
        """What a table of the file spells out, with the fixture's advantages."""
        chosen = self.options.of_row(name, PolicyLoss.Config())
        loss_fn = PolicyLoss(chosen.config)
        row = self._evaluate(loss_fn, self.fixture.need("adv"))
        settings = _relevant(chosen.settings(), chosen.config, chosen.given)
        return row | self._described(settings, chosen.config)

    # ------------------------------------------------------------------------------------------ details

    def _chosen(self, kind: str, registry: Mapping[str, str], name: str) -> Chosen[Any]:
        config_type = Choice(registry).config_type(name, f"{kind}.type")
        if config_type is None:
            raise TypeError(f"{kind}/{name} has no Config")
        return self.options.of_row(f"{kind}/{name}", config_type())

    def _composed(self, changes: Mapping[str, Chosen[Any]], *, of_logits: bool = False) -> Row:
        """A composition of token ratio, clipped surrogate and token mean with some parts replaced."""
        base = {
            "surrogate": self._chosen("surrogate", SURROGATES, "clipped"),
            "aggregation": Chosen(TokenMean.Config()),
        }
        chosen = base | dict(changes)
        configs: dict[str, Any] = {kind: one.config for kind, one in chosen.items()}
        config = PolicyLoss.Config(**configs)
        given = frozenset(f"{kind}.{key}" for kind, one in chosen.items() for key in one.given)
        row = self._evaluate(PolicyLoss(config), self.fixture.need("adv"), of_logits=of_logits)
        mentioned = given | frozenset(f"{kind}." for kind in changes)
        settings = _relevant(Chosen(config, given).settings(), config, mentioned)
        return row | self._described(settings, config)

    def _evaluate(self, loss_fn: PolicyLoss, advantages: torch.Tensor, *, of_logits: bool = False) -> Row:
        """Loss and the norm of its gradient.

        With an entropy bonus or a teacher the loss is a function of the logits, otherwise of ``logp``.
        """
        config = loss_fn.config
        if any(not isinstance(c, NoCorrection.Config) for c in (config.correction, config.rejection)):
            self.fixture.need("roll")
        if loss_fn.kl.coefficient > 0:
            self.fixture.need("ref")
        if not (of_logits or loss_fn.entropy.coefficient or loss_fn.distillation.coefficient):
            policy = self.fixture.need("logp").clone().requires_grad_()
            return outcome(loss_fn(self._inputs(advantages, policy)).loss, policy)
        logits = self.fixture.need("logits").clone().requires_grad_()
        policy, entropy = self._from_logits(logits)
        teacher_kl = self._teacher_kl(logits, "reverse") if loss_fn.distillation.coefficient else None
        inputs = dataclasses.replace(self._inputs(advantages, policy), entropy=entropy, teacher_kl=teacher_kl)
        return outcome(loss_fn(inputs).loss, logits) | {"with_respect_to": "logits"}

    def _inputs(self, advantages: torch.Tensor, policy: torch.Tensor | None = None) -> LossInputs:
        tensors, mask = self.fixture.tensors, self.fixture.mask
        return LossInputs(
            policy_logprobs=tensors["logp"] if policy is None else policy,
            old_logprobs=tensors["old"],
            ref_logprobs=tensors.get("ref"),
            # Without a correction it is used by no loss, only by metrics that are not shown.
            generator_logprobs=tensors.get("roll", tensors["old"]),
            advantages=advantages,
            loss_mask=mask,
            sample_index=self.fixture.sample_index,
            num_loss_tokens=int(mask.sum()),
            num_samples=mask.shape[0],
            max_tokens=self.options.max_tokens.config.max_tokens,
        )

    def _from_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, words = self.fixture.mask.shape, logits.shape[-1]
        labels = self.fixture.need("labels").reshape(-1)
        # An output projection that is the identity makes hidden states of the logits.
        identity = torch.eye(words)
        logprobs, entropy = chunked_logprobs(logits.reshape(-1, words), identity, labels, with_entropy=True)
        if entropy is None:
            raise TypeError("no entropy was computed")
        return logprobs.reshape(shape), entropy.reshape(shape)

    def _teacher_kl(self, logits: torch.Tensor, divergence: Divergence) -> torch.Tensor:
        teacher, words = self.fixture.need("teacher_logits"), logits.shape[-1]
        identity = torch.eye(words)
        values = chunked_divergence(
            logits.reshape(-1, words), identity, teacher.reshape(-1, words), identity, divergence=divergence
        )
        return values.reshape(self.fixture.mask.shape)

    def _described(self, settings: Settings, config: PolicyLoss.Config) -> Row:
        if "over_constant" in Choice(AGGREGATIONS).name_of(config.aggregation) or any(
            value for key, value in settings.values.items() if key.endswith("overlong_buffer_tokens")
        ):
            settings = settings | self.options.max_tokens.settings()
        return described(settings)


def described(settings: Settings) -> Row:
    """The fields of a row that say what it was computed with."""
    return {"hyperparameters": settings.values, "defaults": settings.defaults}


def outcome(loss: torch.Tensor, leaf: torch.Tensor) -> Row:
    """Loss and L2 norm of its gradient with respect to a leaf.

    Raises:
        NonFiniteError: One of them is not finite.
    """
    (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
    row = {"loss": loss.item(), "grad_l2": gradient.norm().item()}
    if not (loss.isfinite() and gradient.isfinite().all()):
        raise NonFiniteError(f"loss and gradient must be finite; got {row}.")
    return row


def _relevant(
    settings: Settings, config: PolicyLoss.Config, given: frozenset[str], *, prefix: str = ""
) -> Settings:
    """Without the terms that are off and not spoken of, and without corrections that do nothing."""
    off = [
        f"{prefix}{name}."
        for name in ("kl", "entropy", "distillation")
        if getattr(config, name).coefficient == 0
        and not any(key.startswith(f"{prefix}{name}.") for key in given)
    ]
    off += [
        f"{prefix}{name}."
        for name in ("correction", "rejection")
        if isinstance(getattr(config, name), NoCorrection.Config)
    ]
    return settings.only(key for key in settings.values if not key.startswith(tuple(off)))
