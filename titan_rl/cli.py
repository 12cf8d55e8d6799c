"""The console script ``titan-rl``: look at an installation, check a file, plan and check a run, prepare."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import titan_rl
from titan_rl.config.entry import read_checked
from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError, TitanRLError


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand, and return the exit code: 2 for the user's input, 130 for Ctrl-C, 1 if it fails.

    Args:
        arguments: Without the program's name; the process's own by default.
    """
    parser = _parser()
    parsed, overrides = parser.parse_known_args(arguments)
    if overrides and parsed.command not in ("validate", "plan", "check"):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return parsed.run(parsed, overrides)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    except TitanRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


Commands = Any
"""What ``add_subparsers`` returns, whose type argparse does not export."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-rl",
        description="RL post-training as an ordinary TorchTitan trainer.",
        epilog="Training: torchrun --standalone --nproc-per-node 1 -m titan_rl.train CONFIG.toml",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_doctor,
        _add_validate,
        _add_plan,
        _add_check,
        _add_prepare,
        _add_conformance,
        _add_checkpoints,
        _add_export,
        _add_version,
    ):
        add(commands)
    return parser


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="check this installation", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print a JSON array instead of lines")
    doctor.add_argument(
        "--dump-folder", type=Path, default=Path("outputs"), metavar="DIR", help="where runs would write"
    )
    doctor.add_argument(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="deadline of the slow checks (180)"
    )
    doctor.set_defaults(run=_doctor)


def _add_validate(commands: Commands) -> None:
    validate = commands.add_parser(
        "validate",
        help="check a configuration without starting anything",
        usage="titan-rl validate CONFIG.toml [--world-size N] [--data] [--section.key value ...]",
        allow_abbrev=False,
    )
    validate.add_argument("config", metavar="CONFIG.toml")
    validate.add_argument(
        "--world-size",
        type=_positive,
        default=1,
        metavar="N",
        help="number of ranks that torchrun will start",
    )
    validate.add_argument("--data", action="store_true", help="also open the prompts and encode each once")
    validate.set_defaults(run=_validate)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what a run would need: mesh, batch, memory, traffic, without a GPU",
        usage="titan-rl plan CONFIG.toml --world-size N [--device-memory-gib X] [--device cuda|cpu] [--json] "
        "[--section.key value ...]",
        epilog="docs/planning.md says how each number is computed. Exits with 2 if there are contradictions.",
        allow_abbrev=False,
    )
    plan.add_argument("config", metavar="CONFIG.toml")
    plan.add_argument(
        "--world-size", type=_positive, required=True, metavar="N", help="ranks that torchrun will start"
    )
    plan.add_argument(
        "--device-memory-gib", type=float, metavar="X", help="memory of one device (80 on cuda, none on cpu)"
    )
    plan.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="what the run will have (cuda)"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    plan.set_defaults(run=_plan)


def _add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        help="compute a step of a small model in several layouts and compare loss and gradients",
        usage="titan-rl check CONFIG.toml [--section.key value ...]",
        epilog="docs/checking.md says what is compared. Exits with 1 if anything differs by more than 1e-5.",
        allow_abbrev=False,
    )
    check.add_argument("config", metavar="CONFIG.toml")
    check.set_defaults(run=_check)


def _add_prepare(commands: Commands) -> None:
    prepare = commands.add_parser("prepare", help="make a model directory", allow_abbrev=False)
    prepare.add_argument("model", choices=["smollm2"])
    prepare.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR")
    prepare.set_defaults(run=_prepare)


def _add_conformance(commands: Commands) -> None:
    conformance = commands.add_parser(
        "conformance",
        help="compute every loss and advantage on the data of a file, to compare with another framework",
        description="Write loss, gradient norm and advantages of every algorithm and part as JSON.",
        epilog="docs/conformance.md says what a fixture is.",
        allow_abbrev=False,
    )
    conformance.add_argument("fixture", metavar="FIXTURE.json")
    conformance.add_argument("--output", type=Path, metavar="FILE", help="instead of standard output")
    conformance.add_argument("--float64", action="store_true", help="compute in float64 instead of fp32")
    conformance.set_defaults(run=_conformance)


def _add_checkpoints(commands: Commands) -> None:
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list what a run has saved, and what of it can be used",
        description="Step, reward, held-out score, size and validity; exit code 1 if one is not complete.",
        allow_abbrev=False,
    )
    checkpoints.add_argument("directory", type=Path, metavar="DIR", help="a run's dump_folder or a step-N")
    checkpoints.add_argument("--verify", action="store_true", help="also read and hash every file")
    checkpoints.set_defaults(run=_checkpoints)


def _add_export(commands: Commands) -> None:
    export = commands.add_parser(
        "export", help="convert a checkpoint to a Hugging Face model directory", allow_abbrev=False
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a step-N directory")
    export.add_argument("output", type=Path, metavar="OUT", help="must not exist")
    export.add_argument(
        "--adapter",
        action="store_true",
        help="write low-rank adapters in PEFT's layout, instead of merging them",
    )
    export.set_defaults(run=_export)


def _add_version(commands: Commands) -> None:
    version = commands.add_parser("version", help="print the version", allow_abbrev=False)
    version.set_defaults(run=_version)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


@contextmanager
def _located(document: Document) -> Generator[None]:
    """Errors about a key of the file are raised with its line."""
    try:
        yield
    except ConfigError as error:
        raise document.located(error) from error


# Modules that import torch are loaded inside the subcommand that needs them, so that help and mistakes in a
# file are answered at once.


def _doctor(parsed: argparse.Namespace, _: list[str]) -> int:
    doctor = importlib.import_module("titan_rl.tools.doctor")
    checks = doctor.run_checks(parsed.dump_folder, timeout_seconds=parsed.timeout)
    return doctor.report(checks, as_json=parsed.json)


def _validate(parsed: argparse.Namespace, overrides: list[str]) -> int:
    document, trainer = read_checked(parsed.config, overrides)
    configuration: Any = importlib.import_module("titan_rl.trainers.configuration")
    validation: Any = importlib.import_module("titan_rl.trainers.validation")
    with _located(document):
        config = configuration.configure(document, trainer)
        validation.check_run(config, trainer, world_size=parsed.world_size, opens_data=parsed.data)
    print("\n".join(["ok", *validation.describe(config, trainer, world_size=parsed.world_size)]))
    return 0


def _plan(parsed: argparse.Namespace, overrides: list[str]) -> int:
    document, trainer = read_checked(parsed.config, overrides)
    os.environ["TITAN_RL_DEVICE"] = "cpu"  # a plan is made on a CPU, whatever the machine has
    command = importlib.import_module("titan_rl.tools.plan.command")
    with _located(document):
        return command.run(
            document,
            trainer,
            world_size=parsed.world_size,
            device_type=parsed.device,
            device_gib=parsed.device_memory_gib,
            prints_json=parsed.json,
        )


def _check(parsed: argparse.Namespace, overrides: list[str]) -> int:
    document, trainer = read_checked(parsed.config, overrides)
    os.environ["TITAN_RL_DEVICE"] = "cpu"  # like a plan
    command = importlib.import_module("titan_rl.tools.check.command")
    with _located(document):
        return command.run(document, trainer, config_path=parsed.config, overrides=overrides)


def _prepare(parsed: argparse.Namespace, _: list[str]) -> int:
    importlib.import_module("titan_rl.tools.smollm2").convert(parsed.output_dir)
    return 0


def _conformance(parsed: argparse.Namespace, _: list[str]) -> int:
    command = importlib.import_module("titan_rl.tools.conformance.command")
    return command.run(parsed.fixture, output=parsed.output, is_float64=parsed.float64)


def _checkpoints(parsed: argparse.Namespace, _: list[str]) -> int:
    text, is_sound = importlib.import_module("titan_rl.tools.checkpoints").report(
        parsed.directory, verify=parsed.verify
    )
    print(text)
    return 0 if is_sound else 1


def _export(parsed: argparse.Namespace, _: list[str]) -> int:
    export = importlib.import_module("titan_rl.tools.export").export
    directory = export(parsed.checkpoint, parsed.output, is_adapter_only=parsed.adapter)
    print(f"Written: {directory}")
    return 0


def _version(_parsed: argparse.Namespace, _: list[str]) -> int:
    print(titan_rl.__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
