"""The worker pool with rewards that behave and rewards that do not, in real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from reward_cases import make_rollout

from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.pool import RewardPool, RewardSpec
from titan_rl.types import Reward

HERE = str(Path(__file__).parent)
PATIENCE_SECONDS = 60.0  # for a loaded machine; nothing here takes that long by itself

FAMILY = ("worker", "child", "daemon", "stranger")


@contextmanager
def obedient_pool(directory="", **config):
    spec = RewardSpec(type="misbehaving_rewards:Obedient", name="mine", params={"directory": str(directory)})
    with RewardPool(RewardPool.Config(**{"num_workers": 1, "num_spares": 0, **config}), [spec]) as pool:
        yield pool


def ask(pool, *texts):
    """Submit all texts with keys 0, 1, ... and return the results by key."""
    for key, text in enumerate(texts):
        pool.submit(key, make_rollout(text))
    return dict(pool.results(PATIENCE_SECONDS))


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def read_pid(directory, name):
    return int((Path(directory) / name).read_text())


def wait_until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_until_idle(pool, count):
    def are_idle():
        assert list(pool.results(0)) == []
        return sum(worker.state == "idle" for worker in pool._workers) == count

    wait_until(are_idle)


def test_what_a_users_code_does_wrong_costs_its_own_rollout_only():
    texts = ["value 2.5", "raise oh no", "quit 3", "return none", "return str", "return nan", "return inf"]
    with obedient_pool() as pool:
        results = ask(pool, *texts, "fork_and_return", "value 3")
        assert results[0] == Reward(total=2.5, parts={"mine": 2.5})
        assert results[8] == Reward(total=3.0, parts={"mine": 3.0})
        assert results[7].total == 1.0
        assert [results[key].reason for key in range(1, 7)] == ["raised"] * 2 + ["invalid"] * 4
        assert "ValueError: oh no; in reward 'mine'" in results[1].message
        assert "misbehaving_rewards.py" in results[1].message
        assert "reward 'mine' must be a finite number; got nan." in results[5].message
        assert pool.stats.num_jobs == 9
        assert pool.stats.num_failures == {"raised": 2, "invalid": 4}
        assert pool.stats.num_workers_replaced == 0


def test_a_crash_fails_its_rollout_and_the_worker_is_replaced():
    with obedient_pool() as pool:
        results = ask(pool, "value 1", "exit 3", "value 2", "segfault", "value 4")
        assert [results[key].total for key in (0, 2, 4)] == [1.0, 2.0, 4.0]
        assert [results[key].reason for key in (1, 3)] == ["crashed", "crashed"]
        assert "exited with code 3; it last printed: last words" in results[1].message
        assert "SIGSEGV" in results[3].message
        assert pool.stats.num_workers_replaced == 2


def test_a_reward_that_hangs_is_answered_at_its_deadline_and_its_whole_family_ends(tmp_path):
    with obedient_pool(tmp_path, deadline_seconds=3.0) as pool:
        results = ask(pool, "hang_with_children", "value 7")
        assert results[0].reason == "timeout"
        assert "deadline of 3 s" in results[0].message
        assert results[1].total == 7.0
        for name in FAMILY:
            assert not is_running(read_pid(tmp_path, name)), name


def test_what_a_crashed_worker_left_behind_ends_too(tmp_path):
    with obedient_pool(tmp_path) as pool:
        assert ask(pool, "crash_with_children")[0].reason == "crashed"
        for name in ("child", "daemon"):
            assert not is_running(read_pid(tmp_path, name)), name


def test_closing_the_pool_ends_a_busy_worker_and_its_family(tmp_path):
    with obedient_pool(tmp_path) as pool:
        pool.submit(0, make_rollout("hang_with_children"))
        wait_until((tmp_path / "worker").exists)
        assert all(is_running(read_pid(tmp_path, name)) for name in FAMILY)
    assert not any(is_running(read_pid(tmp_path, name)) for name in FAMILY)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.submit(1, make_rollout("value 1"))


def test_after_nine_hangs_on_four_workers_a_good_call_is_answered():
    with obedient_pool(num_workers=4, num_spares=1, deadline_seconds=1.0) as pool:
        results = ask(pool, *["hang"] * 9)
        assert [results[key].reason for key in range(9)] == ["timeout"] * 9
        assert ask(pool, "value 5")[0].total == 5.0
        assert pool.stats.num_failures == {"timeout": 9}
        assert pool.stats.num_workers_replaced == 9


def test_a_spare_takes_over_at_once():
    with obedient_pool(num_workers=1, num_spares=1, deadline_seconds=1.0) as pool:
        wait_until_idle(pool, 2)
        pids = {worker.process.pid for worker in pool._workers}
        results = ask(pool, "hang", "pid")
        assert results[0].reason == "timeout"
        assert results[1].total in pids  # answered by the process that stood by, not by a new one


def test_printing_100_megabytes_neither_blocks_nor_fills_memory(tmp_path):
    with obedient_pool(tmp_path) as pool:
        pool.submit(0, make_rollout(f"print {100 * 1024}"))
        wait_until((tmp_path / "printed").exists)  # nobody reads meanwhile
        assert dict(pool.results(PATIENCE_SECONDS))[0].total == 1.0
        assert len(pool._workers[0]._output) <= 2000


def test_results_come_in_finishing_order():
    with obedient_pool(num_workers=2) as pool:
        wait_until_idle(pool, 2)
        pool.submit(10, make_rollout("sleep 1.5"))
        pool.submit(20, make_rollout("sleep 0.1"))
        pool.submit(30, make_rollout("value 3"))
        assert [key for key, _ in pool.results(PATIENCE_SECONDS)] == [20, 30, 10]
        # Also when both are there already at the first look.
        pool.submit(1, make_rollout("sleep 0.6"))
        pool.submit(2, make_rollout("sleep 0.1"))
        time.sleep(1.5)
        assert [key for key, _ in pool.results(PATIENCE_SECONDS)] == [2, 1]


def test_a_rollout_that_finished_in_time_is_not_late_because_nobody_looked():
    with obedient_pool(deadline_seconds=1.0) as pool:
        pool.submit(0, make_rollout("value 1"))
        time.sleep(1.5)
        assert dict(pool.results(PATIENCE_SECONDS))[0].total == 1.0


def test_a_rollout_that_finished_late_is_late_although_nobody_looked():
    with obedient_pool(deadline_seconds=0.3) as pool:
        pool.submit(0, make_rollout("sleep 0.6"))
        time.sleep(1.2)
        assert dict(pool.results(PATIENCE_SECONDS))[0].reason == "timeout"


def test_results_return_when_their_time_is_up_and_continue_later():
    with obedient_pool() as pool:
        pool.submit(0, make_rollout("sleep 1.5"))
        assert list(pool.results(0.0)) == []
        assert list(pool.results(0.05)) == []
        with pytest.raises(ValueError, match="in flight; got 0"):
            pool.submit(0, make_rollout("value 1"))
        assert [(key, reward.total) for key, reward in pool.results(PATIENCE_SECONDS)] == [(0, 1.0)]
        assert list(pool.results(PATIENCE_SECONDS)) == []


def test_a_reply_past_the_limit_fails_and_the_worker_survives():
    with obedient_pool(max_reply_bytes=2000) as pool:
        results = ask(pool, "large 5000", "large 100")
        assert results[0].reason == "too_large"
        assert results[1].parts["mine/" + "p" * 100] == 1.0
        assert pool.stats.num_workers_replaced == 0


def test_a_worker_that_breaks_the_protocol_is_replaced():
    with obedient_pool() as pool:
        results = ask(pool, "flood", "value 1", "garble", "value 2")
        assert [results[key].reason for key in (0, 2)] == ["too_large", "crashed"]
        assert [results[key].total for key in (1, 3)] == [1.0, 2.0]


def test_a_rollout_is_not_blamed_for_a_worker_that_died_before_it():
    with obedient_pool() as pool:
        first = int(ask(pool, "pid")[0].total)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_running(first))
        pool._workers[0].state = "idle"  # what the pool still believes
        result = ask(pool, "pid")[0]
        assert isinstance(result, Reward)
        assert result.total != first
        assert pool.stats.num_failures == {}


def test_a_rollout_of_many_megabytes_crosses():
    text = "value 1" + " " * 5_000_000
    with obedient_pool() as pool:
        results = ask(pool, text, text)
        assert [results[key].total for key in (0, 1)] == [1.0, 1.0]


def test_memory_is_limited():
    with obedient_pool(memory_limit_bytes=1 << 30) as pool:
        results = ask(pool, f"eat {2 << 30}", f"eat {1 << 20}")
        assert results[0].reason == "raised"
        assert "MemoryError" in results[0].message
        assert results[1].total == 1 << 20


def test_workers_import_no_torch_and_see_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("my_api_key", "s3cret")
    monkeypatch.setenv("HARMLESS", "seen")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    texts = [
        "modules torch",
        "modules json",
        "environ HF_TOKEN=",
        "environ my_api_key=",
        "environ HARMLESS=seen",
    ]
    specs = [
        RewardSpec(type="misbehaving_rewards:Obedient", name="mine"),
        RewardSpec(type="math_verify", weight=0.0),
    ]
    with RewardPool(RewardPool.Config(num_workers=1, num_spares=0), specs) as pool:
        results = ask(pool, *texts, "environ OMP_NUM_THREADS=1")
        assert [results[key].parts["mine"] for key in range(6)] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_importing_the_pool_imports_no_torch():
    code = "import sys, titan_rl.rewards.pool, titan_rl.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("reward_type", "message"),
    [
        ("misbehaving_rewards:RaisesWhenBuilt", "KeyError: 'no such model'"),
        ("misbehaving_rewards:NoSuchClass", "NoSuchClass"),
        ("no_such_module:Reward", "no_such_module"),
        ("misbehaving_rewards:ExitsWhenBuilt", "exited with code 17"),
        ("misbehaving_rewards:HangsWhenBuilt", "did not react for 3 s"),
        ("exact_mach", "Did you mean 'exact_match'"),
    ],
)
def test_a_reward_that_cannot_be_built_is_a_config_error_before_training(reward_type, message):
    config = RewardPool.Config(num_workers=1, num_spares=0, startup_seconds=3.0)
    with pytest.raises(ConfigError, match=message):
        RewardPool(config, [RewardSpec(type=reward_type, name="mine")])


def test_metadata_that_is_no_json_is_a_config_error_that_names_the_prompt():
    with (
        obedient_pool() as pool,
        pytest.raises(ConfigError, match="metadata of prompt 'train/7' must be JSON"),
    ):
        pool.submit(0, make_rollout("value 1", metadata={"when": object()}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_workers", 0), ("num_spares", -1), ("deadline_seconds", 0.0), ("startup_seconds", float("nan"))],
)
def test_impossible_settings_are_config_errors(key, value):
    with pytest.raises(ConfigError, match=f"reward_workers.{key}"), obedient_pool(**{key: value}):
        pass


def test_workers_die_with_the_trainer(tmp_path):
    code = f"""
import os, sys
sys.path[:0] = [{HERE!r}]
from reward_cases import make_rollout
from titan_rl.rewards.pool import RewardPool, RewardSpec
spec = RewardSpec(type="misbehaving_rewards:Obedient", params={{"directory": {str(tmp_path)!r}}})
pool = RewardPool(RewardPool.Config(num_workers=1, num_spares=1), [spec])
pool.submit(0, make_rollout("hang"))
print(*[worker.process.pid for worker in pool._workers], flush=True)
sys.stdin.read()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 2
        wait_until((tmp_path / "worker").exists)
        assert all(map(is_running, pids))
    finally:
        trainer.kill()
        trainer.communicate()
    wait_until(lambda: not any(map(is_running, pids)))


def test_no_descriptor_is_left_open_by_replaced_workers():
    with obedient_pool() as pool:
        ask(pool, "value 1")
        before = len(os.listdir("/proc/self/fd"))
        ask(pool, "exit 1", "exit 1", "exit 1", "value 1")
        assert len(os.listdir("/proc/self/fd")) == before
