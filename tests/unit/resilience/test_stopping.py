"""Signals reach a process whatever its main thread does, and one request is one request."""

import os
import signal
import subprocess
import sys
import time

import pytest

from titan_rl.resilience import signals, stopping
from titan_rl.resilience.stopping import StopControl, Wish, process_age


class Alone:
    rank, world_size = 0, 1

    def maximum(self, value):
        return value


@pytest.fixture
def make_control():
    made = []

    def make(*, grace_seconds=100.0, stop_after_minutes=0.0):
        made.append(
            StopControl(grace_seconds=grace_seconds, stop_after_minutes=stop_after_minutes, group=Alone())
        )
        return made[-1]

    yield make
    for control in made:
        control.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_asked_at_first(make_control):
    control = make_control()
    assert control.decide() == Wish.NOTHING
    assert not control.should_interrupt()
    assert not control.is_stopping_anywhere(False)
    assert control.is_stopping_anywhere(True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_ctrl_c_interrupt_and_stay(make_control, number):
    control = make_control()
    os.kill(os.getpid(), number)
    eventually(control.should_interrupt)
    assert [control.decide(), control.decide()] == [Wish.PREEMPT, Wish.PREEMPT]


def test_sigusr1_asks_for_one_checkpoint_and_interrupts_nothing(make_control):
    control = make_control()
    os.kill(os.getpid(), signal.SIGUSR1)
    eventually(lambda: control._saves)
    assert not control.should_interrupt()
    assert [control.decide(), control.decide()] == [Wish.SAVE, Wish.NOTHING]


def test_the_limit_counts_from_the_start_of_the_process(make_control):
    assert 0 < process_age() < 24 * 3600
    assert make_control(stop_after_minutes=process_age() / 60 / 2).decide() == Wish.TIME_LIMIT
    assert make_control(stop_after_minutes=process_age() / 60 + 10).decide() == Wish.NOTHING


@pytest.fixture
def ended(monkeypatch):
    """What would have ended the process."""
    codes = []
    monkeypatch.setattr(stopping.os, "_exit", codes.append)
    return codes


def test_repeats_within_two_seconds_are_one_request_and_a_later_one_ends_the_process(
    make_control, ended, monkeypatch
):
    control, causes = make_control(), []
    control.on_forced_end = lambda cause, failure: causes.append((cause, failure))
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    for seconds in (0.0, 0.5, 1.9):
        now[0] = 1000.0 + seconds
        control._on_signal(signal.SIGTERM)
    assert ended == []
    now[0] = 1002.1
    control._on_signal(signal.SIGTERM)
    assert ended == [143]
    assert causes == [("asked again, by SIGTERM", None)]


def test_what_another_rank_heard_first_does_not_make_the_own_signal_a_second_one(
    make_control, ended, monkeypatch
):
    control = make_control()
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    control._preempt("another rank")
    now[0] = 1009.0
    control._on_signal(signal.SIGTERM)
    assert ended == []


def test_the_grace_ends_the_process_and_closing_takes_that_back(make_control, ended):
    control = make_control(grace_seconds=0.2)
    control._preempt("SIGTERM")
    eventually(lambda: ended == [143])
    ended.clear()
    closed = make_control(grace_seconds=0.2)
    closed._preempt("SIGTERM")
    closed.close()
    time.sleep(0.4)
    assert ended == []


def test_a_rank_that_was_only_told_waits_for_its_launcher_s_signal_and_no_longer(make_control, monkeypatch):
    """A launcher that notices a moment later must not find that its rank has ended."""
    slept = []
    now = [1000.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds
        if len(slept) == 4:
            control._on_signal(signal.SIGTERM)

    control = make_control()
    control.wait_for_launcher()  # nobody has asked
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.time, "sleep", sleep)
    assert slept == []
    control._preempt("another rank")
    control.wait_for_launcher()
    assert len(slept) == 4
    control.wait_for_launcher()  # asked by now
    assert len(slept) == 4
    other = make_control()
    other._preempt("another rank")
    other.wait_for_launcher()
    assert sum(slept[4:]) == stopping.LAUNCHER_SECONDS


BLOCKED = """
import ctypes, os, signal, sys, time
from titan_rl.resilience import signals

def told(number):
    print("told", int(number), flush=True)
    os._exit(7)

signals.listen(told)
print("ready", flush=True)
# No Python instruction until it returns, as in a collective; unlike sleep(3) it goes on after a signal.
ctypes.CDLL(None).system(b"sleep 20 >/dev/null")
"""


def test_a_signal_is_seen_while_the_main_thread_is_in_a_library():
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 7
    assert process.stdout.readline() == b"told 15\n"  # not to its end, for which the sleeping shell is waited


def test_children_end_on_sigterm_and_do_not_tell_their_parent():
    told = []
    signals.listen(told.append)
    try:
        child = os.fork()
        if not child:
            time.sleep(600)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        executed = subprocess.Popen(["sleep", "600"])
        executed.terminate()
        assert executed.wait(10) == -signal.SIGTERM
        assert told == []
    finally:
        signals.stop_listening()
