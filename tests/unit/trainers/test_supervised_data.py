"""Rows of supervised runs: what is trained, how documents are packed, and where a resumed run goes on."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import titan_rl
from titan_rl.data.jsonl import Jsonl
from titan_rl.errors import ConfigError
from titan_rl.titan.api import IGNORE_INDEX
from titan_rl.trainers.supervised_data import (
    Row,
    SourceSection,
    SupervisedDataLoader,
    SupervisedDataSection,
)

TINY = Path(titan_rl.__file__).parent / "assets" / "tiny_llama"
BOS, EOS, USER, ASSISTANT = 1, 2, 5, 6
# Earlier replies are rendered without their first character: each reply needs a document of its own.
SHORTENING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'][1:] if m['role'] == 'assistant' "
    "else m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}<assistant>"
)


def text(ids):
    """Characters of ids; special tokens and padding are left out."""
    return "".join(chr(int(i) - 9 + 32) for i in ids if int(i) >= 9)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Twelve conversations of two turns and of different lengths."""
    path = tmp_path / "chats.jsonl"
    lines = []
    for number in range(12):
        turns = [
            ("user", f"a{number}"),
            ("assistant", "x" * (1 + number % 4)),
            ("user", "b"),
            ("assistant", "yz"),
        ]
        lines.append(json.dumps({"m": [{"role": role, "content": content} for role, content in turns]}))
    path.write_text("\n".join(lines))
    return path


def loader(path, *, ranks=1, rank=0, rows=2, row_tokens=40, tokenizer=TINY, seed=3, **changed):
    source = Jsonl.Config(path=str(path), conversation_column="m")
    section = SupervisedDataSection(mixture=[SourceSection(source=source)], **changed)
    return SupervisedDataLoader(
        SupervisedDataLoader.Config(section=section, seed=seed),
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=SimpleNamespace(tokenizer_path=str(tokenizer)),
        seq_len=row_tokens,
        local_batch_size=rows,
    )


def take(data, count):
    batches = iter(data)
    return [next(batches) for _ in range(count)]


def documents(batch):
    """Token ids and labels of the documents of a batch; padding has no label and starts with 0."""
    inputs, labels = batch
    found = []
    for ids, positions, row in zip(inputs["input"], inputs["positions"], labels, strict=True):
        starts = [i for i, position in enumerate(positions.tolist()) if position == 0] + [len(ids)]
        found += [(ids[a:b], row[a:b]) for a, b in itertools.pairwise(starts) if int(ids[a])]
    return found


@pytest.mark.parametrize(
    ("train_on", "expected"), [("assistant", "xxyz"), ("answer", "yz"), ("text", "a1xxbyz")]
)
def test_labels_are_the_next_tokens_of_what_is_trained(tmp_path, train_on, expected):
    path = tmp_path / "one.jsonl"
    turns = [("user", "a1"), ("assistant", "xx"), ("user", "b"), ("assistant", "yz")]
    path.write_text(json.dumps({"m": [{"role": role, "content": content} for role, content in turns]}))
    ((ids, labels), *_) = documents(take(loader(path, train_on=train_on), 1)[0])
    kept = labels[labels != IGNORE_INDEX]
    assert text(kept) == expected
    is_label = labels[:-1] != IGNORE_INDEX
    assert torch.equal(labels[:-1][is_label], ids[1:][is_label])
    assert labels[-1] == IGNORE_INDEX
    ends = {"assistant": 2, "answer": 1, "text": 2}[train_on]
    assert int((kept == EOS).sum()) == ends
    if train_on != "text":
        assert not {USER, ASSISTANT, BOS} & set(kept.tolist())


def test_an_epoch_holds_every_conversation_once_whole_and_with_its_own_positions(conversations):
    data = loader(conversations, rows=1)
    found = []
    while len(found) < 12:
        found += documents(take(data, 1)[0])
    assert sorted(text(ids)[:3].rstrip("x") for ids, _ in found[:12]) == sorted(f"a{n}" for n in range(12))
    assert all(text(ids).endswith("byz") for ids, _ in found)


def test_two_ranks_read_the_rows_of_one(conversations):
    alone = [documents(batch) for batch in take(loader(conversations, rows=2), 3)]
    pairs = [take(loader(conversations, rows=1, ranks=2, rank=rank), 3) for rank in (0, 1)]
    together = [documents(a) + documents(b) for a, b in zip(*pairs, strict=True)]
    assert [[text(ids) for ids, _ in batch] for batch in together] == [
        [text(ids) for ids, _ in batch] for batch in alone
    ]


@pytest.mark.parametrize("template", [None, SHORTENING])
def test_a_resumed_run_goes_on_with_the_next_document(conversations, tmp_path, template):
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TINY, tokenizer)
    if template:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text())
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    options = {"tokenizer": tokenizer, "rows": 1, "row_tokens": 23}
    whole = [text(ids) for batch in take(loader(conversations, **options), 12) for ids, _ in documents(batch)]
    parts = []
    for cut in range(1, 8):
        first, second = loader(conversations, **options), loader(conversations, **options)
        got = take(first, cut)
        second.load_state_dict(first.state_dict())
        parts.append(int(first.state_dict()["part"]))
        got += take(second, 12 - cut)
        assert [text(ids) for batch in got for ids, _ in documents(batch)] == whole
    assert any(parts) == bool(template), "the case in which a conversation is cut between two rows"
    if template:
        assert "a0x" in whole
        assert "a0byz" in whole


def test_a_document_that_fits_no_row_ends_the_run_or_is_left_out(conversations):
    with pytest.raises(ConfigError, match=r"must hold every document; .* has 1[4-7] tokens"):
        take(loader(conversations, row_tokens=13), 6)
    data = loader(conversations, rows=1, row_tokens=14, too_long="skip")
    found = [text(ids) for batch in take(data, 12) for ids, _ in documents(batch)]
    assert {len(t) for t in found} == {6, 7}
    assert data._encoder.num_skipped > 6
    with pytest.raises(ConfigError, match=r'must hold some documents, of which data\.too_long = "skip"'):
        take(loader(conversations, row_tokens=3, too_long="skip"), 1)


def test_padding_is_a_document_that_trains_nothing():
    row = Row()
    row.add([5, 6, 7], [False, True, True], number=4)
    row.pad(5)
    assert row == Row([5, 6, 7, 0, 0], [0, 1, 2, 0, 1], [6, 7, *[IGNORE_INDEX] * 3], [4, 4, 4, -1, -1])
