"""Preference runs before any process group: contradictions, what the numbers amount to, draws and shares."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.trainers.credit_fakes import on_ranks
from titan_rl.config.choice import build
from titan_rl.config.entry import read_checked
from titan_rl.data.preferences import Encoded, Preference
from titan_rl.errors import ConfigError
from titan_rl.observability.summary import write_json
from titan_rl.trainers import validation
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.pair_batches import make_batches
from titan_rl.trainers.pair_data import deal, open_pair_data
from titan_rl.trainers.pair_reporting import PairReporter, PairSummary
from titan_rl.trainers.pair_trainer import PairTrainer

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


def configured(*overrides, recipe="tiny_dpo"):
    return configure(*read_checked(str(ROOT / "train_configs" / f"{recipe}.toml"), list(overrides)))


def check(*overrides, recipe="tiny_dpo", world_size=1, opens_data=False):
    trainer = {"tiny_dpo": "preference", "tiny_reward_model": "reward_model"}[recipe]
    config = configured(*overrides, recipe=recipe)
    validation.check_run(config, trainer, world_size=world_size, opens_data=opens_data)
    return validation.describe(config, trainer, world_size=world_size)


@pytest.mark.parametrize("recipe", ["tiny_dpo", "tiny_reward_model"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--parallelism.tensor_parallel_degree", "2"],
            r"tensor_parallel_degree must divide the 1 rank\(s\)",
        ),
        (["--training.global_batch_size", "8"], r"global_batch_size must not be set.*preferences_per_step"),
        (["--parallelism.data_parallel_shard_degree", "2"], r"make 1 rank\(s\)"),
        (["--training.enable_cpu_offload", "true"], r"enable_cpu_offload must be false on a CPU"),
        (["--checkpoint.async_mode", "async_with_pinned_mem"], r'async_mode must be "disabled" or "async"'),
        (["--data.source.num_held_out", "1600"], r"num_held_out must be at least 0 and less than"),
        (["--training.seq_len", "12"], r"seq_len must hold both completions of a pair"),
    ],
)
def test_contradictions_are_refused(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides, recipe=recipe, opens_data=True)


def test_the_numbers_of_a_run_are_said():
    lines = check("--data.preferences_per_step", "9", world_size=2, opens_data=True)
    numbers = {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}
    assert numbers["preferences"] == "9 per step, 360 in all"
    assert numbers["rows"] == "at most 10 of 512 tokens per rank and step"


@pytest.mark.parametrize("name", ["cdpo", "ipo", "simpo", "orpo", "kto"])
def test_a_loss_is_chosen_by_its_name_and_keeps_its_keys_to_itself(name):
    config = configured("--loss.type", name)
    assert type(build(config.loss)).__name__.lower() in ("conservativedpo", name)
    with pytest.raises(ConfigError, match="loss"):
        configured("--loss.type", "orpo", "--loss.beta", "0.1")


def open_data(**changes):
    section = configured(*(part for k, v in changes.items() for part in (f"--data.{k}", str(v)))).data
    assets = str(ROOT / "titan_rl" / "assets" / "tiny_llama")
    return open_pair_data(
        section,
        assets=assets,
        vocab_size=104,
        row_tokens=64,
        rows=1,
        seed=5,
        pairs_for=None,
        with_mismatched=True,
    )


def test_draws_depend_on_the_cursor_alone():
    data = open_data()
    whole = [p.id for p in data.draw(0, 30)]
    assert [p.id for start in (0, 10, 20) for p in data.draw(start, 10)] == whole


@pytest.mark.parametrize("world", [1, 2, 4, 40])
def test_ranks_train_every_preference_once_with_equal_work_and_encode_none_more_than_twice(world):
    """On forty ranks ten have none."""
    drawn = [Preference(str(index), (), "x", "y") for index in range(30)]

    def work(rank, collectives):
        asked = []

        def encode(preferences):
            asked.extend(preferences)
            lengths = [4 + (37 * int(p.id) ** 2) % 97 for p in preferences]
            return [
                Encoded(p, tuple((side, [1] * n, [True] * n) for side in ("chosen", "rejected")))
                for p, n in zip(preferences, lengths, strict=True)
            ]

        return deal(drawn, encode, attention_cost=0.1, collectives=collectives), len(asked)

    found = on_ranks(world, work)
    held = [[int(encoded.preference.id) for encoded in mine] for mine, _ in found]
    assert sorted(index for part in held for index in part) == list(range(30))
    assert all(part == sorted(part) for part in held)
    assert sum(count for _, count in found) <= 60
    costs = [sum(n + 0.1 * n**2 for encoded in mine for n in encoded.lengths) for mine, _ in found]
    if world <= 4:  # every fourth preference would leave one of four ranks with 14 % more than the mean
        assert max(costs) < 1.001 * sum(costs) / world


def test_what_a_run_can_draw_is_scored_and_nothing_twice():
    data = open_data(**{"source.maximum": 5, "source.num_held_out": 5})
    assert sorted(p.id for p in data.drawn(7)) == sorted(p.id for p in data.draw(0, 7))
    assert len(data.train.dataset) == 20
    assert len({p.id for p in data.drawn(20)}) == len(data.drawn(1000)) == 20
    assert {p.id for p in data.held_out_preferences(100)}.isdisjoint(p.id for p in data.drawn(1000))
    assert len(data.held_out_preferences(3)) == 3


def test_mismatched_completions_stand_behind_another_prompt():
    data = open_data()
    for preference in data.draw(0, 20):
        other = data.train.mismatched(preference)
        assert other.messages == preference.messages
        a, b = preference.id.split("/")[2:]
        assert (other.chosen, other.rejected) != (
            preference.chosen,
            preference.rejected,
        ) or other.chosen == str(int(a) + int(b))
    assert len({data.train.mismatched(p).chosen for p in data.draw(0, 20)}) > 5


def test_a_tokenizer_of_another_model_is_refused():
    section = configured().data
    assets = str(ROOT / "titan_rl" / "assets" / "tiny_llama")
    with pytest.raises(ConfigError, match="hold a tokenizer of at most 50 tokens"):
        open_pair_data(section, assets=assets, vocab_size=50, row_tokens=64, rows=1, seed=0, pairs_for=None)


def test_micro_batches_know_which_documents_are_chosen_and_how_long_they_are():
    data = open_data()
    batches = make_batches(data.encode(data.draw(0, 9)), row_tokens=40, rows=2, pad_to="longest")
    assert len(batches) > 1
    for batch in batches:
        micro_batch, numbers = batch.micro_batch, batch.micro_batch.sample_index
        assert sorted([*batch.chosen.tolist(), *batch.rejected.tolist()]) == list(range(len(batch.keys)))
        for number in range(len(batch.keys)):
            assert int(micro_batch.loss_mask[numbers == number].sum()) == int(batch.lengths[number])
            text = data.encoder.decode(micro_batch.input_ids[numbers == number].tolist())
            left, answer = text.split("=")
            is_right = sum(map(int, "".join(c for c in left if c in "0123456789+").split("+"))) == int(answer)
            assert is_right == (number in batch.chosen.tolist()), text


def test_the_deviation_of_the_margin_is_over_all_pairs_of_all_micro_batches():
    trainer = SimpleNamespace(collectives=SimpleNamespace(reduce=lambda values, _: values))
    # Margins 1 and 3 in one micro-batch, 5 in another: mean 3, variance 8 / 3.
    parts = [
        {"margin/mean": torch.tensor(4 / 3), "margin_square/mean": torch.tensor(10 / 3)},
        {"margin/mean": torch.tensor(5 / 3), "margin_square/mean": torch.tensor(25 / 3)},
    ]
    assert PairTrainer.reduce(trainer, parts) == pytest.approx({"margin": 3, "margin_std": math.sqrt(8 / 3)})


def test_a_summary_has_what_stood_before_and_after():
    summary = PairSummary(steps=4, num_evaluated=200)
    summary.evaluations = {
        0: {"accuracy": 0.5, "margin": 0.0},
        4: {"accuracy": 0.75, "margin": 1.5, "margin_std": 2.0},
    }
    summary.update(4)
    assert (summary.accuracy_before, summary.accuracy_after, summary.margin_after) == (0.5, 0.75, 1.5)
    # Standard errors: sqrt(0.5 * 0.5 / 200), sqrt(0.75 * 0.25 / 200) and 2 / sqrt(200).
    accuracy = "Held-out accuracy on 200 preferences: 0.500 +- 0.035 before, 0.750 +- 0.031 after."
    margin = "Held-out margin on 200 preferences: 0.000 before, 1.500 +- 0.141 after."
    assert accuracy in summary.text()
    assert margin in summary.text()
    summary.update(3)
    assert summary.accuracy_after is None
    assert math.isclose(summary.margin_before, 0.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_of_a_resumed_run_knows_the_accuracy_before_the_first_step(rank, tmp_path):
    write_json(tmp_path / "summary.json", {"evaluations": {"0": {"accuracy": 0.5}, "4": {"accuracy": 0.9}}})
    report = PairReporter(
        SimpleNamespace(
            step=2,
            config=SimpleNamespace(dump_folder=str(tmp_path)),
            collectives=SimpleNamespace(rank=rank, barrier=lambda: None),
        )
    )
    report.start()
    assert report._summary.evaluations == {0: {"accuracy": 0.5}}
