"""How long a run takes from SIGKILL of a rank to the end of the first step after it, and what with.

    python -m benchmarks.recovery train_configs/tiny_grpo.toml --dump_folder FOLDER \\
        --model.allow_random_init true --checkpoint.initial_load_path none \\
        [--ranks 2] [--kills 6] [--launcher torchrun] [--section.key value ...]

One job with a restart for each kill. A rank, each by turns, is killed while the step after a checkpoint is
under way (by ``TITAN_RL_FAULT``, which notes the time); the agent notices, ends the other ranks and starts
all again. The parts, in the order in which they come:

- detection: until the agent says that a rank has failed;
- rendezvous: until the processes of the next start exist, and the making of their process group;
- import: of torch and TorchTitan at the start of a process, and of vLLM when its engine is built;
- build: configuration, model, optimiser, rewards and the engine without its import;
- load: the checkpoint, checked by its hashes;
- first step: the push of the weights with its handshake, rollouts, rewards and training, to the journal's
  line.

Times within a start are rank 0's: what it waits for another is in the part in which it waits, mostly the
process group. ``--launcher launch`` has the ranks forked by :mod:`titan_rl.launch`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import paired, timed_rank
from titan_rl.config.entry import read_checked
from titan_rl.launch import launch
from titan_rl.resilience import faults

AGENT = "--agent"
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "launch": ("-m", "benchmarks.recovery", AGENT),
}
FIRST_KILL, STEPS_BETWEEN = 3, 2
POINTS = ("rollout.mid", "forward_backward.0", "optimizer.before")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill, in seconds."""

    detection: float
    rendezvous: float
    imports: float
    build: float
    load: float
    first_step: float

    @property
    def total(self) -> float:
        """From the kill to the end of the first step."""
        return sum(asdict(self).values())

    @property
    def without_imports(self) -> float:
        """The same, had nothing had to be imported."""
        return self.total - self.imports


def plan(kills: int, ranks: int) -> list[faults.Fault]:
    """One kill for each start, at three points of a step by turns, each of a rank by turns."""
    return [
        faults.Fault(
            POINTS[attempt % len(POINTS)],
            FIRST_KILL + STEPS_BETWEEN * attempt,
            attempt % ranks,
            attempt,
            "sigkill",
        )
        for attempt in range(kills)
    ]


def run(
    command: Sequence[str], *, launcher: str, planted: Sequence[faults.Fault], ranks: int, folder: Path
) -> str:
    """See a job through its kills.

    Args:
        command: Configuration and overrides.
        launcher: A key of ``LAUNCHERS``.
        planted: From :func:`plan`.
        ranks: Number of processes.
        folder: The run's ``dump_folder``, removed first.

    Returns:
        All that was printed.

    Raises:
        subprocess.CalledProcessError: the run did not come to its end.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = [sys.executable, *LAUNCHERS[launcher]]
    started += ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={len(planted)}"]
    started += ["-m", timed_rank.__name__] if launcher == "torchrun" else []
    environment = os.environ | {faults.VARIABLE: ";".join(map(str, planted))}
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as output:
        subprocess.run([*started, *command], env=environment, stdout=output, stderr=output, check=True)
    return log.read_text(encoding="utf-8", errors="replace")


def read(folder: Path, output: str) -> list[Recovery]:
    """What each kill cost.

    Args:
        folder: The run's ``dump_folder``.
        output: What the job printed.
    """
    journal = (folder / "journal" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line["time"] for line in map(json.loads, journal) if "step" in line]
    noticed = _times_of_failures(output)
    found = []
    for fault, at in sorted(faults.witnesses(folder).items(), key=lambda item: item[1]):
        path = folder / timed_rank.FOLDER / f"{fault.attempt + 1}-0.json"
        notes = json.loads(path.read_text(encoding="utf-8"))
        seen = min(when for when in noticed if when >= at)
        import_vllm, group = notes.get("import_vllm", 0.0), notes.get("process_group", 0.0)
        at_start = notes["imported"] - notes["created"]
        building = notes["loaded"] - notes["imported"] - notes["load"] - import_vllm - group
        found.append(
            Recovery(
                detection=seen - at,
                rendezvous=notes["created"] - seen + group,
                imports=at_start + import_vllm,
                build=building,
                load=notes["load"],
                first_step=min(when for when in steps if when > notes["loaded"]) - notes["loaded"],
            )
        )
    return found


def _times_of_failures(output: str) -> list[float]:
    """When the agent wrote that a rank had ended."""
    year = datetime.now().year
    pattern = r"^E(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) .*failed \(exitcode"
    return [
        datetime(year, int(month), int(day), int(hour), int(minute)).timestamp() + float(second)
        for month, day, hour, minute, second in re.findall(pattern, output, re.MULTILINE)
    ]


def table(found: Sequence[Recovery], *, launcher: str, ranks: int) -> str:
    """Medians and every kill, as Markdown."""
    names = [*asdict(found[0]), "total", "without_imports"]
    rows = [[getattr(one, name) for name in names] for one in found]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    c = paired.Circumstances.here()
    lines = [
        f"`{c.command}`, {c.date}, {c.machine}, {c.cores} cores, load {c.load}; {launcher}, {ranks} ranks, "
        f"{len(found)} kills. Seconds.",
        "",
        "| kill | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for name, row in [*((str(i + 1), row) for i, row in enumerate(rows)), ("median", medians)]:
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Kill, read, print, write."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("config", help="TOML file of an RL run, and overrides")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--kills", type=int, default=6)
    options.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    options.add_argument("--out", type=Path, default=Path("outputs/benchmarks"), help="folder of the results")
    given, overrides = options.parse_known_args()
    planted = plan(given.kills, given.ranks)
    always = {
        "training.steps": planted[-1].step + 1,
        "checkpoint.enable": "true",
        "checkpoint.interval": 1,
        "evaluation.minimum_gain": "none",
    }
    command = [given.config, *overrides]
    command += [part for key, value in always.items() for part in (f"--{key}", str(value))]
    folder = Path(read_checked(given.config, command[1:])[0].table["dump_folder"])
    output = run(command, launcher=given.launcher, planted=planted, ranks=given.ranks, folder=folder)
    found = read(folder, output)
    text = table(found, launcher=given.launcher, ranks=given.ranks)
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"recovery_{given.launcher}_{given.ranks}"
    (given.out / f"{name}.md").write_text(text, encoding="utf-8")
    (given.out / f"{name}.json").write_text(
        json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == [AGENT]:
        sys.exit(launch(sys.argv[2:], script=Path(timed_rank.__file__)))
    main()
