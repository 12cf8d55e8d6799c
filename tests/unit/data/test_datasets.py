"""The registry, the split hash, fingerprints and the filtered view."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.registry import resolve
from titan_rl.data.datasets import (
    DATASETS,
    FilteredDataset,
    content_key,
    fingerprint_prompts,
    is_held_out,
    require,
)
from titan_rl.errors import ConfigError
from titan_rl.types import Message, Prompt


class Words:
    """A dataset of one-word prompts."""

    name = "words"

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self.fingerprint = fingerprint_prompts(self[i] for i in range(len(words)))

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(id=f"words/{index}", messages=(Message("user", self._words[index]),))


def test_every_registered_name_leads_to_a_class_with_a_config():
    for name in DATASETS:
        assert resolve(name, DATASETS, "data.source.type").Config.__name__ == "Config", name


def test_datasets_and_cursor_import_no_torch():
    modules = ["titan_rl.data.cursor", *sorted({t.partition(":")[0] for t in DATASETS.values()})]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_content_key_ignores_white_space_and_sees_roles_and_message_borders():
    assert content_key([Message("user", "a  b\n")]) == content_key([Message("user", "a b")])
    assert content_key([Message("user", "a b")]) != content_key([Message("system", "a b")])
    two = [Message("user", "a"), Message("user", "b")]
    assert content_key(two) != content_key([Message("user", "ab")])
    assert content_key([Message("user", "ab")]) != content_key([Message("user", "a b")])


def test_about_the_given_fraction_is_held_out_and_other_seeds_hold_out_others():
    keys = [content_key([Message("user", str(n))]) for n in range(2000)]
    first = [is_held_out(key, fraction=0.2, split_seed=0) for key in keys]
    second = [is_held_out(key, fraction=0.2, split_seed=1) for key in keys]
    assert 320 < sum(first) < 480  # 400 expected, standard deviation 18
    both = sum(a and b for a, b in zip(first, second, strict=True))
    assert 40 < both < 125  # independent seeds: 80 expected
    assert not any(is_held_out(key, fraction=0.0, split_seed=0) for key in keys)
    assert all(is_held_out(key, fraction=1.0, split_seed=0) for key in keys)


@settings(deadline=None)
@given(st.binary(min_size=16, max_size=16), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_holds_out_everything_that_a_smaller_one_does(key, one, other):
    small, large = sorted([one, other])
    if is_held_out(key, fraction=small, split_seed=3):
        assert is_held_out(key, fraction=large, split_seed=3)


def test_the_fingerprint_changes_with_any_part_of_a_prompt_and_with_the_order():
    prompt = Prompt("a", (Message("user", "x"),), answer="1", metadata={"k": 1})
    other = Prompt("b", (Message("user", "y"),))
    variants = [
        [prompt, other],
        [other, prompt],
        [prompt],
        [replace(prompt, id="c"), other],
        [replace(prompt, messages=(Message("user", "z"),)), other],
        [replace(prompt, messages=(Message("system", "x"),)), other],
        [replace(prompt, answer=None), other],
        [replace(prompt, metadata={"k": 2}), other],
    ]
    assert len({fingerprint_prompts(variant) for variant in variants}) == len(variants)
    assert fingerprint_prompts([prompt, other]) == fingerprint_prompts(
        [replace(prompt, metadata=dict(prompt.metadata)), other]
    )


def test_a_filtered_dataset_shows_the_chosen_prompts_and_its_fingerprint_knows_them():
    words = Words(["a", "b", "c", "d"])
    view = FilteredDataset(words, [3, 1])
    assert [view[i].messages[0].content for i in range(len(view))] == ["d", "b"]
    assert view[0].id == "words/3"
    prints = {FilteredDataset(words, kept).fingerprint for kept in ([3, 1], [1, 3], [3], [0, 1, 2, 3])}
    assert len(prints | {words.fingerprint}) == 5
    assert FilteredDataset(Words(["a", "b"]), [0]).fingerprint != FilteredDataset(words, [0]).fingerprint


def test_a_filter_that_keeps_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"words must keep at least one prompt .* got 0 of 2"):
        FilteredDataset(Words(["a", "b"]), [])


def test_a_missing_optional_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'titan_rl\[data\]'"):
        require("pyarrow", extra="data", needed_by="data.source.type 'parquet'")
