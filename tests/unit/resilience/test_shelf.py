"""Which checkpoints count, which is the newest and the best, and which go."""

from tests.unit.resilience.saved import write_checkpoint
from titan_rl.errors import ConfigError
from titan_rl.resilience import shelf


def steps(found):
    return [entry.step for entry in found]


def removed(folder, **policy):
    kept = {"keep_latest": 2, "keep_best": 0} | policy
    return [path.name for path in shelf.to_remove(shelf.entries(folder), **kept)]


def test_the_newest_is_the_one_written_last_and_not_the_one_of_the_highest_step(tmp_path):
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 7)  # after a roll-back to 5
    assert steps(shelf.entries(tmp_path)) == [5, 10, 15, 7]
    assert [manifest.step for _, manifest in shelf.newest_first(shelf.entries(tmp_path))] == [7, 15, 10, 5]


def test_after_a_rollback_what_is_saved_survives_the_purge(tmp_path):
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 6)
    assert removed(tmp_path) == ["step-5", "step-10"]
    for path in shelf.to_remove(shelf.entries(tmp_path), keep_latest=2, keep_best=0):
        shelf.discard(path)
    write_checkpoint(tmp_path, 7, sequence=5)
    assert removed(tmp_path) == ["step-15"]


def test_what_is_damaged_is_neither_counted_nor_removed(tmp_path):
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-4" / "__0_0.distcp").write_bytes(b"short")
    (tmp_path / "step-99").mkdir()
    (tmp_path / "step-x").mkdir()
    found = shelf.entries(tmp_path)
    assert sorted(entry.step for entry in found if entry.fault) == [4, 99]
    assert [manifest.step for _, manifest in shelf.newest_first(found)] == [3, 2, 1]
    assert removed(tmp_path) == ["step-1"]
    for step in (2, 3):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
    assert removed(tmp_path) == []  # the last good one


def test_the_best_is_kept_besides_the_latest(tmp_path):
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.9), (4, None), (5, 0.1)):
        write_checkpoint(tmp_path, step, score=score)
    found = shelf.entries(tmp_path)
    assert [path.name for path in shelf.best(found, 2)] == ["step-3", "step-2"]
    assert removed(tmp_path, keep_best=1) == ["step-1", "step-2"]
    assert removed(tmp_path, keep_best=2) == ["step-1"]
    assert removed(tmp_path, keep_latest=0) == []


def test_of_losses_the_lowest_is_the_best(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.9)):
        write_checkpoint(tmp_path, step, score=loss, is_higher_better=False)
    assert [path.name for path in shelf.best(shelf.entries(tmp_path))] == ["step-2"]


def test_a_model_alone_is_not_resumed_and_does_not_push_out_what_can_be(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    for step in (3, 4):
        write_checkpoint(tmp_path, step, is_resumable=False)
    assert [manifest.step for _, manifest in shelf.newest_first(shelf.entries(tmp_path))] == [2, 1]
    assert removed(tmp_path) == []


def test_one_of_the_same_step_takes_the_place_of_the_other(tmp_path):
    write_checkpoint(tmp_path, 4, score=0.1)
    write_checkpoint(tmp_path, 4, score=0.2, sequence=2)
    (entry,) = shelf.entries(tmp_path)
    assert entry.manifest.facts.held_out.value == 0.2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["removing-4.0", "step-4"]
    assert shelf.clean_up(tmp_path) == ["removing-4.0"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_renamed_checkpoint_does_not_count(tmp_path):
    write_checkpoint(tmp_path, 4).rename(tmp_path / "step-8")
    assert "says that it is of step 4" in shelf.entry(tmp_path / "step-8").fault


def test_failures_are_written_down_and_a_line_that_was_cut_off_is_passed_over(tmp_path):
    (tmp_path / "saving-6").mkdir()
    shelf.note_failure(tmp_path, 6, "No space left on device")
    with (tmp_path / shelf.FAILURES).open("a") as stream:
        stream.write('{"step": 8, "cau')
    assert shelf.failures(tmp_path) == [(6, "No space left on device")]
    assert not (tmp_path / "saving-6").exists()
    shelf.note_failure(tmp_path / "absent", 8, "nowhere to write")  # and no error


def test_errors_say_what_to_do(tmp_path):
    (tmp_path / "step-3").mkdir()
    error = shelf.none_complete(tmp_path, shelf.entries(tmp_path))
    assert isinstance(error, ConfigError)
    assert "dump_folder must hold a complete checkpoint to resume from, or none at all" in str(error)
    assert "got step-3 has no manifest.json" in str(error)
    assert "checkpoint.load_step" in str(shelf.no_such_checkpoint(3, "step-3 does not exist"))
