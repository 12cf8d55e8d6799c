"""The parts of a recovery, from what a run left. Nothing is run or timed."""

import json

import pytest

from benchmarks import recovery, timed_rank
from titan_rl.resilience import faults

LOG = """\
E1201 10:00:01.500000 77 api.py:1025] failed (exitcode: -9) local_rank: 1
E1201 10:01:00.250000 77 api.py:1025] failed (exitcode: -9) local_rank: 0
"""


@pytest.fixture
def begun(tmp_path):
    """Seconds since the epoch of 10:00:00 on the day that the log is of; two kills in the folder."""
    [first, second] = recovery._times_of_failures(LOG)
    assert second - first == 58.75
    at = first - 1.5
    planted = recovery.plan(2, 2)
    (tmp_path / faults.FOLDER).mkdir()
    for fault, when in zip(planted, (at + 1, at + 60), strict=True):
        content = {"fault": {name: getattr(fault, name) for name in fault.__slots__}, "time": when}
        (tmp_path / faults.FOLDER / f"{fault.attempt}.json").write_text(json.dumps(content))
    (tmp_path / timed_rank.FOLDER).mkdir()
    for attempt, start in ((1, at + 2), (2, at + 61)):
        notes = {"created": start, "imported": start + 8, "loaded": start + 20}
        notes |= {"process_group": 1.0, "import_vllm": 4.0, "engine": 5.0, "load": 0.5}
        (tmp_path / timed_rank.FOLDER / f"{attempt}-0.json").write_text(json.dumps(notes))
    (tmp_path / "journal").mkdir()
    lines = [{"time": at + 0.9, "step": 2}, {"time": at + 22, "resumed_step": 2}]
    lines += [{"time": at + 24, "step": 3}, {"time": at + 90, "step": 4}]
    (tmp_path / "journal" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return at


def test_the_parts_add_up_to_the_time_from_the_kill_to_the_end_of_the_next_step(begun, tmp_path):
    first, second = recovery.read(tmp_path, LOG)
    assert first.detection == pytest.approx(0.5)
    assert first.rendezvous == pytest.approx(0.5 + 1)
    assert first.imports == pytest.approx(8 + 4)
    assert first.build == pytest.approx(20 - 8 - 4 - 1 - 0.5)
    assert (first.load, first.first_step) == pytest.approx((0.5, 2))
    assert first.total == pytest.approx(24 - 1)
    assert first.without_imports == pytest.approx(11)
    assert second.total == pytest.approx(90 - 60)


def test_each_start_has_one_kill_after_its_first_step(tmp_path):
    planted = recovery.plan(4, 2)
    assert [fault.attempt for fault in planted] == [0, 1, 2, 3]
    assert [fault.rank for fault in planted] == [0, 1, 0, 1]
    assert [fault.step for fault in planted] == [3, 5, 7, 9]
    assert faults.parse(";".join(map(str, planted))) == tuple(planted)
