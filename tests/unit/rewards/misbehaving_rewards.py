"""Rewards for the tests of the pool: each does what the completion's text says, good or bad."""

import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from titan_rl.types import Reward, Rollout

VALUES = {"none": None, "str": "1.0", "nan": math.nan, "inf": -math.inf, "true": True, "huge": 10**400}


class Obedient:
    """``value 2.5``, ``return nan``, ``raise``, ``exit 3``, ``sleep 0.2``, ``print 1000``, ..."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        directory: str = ""
        """Where process ids are written for the test to read."""

    def __init__(self, config: Config) -> None:
        self.directory = config.directory

    def __call__(self, rollout: Rollout) -> float | Reward:
        order, _, argument = rollout.text.partition(" ")
        return getattr(self, f"do_{order}")(argument)

    def do_value(self, argument):
        return float(argument)

    def do_return(self, argument):
        return VALUES[argument]

    def do_raise(self, argument):
        raise ValueError(argument)

    def do_quit(self, argument):
        sys.exit(int(argument))

    def do_exit(self, argument):
        print("last words")
        os._exit(int(argument))

    def do_segfault(self, argument):
        os.kill(os.getpid(), 11)

    def do_sleep(self, argument):
        time.sleep(float(argument))
        return 1.0

    def do_hang(self, argument):
        self._note("worker", os.getpid())
        while True:
            time.sleep(60)

    def do_hang_with_children(self, argument):
        """Start a child, two orphans in sessions of their own, one with an empty environment; then hang."""
        self._start_family()
        self._start_orphan("stranger", lambda: os.execve("/bin/sleep", ["sleep", "300"], {}))
        return self.do_hang(argument)

    def do_crash_with_children(self, argument):
        self._start_family()
        os._exit(9)

    def do_print(self, argument):
        line = "x" * 1023 + "\n"
        for _ in range(int(argument)):
            print(line, end="")
        subprocess.run([sys.executable, "-c", f"print('y' * {int(argument) * 1024})"], check=True)
        os.write(1, b"z" * 100_000)
        sys.stderr.write("done")
        self._note("printed", os.getpid())
        return 1.0

    def do_fork_and_return(self, argument):
        if os.fork() == 0:
            return 100.0  # a child that comes back must not answer in the worker's place
        return 1.0

    def do_large(self, argument):
        return Reward(total=1.0, parts={"p" * int(argument): 1.0})

    def do_flood(self, argument):
        os.write(int(sys.argv[2]), b"\xff" * 1000)
        return 1.0

    def do_garble(self, argument):
        os.write(int(sys.argv[2]), b"\x00\x00\x00\x03abc")
        return 1.0

    def do_eat(self, argument):
        return float(len(bytearray(int(argument))))

    def do_modules(self, argument):
        return float(argument in sys.modules)

    def do_environ(self, argument):
        name, _, value = argument.partition("=")
        return float(os.environ.get(name, "") == value)

    def do_pid(self, argument):
        return float(os.getpid())

    def do_logprobs(self, argument):
        return 0.0

    def _start_family(self):
        child = subprocess.Popen(["sleep", "300"])
        self._note("child", child.pid)
        self._start_orphan("daemon", lambda: time.sleep(300))

    def _start_orphan(self, name, run):
        if os.fork() == 0:
            os.setsid()
            if (orphan := os.fork()) == 0:
                run()
            self._note(name, orphan)
            os._exit(0)
        while not (Path(self.directory) / name).exists():
            time.sleep(0.01)

    def _note(self, name, pid):
        if self.directory:
            partial = Path(self.directory) / f".{name}"
            partial.write_text(str(pid))
            partial.rename(Path(self.directory) / name)


class RaisesWhenBuilt:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        raise KeyError("no such model")


class ExitsWhenBuilt:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        os._exit(17)


class HangsWhenBuilt:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        time.sleep(300)


class WithoutConfig:
    def __call__(self, rollout):
        return 0.0


class PerTurn:
    """Credits turn i with ``values[i]``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        values: list[float]

    def __init__(self, config: Config) -> None:
        self.values = config.values

    def __call__(self, rollout: Rollout) -> Reward:
        return Reward(total=sum(self.values), parts={"first": self.values[0]}, per_turn=tuple(self.values))


def count_characters(rollout: Rollout) -> int:
    return len(rollout.text)


def return_nan(rollout: Rollout) -> float:
    return math.nan
