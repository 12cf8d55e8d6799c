"""What a start finds in its folder: nothing, a run to continue, one that is done, one to protect."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.resilience.saved import write_checkpoint
from titan_rl.errors import ConfigError
from titan_rl.observability.summary import RunSummary
from titan_rl.resilience.state import RunState
from titan_rl.resilience.status import write_status
from titan_rl.trainers import earlier_start

TEXT = "steps = 20\n"


def make_config(folder: Path, *, enable: bool = True, load_step: int = -1, export: bool = False):
    return SimpleNamespace(
        dump_folder=str(folder),
        checkpoint=SimpleNamespace(enable=enable, folder="checkpoint", load_step=load_step),
        model=SimpleNamespace(export=export),
    )


def earlier_run(folder: Path, outcome: str, *, text: str = TEXT, checkpoint: bool = False) -> Path:
    """Files of a run that recorded rollouts, wrote a summary, and perhaps a checkpoint."""
    write_status(folder, outcome, step=20)
    (folder / "config.toml").write_text(text)
    for name in ("rollouts/train-000001.rank-0.jsonl", "export/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of the earlier run")
    paths = {"rollouts": str(folder / "rollouts"), "export": str(folder / "export")}
    RunSummary(steps=20, score_before=0.25, score_after=0.5, scores={0: 0.25, 20: 0.5}, paths=paths).write(
        folder / "summary.json"
    )
    if checkpoint:
        make_checkpoint(folder, 20)
    return folder


def make_checkpoint(folder: Path, step: int, *, is_whole: bool = True, **said) -> None:
    path = write_checkpoint(folder / "checkpoint", step, **said)
    if not is_whole:
        (path / "manifest.json").unlink()


# ------------------------------------------------------------------------------------- what is overwritten


def test_an_empty_folder_and_one_without_results_are_free(tmp_path):
    earlier_start.refuse_overwriting(make_config(tmp_path / "new"), TEXT)
    write_status(tmp_path, "failed", step=0, cause="ConfigError")
    (tmp_path / "config.toml").write_text("steps = 10\n")
    (tmp_path / "rollouts").mkdir()
    earlier_start.refuse_overwriting(make_config(tmp_path), TEXT)


@pytest.mark.parametrize("enable", [True, False])
def test_a_finished_run_without_a_checkpoint_is_protected(tmp_path, enable):
    earlier_run(tmp_path, "done")
    with pytest.raises(ConfigError) as caught:
        earlier_start.refuse_overwriting(make_config(tmp_path, enable=enable), TEXT)
    assert caught.value.where == "dump_folder"
    assert f"Choose another dump_folder, or delete {tmp_path}" in caught.value.remedy
    assert ("checkpoint.enable = true" in str(caught.value)) == (not enable)


@pytest.mark.parametrize(
    "name", ["rollouts/evaluation-000000.rank-0.jsonl", "summary.json", "export/config.json"]
)
def test_any_single_result_of_another_configuration_is_protected(tmp_path, name):
    (tmp_path / "config.toml").write_text("steps = 10\n")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=name):
        earlier_start.refuse_overwriting(make_config(tmp_path), TEXT)


@pytest.mark.parametrize("outcome", ["running", "failed"])
def test_a_run_that_ended_early_may_begin_again_if_it_is_the_same(tmp_path, outcome):
    earlier_run(tmp_path, outcome)
    earlier_start.refuse_overwriting(make_config(tmp_path, enable=False), TEXT)
    with pytest.raises(ConfigError):
        earlier_start.refuse_overwriting(make_config(tmp_path, enable=False), "steps = 30\n")


def test_a_run_with_a_checkpoint_is_continued_whatever_changed_unless_checkpoints_are_off(tmp_path):
    earlier_run(tmp_path, "done", checkpoint=True)
    earlier_start.refuse_overwriting(make_config(tmp_path), "steps = 30\n")
    with pytest.raises(ConfigError, match="checkpoint/step-20"):
        earlier_start.refuse_overwriting(make_config(tmp_path, enable=False), "steps = 30\n")


# ----------------------------------------------------------------------------------------------- the end


def test_a_finished_run_is_told_from_its_summary(tmp_path):
    text = earlier_start.finished(make_config(earlier_run(tmp_path, "done"), enable=False), TEXT)
    assert "nothing is left to do.\nDone: 20 steps" in text
    assert "Held-out score: 0.250 before, 0.500 after.\n" in text
    assert str(tmp_path) in text.splitlines()[-1]


def test_a_supervised_run_has_no_summary_and_is_told_all_the_same(tmp_path):
    write_status(tmp_path, "done", step=20)
    (tmp_path / "config.toml").write_text(TEXT)
    assert earlier_start.finished(make_config(tmp_path), TEXT) is None  # its checkpoint is not there
    make_checkpoint(tmp_path, 20)
    assert "Done: 20 steps." in earlier_start.finished(make_config(tmp_path), TEXT)
    assert earlier_start.finished(make_config(tmp_path, export=True), TEXT) is None


def test_a_run_is_not_finished_when_anything_is_left_to_do(tmp_path):
    config = make_config(tmp_path, enable=False)
    assert earlier_start.finished(config, TEXT) is None
    earlier_run(tmp_path, "done")
    assert earlier_start.finished(config, "steps = 30\n") is None
    for outcome in ("failed", "running"):
        write_status(tmp_path, outcome, step=20)
        assert earlier_start.finished(config, TEXT) is None
    write_status(tmp_path, "done", step=20)
    assert earlier_start.finished(config, TEXT) is not None
    (tmp_path / "export" / "model.safetensors").unlink()
    (tmp_path / "export").rmdir()
    assert earlier_start.finished(config, TEXT) is None


# --------------------------------------------------------------------------------------------- checkpoints


def test_the_newest_whole_checkpoint_is_resumed(tmp_path):
    config = make_config(tmp_path)
    assert earlier_start.checkpoint_to_resume(config) is None
    for step in (4, 12):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 16, is_whole=False)
    (tmp_path / "checkpoint" / "step-x").mkdir()
    assert earlier_start.checkpoint_to_resume(config) == tmp_path / "checkpoint" / "step-12"
    assert earlier_start.checkpoint_to_resume(make_config(tmp_path, enable=False)) is None


def test_checkpoints_of_which_none_is_whole_are_no_reason_to_begin_again(tmp_path):
    make_checkpoint(tmp_path, 4, is_whole=False)
    with pytest.raises(ConfigError, match="hold a complete checkpoint to resume from, or none at all"):
        earlier_start.checkpoint_to_resume(make_config(tmp_path))


def test_a_checkpoint_that_is_asked_for_has_to_be_there(tmp_path):
    make_checkpoint(tmp_path, 4)
    asked = earlier_start.checkpoint_to_resume(make_config(tmp_path, load_step=4))
    assert asked == tmp_path / "checkpoint" / "step-4"
    with pytest.raises(ConfigError, match=r"checkpoint\.load_step must .* got 5: step-5 does not exist"):
        earlier_start.checkpoint_to_resume(make_config(tmp_path, load_step=5))


@pytest.mark.parametrize(
    ("changed", "where"), [({"seed": 6}, "debug.seed"), ({"data_fingerprint": "others"}, "data.source")]
)
def test_the_state_of_another_run_is_refused(tmp_path, changed, where):
    same = {"seed": 5, "data_fingerprint": "prompts"}
    make_checkpoint(tmp_path, 4, state={"rl_state": RunState(**same).numbers()})
    config = make_config(tmp_path)
    earlier_start.check_resume(config, RunState(**same), name="rl_state")
    with pytest.raises(ConfigError) as caught:
        earlier_start.check_resume(config, RunState(**same | changed), name="rl_state")
    assert caught.value.where == where
    earlier_start.check_resume(make_config(tmp_path / "new"), RunState(**same | changed), name="rl_state")


def test_the_checkpoint_of_a_supervised_run_is_refused(tmp_path):
    make_checkpoint(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"checkpoint\.initial_load_path") as caught:
        earlier_start.check_resume(
            make_config(tmp_path), RunState(seed=5, data_fingerprint="prompts"), name="rl_state"
        )
    assert caught.value.where == "dump_folder"


# --------------------------------------------------------------------------------------- what is broken


@pytest.mark.parametrize("text", ["", '{"outcome": "do', "[]", "null"])
def test_a_status_that_is_broken_counts_as_none_and_is_named(text, tmp_path, caplog):
    folder = earlier_run(tmp_path / "run", "done")
    config = make_config(folder, enable=False)
    assert earlier_start.finished(config, TEXT) is not None
    (folder / "status.json").write_text(text)
    assert earlier_start.finished(config, TEXT) is None
    assert f"{folder / 'status.json'}" in caplog.text
    earlier_start.refuse_overwriting(config, TEXT)  # the same run, not known to be done: it begins again


def test_a_summary_that_is_broken_counts_as_none(tmp_path, caplog):
    folder = earlier_run(tmp_path / "run", "done")
    (folder / "summary.json").write_text('{"steps": 20, "paths": {')
    assert "Done: 20 steps." in earlier_start.finished(make_config(folder, enable=False), TEXT)
    assert "summary.json cannot be read and is taken as absent" in caplog.text
