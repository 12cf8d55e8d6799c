"""``titan-rl conformance FIXTURE.json``: every row, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from titan_rl.errors import ConfigError, NonFiniteError
from titan_rl.tools.conformance import advantages, losses, pairs
from titan_rl.tools.conformance.fixture import Fixture, LeftOutError, read_fixture
from titan_rl.tools.conformance.options import Options


def run(path: str, *, output: Path | None = None, is_float64: bool = False) -> int:
    """Compute every row of a fixture and write them.

    Args:
        path: The fixture's file.
        output: Where the JSON goes; None for standard output.
        is_float64: Compute in float64 instead of fp32.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The file is not a fixture, or ``output`` cannot be written.
        NonFiniteError: A loss or gradient is not finite.
    """
    dtype = torch.float64 if is_float64 else torch.float32
    with _default_dtype(dtype):
        rows = compute(read_fixture(path, dtype=dtype))
    text = as_json(rows)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", "be a file that can be written", str(error), "Name another.") from error
    left_out = [name for name, row in rows.items() if "left_out" in row]
    print(f"{output}: {len(rows)} rows, {len(left_out)} of them left out: {', '.join(left_out) or 'none'}")
    return 0


def compute(fixture: Fixture) -> dict[str, dict[str, Any]]:
    """Every row of a fixture by name.

    Args:
        fixture: The data; for float64, torch's default dtype must be that too.

    Raises:
        ConfigError: A hyperparameter is unknown or bad.
        NonFiniteError: A loss or gradient is not finite.
    """
    parts = (losses, advantages, pairs)
    options = Options(fixture, [name for part in parts for name in part.option_rows()])
    found: dict[str, dict[str, Any]] = {}
    for rows in (
        losses.loss_rows(fixture, options),
        advantages.advantage_rows(fixture, options),
        pairs.pair_rows(fixture, options),
    ):
        for name, row in rows:
            try:
                found[name] = row()
            except LeftOutError as error:
                found[name] = {"left_out": str(error)}
            except NonFiniteError as error:
                raise NonFiniteError(f"{name}: {error}") from error
    return found


def as_json(rows: dict[str, dict[str, Any]]) -> str:
    """One row a line.

    >>> print(as_json({"a": {"loss": 0.5}, "b": {"loss": 1.0}}), end="")
    {
      "a": {"loss": 0.5},
      "b": {"loss": 1.0}
    }
    """
    lines = [f"  {json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Make of Python numbers constants of this dtype too, so that float64 is that throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
