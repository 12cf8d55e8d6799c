"""Hyperparameters of the rows: our defaults, under what the fixture's file says.

A table is named after the function whose arguments it holds (as in tests/numerics/data/fixture_b.json), after
the row whose part it configures, or ``composition/<any name>``, which makes a row. The row's table wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from titan_rl.algorithms.advantages import GAE, GroupNormalized, Returns
from titan_rl.algorithms.corrections import (
    MaskedTokens,
    RejectNegativeSamples,
    RejectSamplesByGeometricMean,
    RejectSamplesByMeanK3,
    RejectTokens,
    TruncatedSamples,
    TruncatedTokens,
)
from titan_rl.algorithms.penalties import EntropyBonus, KLPenalty
from titan_rl.algorithms.surrogates import Clipped, ClippedWeight, GeometricMean, SoftGated
from titan_rl.config.dump import to_table
from titan_rl.config.overlay import overlay
from titan_rl.config.registry import suggest
from titan_rl.errors import ConfigError
from titan_rl.tools.conformance import parts
from titan_rl.tools.conformance.fixture import Fixture

T = TypeVar("T")

FUNCTIONS: dict[str, tuple[type, tuple[str, ...]]] = {
    "clipped_surrogate": (Clipped.Config, ("surrogate/clipped",)),
    "dual_clipped_surrogate": (parts.DualClipped.Config, ("surrogate/dual_clipped",)),
    "clipped_weight_surrogate": (ClippedWeight.Config, ("surrogate/clipped_weight",)),
    "soft_gated_surrogate": (SoftGated.Config, ("surrogate/soft_gated",)),
    "geometric_mean_surrogate": (GeometricMean.Config, ("surrogate/geometric_mean",)),
    "gamma_weighted_surrogate": (parts.GammaWeighted.Config, ("surrogate/gamma_weighted",)),
    "total_variation_masked": (
        parts.TotalVariationMasked.Config,
        ("surrogate/total_variation_masked", "surrogate/total_variation"),
    ),
    "binary_kl_masked": (parts.BinaryKLMasked.Config, ("surrogate/binary_kl_masked",)),
    "quadratic_surrogate": (parts.Quadratic.Config, ("surrogate/quadratic",)),
    "truncated_token_weights": (TruncatedTokens.Config, ("correction/truncated_tokens",)),
    "truncated_sample_weights": (TruncatedSamples.Config, ("correction/truncated_samples",)),
    "masked_token_weights": (MaskedTokens.Config, ("correction/masked_tokens",)),
    "reject_tokens": (RejectTokens.Config, ("correction/reject_tokens",)),
    "reject_samples_by_geometric_mean": (
        RejectSamplesByGeometricMean.Config,
        ("correction/reject_samples_by_geometric_mean",),
    ),
    "reject_samples_by_mean_k3": (
        RejectSamplesByMeanK3.Config,
        ("correction/reject_samples_by_mean_k3",),
    ),
    "reject_negative_samples_by_mean_k1": (
        RejectNegativeSamples.Config,
        ("correction/reject_negative_samples",),
    ),
    "group_normalized": (GroupNormalized.Config, ("advantage/group_normalized",)),
    "discounted_returns": (Returns.Config, ("advantage/returns",)),
    "gae": (GAE.Config, ("advantage/gae",)),
    "kl": (KLPenalty.Config, ("kl/reference",)),
    "entropy": (EntropyBonus.Config, ("entropy/bonus",)),
    "sample_mean_over_constant": (parts.Constant, ()),
    "soft_overlong": (parts.SoftOverlong, ()),
    "whiten": (parts.Whitening, ()),
    "length_adaptive_lambda": (parts.LengthAdaptive, ()),
    "clipped_value_loss": (parts.ValueClip, ()),
    "kto_loss": (parts.Baseline, ()),
}
"""Tables that are named after a function: what checks them, and the rows whose parts read them."""

COMPOSITION = "composition/"
"""Start of the name of a table that makes a row."""


@dataclass(frozen=True, slots=True)
class Chosen(Generic[T]):
    """Options of one part.

    Attributes:
        config: The dataclass.
        given: Dotted keys that the file sets; the others are our defaults.
    """

    config: T
    given: frozenset[str] = field(default_factory=frozenset)

    def settings(self, prefix: str = "") -> Settings:
        """Every value by its dotted key, and which are our defaults."""
        values = dict(_flat(to_table(self.config), prefix))
        given = {f"{prefix}{key}" for key in self.given}
        return Settings(values, [key for key in values if key not in given and not key.endswith("type")])


@dataclass(frozen=True, slots=True)
class Settings:
    """What a row was computed with.

    Attributes:
        values: By dotted key.
        defaults: The keys whose value the file does not set.
    """

    values: dict[str, Any] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)

    def __or__(self, other: Settings) -> Settings:
        """Both."""
        return Settings({**self.values, **other.values}, [*self.defaults, *other.defaults])

    def only(self, prefixes: Iterable[str]) -> Settings:
        """Those whose key starts with one of these."""
        wanted = tuple(prefixes)
        return Settings(
            {key: value for key, value in self.values.items() if key.startswith(wanted)},
            [key for key in self.defaults if key.startswith(wanted)],
        )


class Options:
    """The tables of a fixture."""

    def __init__(self, fixture: Fixture, rows: Iterable[str]) -> None:
        """Check the names of the tables, and those named after functions.

        Args:
            fixture: With ``hyperparameters``.
            rows: Names of the rows that have options.

        Raises:
            ConfigError: A table has an unknown name, or an option of a function's table is unknown or bad.
        """
        self._tables, self._file = fixture.hyperparameters, fixture.file
        known = [*FUNCTIONS, *rows]
        for name, table in self._tables.items():
            where = f"{self._file}: hyperparameters.{name}"
            if name not in known and not name.startswith(COMPOSITION):
                remedy = suggest(name, known, otherwise="Name a function, a row, or composition/NAME.")
                raise ConfigError(where, "be the name of a function or of a row", "another", remedy)
            if not isinstance(table, dict):
                raise ConfigError(where, "be an object", type(table).__name__, 'Write {"key": value}.')
            if name in FUNCTIONS:
                self._overlay(FUNCTIONS[name][0](), name, table)
        self._function_of = {row: name for name, (_, of) in FUNCTIONS.items() for row in of}
        self._tokens = fixture.mask.shape[1]

    @property
    def compositions(self) -> list[str]:
        """Names of the rows that the file adds."""
        return [name for name in self._tables if name.startswith(COMPOSITION)]

    def of_row(self, row: str, default: T) -> Chosen[T]:
        """Options of the part that a row is about.

        Args:
            row: Its name, without what stands after ``|``.
            default: The options when the file says nothing.

        Raises:
            ConfigError: An option of the row's table is unknown or bad.
        """
        fields = {item.name for item in dataclasses.fields(default)}  # pyrefly: ignore[bad-argument-type]
        function = self._function_of.get(row, "")
        shared = {k: v for k, v in self._tables.get(function, {}).items() if k in fields}
        own = self._tables.get(row, {})
        config = self._overlay(self._overlay(default, function, shared), row, own)
        return Chosen(config, frozenset(key for key, _ in [*_flat(shared), *_flat(own)]))

    def of_function(self, name: str, default: T) -> Chosen[T]:
        """Options of a function that is no part."""
        table = self._tables.get(name, {})
        return Chosen(self._overlay(default, name, table), frozenset(table))

    @property
    def max_tokens(self) -> Chosen[parts.Constant]:
        """Longest completion that can be sampled."""
        return self.of_function("sample_mean_over_constant", parts.Constant(max_tokens=self._tokens))

    def _overlay(self, default: T, name: str, table: Mapping[str, Any]) -> T:
        if not table:
            return default
        return overlay(default, table, where=f"hyperparameters.{name}", locate=lambda _: (self._file, None))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            # JSON has no infinity.
            is_infinite = isinstance(value, float) and math.isinf(value)
            yield f"{prefix}{key}", str(value) if is_infinite else value
