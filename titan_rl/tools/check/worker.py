"""A rank of ``titan-rl check``: ``torchrun ... -m titan_rl.tools.check.worker JOB.json``.

One launch has as many ranks as the largest layout. The ranks form a world of one, then of two, then of four,
each with all its layouts, because starting a process takes longer than a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file

from titan_rl.config.entry import read_checked
from titan_rl.titan.without_trainer import gloo_world
from titan_rl.tools.check.layouts import Layout, layouts_of
from titan_rl.tools.check.shrink import shrink_config
from titan_rl.tools.check.step import SmallRun, Step
from titan_rl.trainers.configuration import configure


def run(job: Path) -> None:
    """Compute every case of every layout; the first rank writes ``<number>.safetensors`` and ``.json``.

    Args:
        job: File with ``config`` and ``overrides``, in the directory that has ``model``.
    """
    content = json.loads(job.read_text(encoding="utf-8"))
    document, trainer = read_checked(content["config"], content["overrides"])
    config = configure(document, trainer)
    rank, directory = int(os.environ["RANK"]), job.parent
    number = 0
    for world_size, layouts in _by_world_size(layouts_of(config.parallelism)):
        if rank >= world_size:
            number += sum(len(layout.cases) for layout in layouts)
            continue
        with gloo_world(directory / f"store{world_size}", rank=rank, world_size=world_size):
            for layout in layouts:
                small = SmallRun(shrink_config(config, layout, directory / "model"))
                for case in layout.cases:
                    step = small.step(case)
                    if rank == 0:
                        write(directory, number, step)
                    number += 1


def _by_world_size(layouts: list[Layout]) -> Iterator[tuple[int, list[Layout]]]:
    ordered = sorted(layouts, key=lambda layout: layout.world_size)
    for world_size, group in groupby(ordered, key=lambda layout: layout.world_size):
        yield world_size, list(group)


def write(directory: Path, number: int, step: Step) -> None:
    """Write what a case gave.

    Args:
        directory: Of the job.
        number: Of the case, over all layouts in the order of their world sizes.
        step: To write.
    """
    save_file(step.gradients, directory / f"{number}.safetensors")
    (directory / f"{number}.json").write_text(json.dumps(step.losses), encoding="utf-8")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
