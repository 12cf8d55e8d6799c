"""Datasets of the `datasets` library, from directories: no network here."""

import json
import re
import sys

import datasets
import pytest

from titan_rl.data.huggingface import HuggingFace
from titan_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def load(path, ours="train", **config):
    return HuggingFace(HuggingFace.Config(path=str(path), **{"prompt_column": "q", **config}), ours)


def contents(data):
    return [(data[i].id, data[i].messages[0].content) for i in range(len(data))]


@pytest.fixture
def saved(tmp_path):
    """A saved dictionary of two splits."""
    parts = {"train": ["a", "b"], "test": ["c"], "leak": ["x", "b"]}
    whole = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict({"q": words, "a": [1] * len(words)})
            for name, words in parts.items()
        }
    )
    path = tmp_path / "saved"
    whole.save_to_disk(str(path))
    return path


def test_splits_of_a_saved_dictionary_are_ours(saved):
    assert contents(load(saved, held_out_split="test")) == [("train:0", "a"), ("train:1", "b")]
    assert contents(load(saved, "held_out", held_out_split="test")) == [("test:0", "c")]
    assert load(saved, answer_column="a")[0].answer == "1"


def test_a_single_saved_dataset_is_its_own_split(tmp_path):
    path = tmp_path / "one"
    datasets.Dataset.from_dict({"q": ["a", "b"]}).save_to_disk(str(path))
    assert contents(load(path)) == [("train:0", "a"), ("train:1", "b")]


def test_a_directory_of_data_files_is_loaded(tmp_path):
    path = tmp_path / "files"
    path.mkdir()
    (path / "train.jsonl").write_text(json.dumps({"q": "a"}) + "\n")
    assert contents(load(path)) == [("train:0", "a")]


def test_messages_arrive_as_messages(tmp_path):
    path = tmp_path / "chat"
    datasets.Dataset.from_dict({"m": [[{"role": "user", "content": "Hi"}]]}).save_to_disk(str(path))
    assert contents(load(path, prompt_column=None, messages_column="m")) == [("train:0", "Hi")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split": "trian"}, "data.source.split must be one of ['leak', 'test', 'train']; got 'trian'"),
        ({"held_out_split": "dev"}, "data.source.held_out_split must be one of"),
        (
            {"held_out_split": "leak"},
            "data.source.held_out_split must share no prompt with the train split; got 1 shared",
        ),
        ({"prompt_column": "qq"}, "[train]: qq must be present; got columns q, a."),
        ({"prompt_column": "a"}, "[train]: row 0: a must be text; got int 1."),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_with_its_place(saved, config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(saved, **config)


def test_an_empty_split_is_refused(tmp_path):
    path = tmp_path / "none"
    datasets.Dataset.from_dict({"q": []}).save_to_disk(str(path))
    with pytest.raises(ConfigError, match=r"data\.source\.path must name a dataset that can be loaded"):
        load(path)


def test_a_directory_without_data_is_refused(tmp_path):
    path = tmp_path / "bare"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"data\.source\.path must name a dataset that can be loaded"):
        load(path)


def test_without_the_library_the_error_names_the_extra(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data\.source\.type 'huggingface' must have .*titan_rl\[data\]"):
        load(saved)
