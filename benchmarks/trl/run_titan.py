"""One workload with titan_rl, as one rank of torchrun.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.trl.run_titan WORKLOAD.json STEPS.jsonl FOLDER

The run is that of ``titan_rl.train`` with a configuration file; two methods are wrapped to see when a step
ends and how long its stages took. ``--section.key value`` pairs may follow.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.trl.clock import StepClock
from benchmarks.trl.workloads import read
from titan_rl import train
from titan_rl.observability.stages import StageTimer
from titan_rl.trainers.reporting import Reporter


def configuration(spec: dict[str, Any], folder: Path) -> str:
    """The TOML file of a workload.

    Args:
        spec: From :func:`benchmarks.trl.workloads.read`.
        folder: The run's ``dump_folder``.
    """
    is_chat = bool(spec["system_prompt"])
    return f"""
dump_folder = "{folder}"

[model]
hf_assets_path = "{spec["model"]}"
export = false

[data]
prompts_per_iteration = {spec["prompts"]}
max_prompt_tokens = {64 if is_chat else spec["prompt_tokens"][1]}
system_prompt = "{spec["system_prompt"]}"
chat_template = "{"on" if is_chat else "off"}"
shuffle = false

[data.source]
type = "jsonl"
path = "{spec["prompts_path"]}"
prompt_column = "prompt"
answer_column = "answer"

[[reward]]
type = "benchmarks.trl.rewards:{spec["reward"]}_of_rollout"

[sampling]
group_size = {spec["group_size"]}
temperature = {spec["temperature"]}
max_tokens = {spec["max_tokens"]}

[training]
steps = {spec["steps"]}
seq_len = {spec["row_tokens"]}

[optimizer]
lr = {spec["lr"]}

[activation_checkpoint]
type = "none"
"""


def main() -> int:
    """Run, and return the exit code."""
    workload, steps, folder, *options = sys.argv[1:]
    spec, _ = read(Path(workload))
    path = Path(folder).with_suffix(".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configuration(spec, Path(folder).resolve()))
    _watch(StepClock(Path(steps)))
    return train.main([str(path), *options])


def _watch(clock: StepClock) -> None:
    """Write a line whenever an iteration has been reported."""
    stages: dict[str, float] = {}
    take, iteration = StageTimer.take, Reporter.iteration

    def taken_and_kept(self: StageTimer) -> dict[str, float]:
        stages.clear()
        stages.update(take(self))
        return dict(stages)

    def reported(self: Reporter, taken: Any, batches: Any, results: Any) -> None:
        iteration(self, taken, batches, results)
        rewards = [rollout.reward.total for group in taken.groups for rollout in group.rollouts]
        clock.tick(
            samples=len(rewards),
            prompt_tokens=taken.stats.num_prompt_tokens,
            completion_tokens=taken.stats.num_tokens,
            reward=math.fsum(rewards) / len(rewards),
            stages=dict(stages),
        )

    StageTimer.take = taken_and_kept  # type: ignore[method-assign]
    Reporter.iteration = reported  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
