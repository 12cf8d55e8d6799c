"""``titan-rl plan``: from a file to a printed plan, on one CPU."""

from __future__ import annotations

import json
from typing import Any

from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError
from titan_rl.tools.plan.plan import as_json, make_plan
from titan_rl.tools.plan.render import render
from titan_rl.tools.plan.run_facts import GIB
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.lora_checks import refuse_lora


def run(
    document: Document,
    trainer: str,
    *,
    world_size: int,
    device_type: str,
    device_gib: float | None,
    prints_json: bool,
) -> int:
    """Print the plan of a run.

    Args:
        document: Checked, without its root key ``trainer``.
        trainer: The root key.
        world_size: Ranks that torchrun would start.
        device_type: ``cuda`` or ``cpu``, of the run.
        device_gib: Memory of a device in GiB; None: 80 on CUDA, not known on a CPU.
        prints_json: One JSON object instead of text.

    Returns:
        0 for a plan without contradictions, 2 otherwise: the input's mistake, as for a refused file.

    Raises:
        ConfigError: the file cannot be planned at all.
    """
    if trainer != "rl":
        raise ConfigError(
            "trainer",
            'be "rl", the default, to be planned: other trainers have no rollouts, generator or weight sync',
            trainer,
            "Use `titan-rl validate` for its batch arithmetic.",
        )
    if device_gib is None:
        device_gib = 80.0 if device_type == "cuda" else 0.0
    config: Any = configure(document, trainer, device_type=device_type)
    refuse_lora(config, "planned: memory and traffic would be counted as if all weights were trained")
    plan = make_plan(
        config, world_size=world_size, device_type=device_type, device_bytes=int(device_gib * GIB)
    )
    located = document.located
    print(
        json.dumps(as_json(plan, located=located), indent=2) if prints_json else render(plan, located=located)
    )
    return 2 if plan.contradictions else 0
