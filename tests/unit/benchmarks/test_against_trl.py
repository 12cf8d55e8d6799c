"""The comparison with TRL: the same work for all sides, and figures that follow from what they wrote."""

import copy
import doctest
import json
from pathlib import Path

import pytest
import torch

from benchmarks import against_trl
from benchmarks.trl import flags, models, results, rewards, run_titan, workloads
from benchmarks.trl.results import OURS, PLAIN
from benchmarks.trl.workloads import WORKLOADS, Shape, Workload
from titan_rl.config.entry import read_checked
from titan_rl.types import Completion, FinishReason, Prompt, Rollout, Turn

SMALL = Shape(layers=2, dim=64, end_probability=1 / 16)


@pytest.mark.parametrize("module", [flags, models, results, rewards, workloads], ids=lambda m: m.__name__)
def test_the_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


# ------------------------------------------------------------------------------------------- workloads


def test_what_is_written_is_what_every_side_reads(tmp_path):
    workload = Workload(name="w", lengths="equal", shape=SMALL, prompts=2, group_size=3, steps=4)
    spec, rows = workloads.read(workload.write(tmp_path, tmp_path / "model"))
    assert (spec["samples"], spec["max_tokens"], len(rows)) == (6, 64, 8)
    assert Path(spec["model"]) == tmp_path / "model"
    assert [len(row["prompt"]) for row in rows] == [128] * 8
    steps = [workloads.of_step(rows, step, workload.prompts) for step in range(4)]
    assert [row for step in steps for row in step] == rows


def test_natural_prompts_differ_in_length_within_their_bounds():
    lengths = [len(row["prompt"]) for row in WORKLOADS["1m-natural"].rows()]
    assert min(lengths) >= 16
    assert max(lengths) <= 128
    assert max(lengths) > 4 * min(lengths)


def test_the_quickstart_asks_for_sums_and_knows_their_answers():
    rows = WORKLOADS["quickstart"].rows()
    assert len(rows) == len({row["prompt"] for row in rows}) == 48
    for row in rows:
        a, b = (int(part) for part in row["prompt"].removesuffix(" =").split(" + "))
        assert rewards.last_number(f"it is {a + b}", row["answer"]) == 1.0
        assert rewards.last_number(f"{a + b} or {a}", row["answer"]) == float(b == 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_configuration_file_fits_the_schema(name, tmp_path):
    workload = WORKLOADS[name]
    spec, _ = workloads.read(workload.write(tmp_path, tmp_path / "model"))
    path = tmp_path / "run.toml"
    path.write_text(run_titan.configuration(spec, tmp_path / "run"))
    document, trainer = read_checked(str(path), ())
    assert trainer == "rl"
    assert document.table["sampling"]["max_tokens"] == workload.max_tokens
    assert document.table["data"]["prompts_per_iteration"] * 8 == workload.samples


def test_micro_batches_of_trl_make_up_the_batch():
    spec = {"samples": 64, "steps": 3, "group_size": 8, "max_tokens": 16, "temperature": 1.0, "lr": 1e-3}
    whole, cut = (flags.flags_for(spec, tried) for tried in ({}, {"per_device_train_batch_size": 16}))
    assert (whole["per_device_train_batch_size"], whole["gradient_accumulation_steps"]) == (64, 1)
    assert (cut["per_device_train_batch_size"], cut["gradient_accumulation_steps"]) == (16, 4)
    assert {k for k in whole if whole[k] != cut[k]} == {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    }


def test_a_rollout_is_scored_like_its_text():
    completion = Completion("r", (1,), (0.0,), FinishReason.STOP, ((0, 0),))
    rollout = Rollout(Prompt("p", (), "12"), 0, 0, [Turn((1,), completion, "9 12")])
    assert rewards.digit_fraction_of_rollout(rollout) == 0.75
    assert rewards.last_number_of_rollout(rollout) == 1.0


# ---------------------------------------------------------------------------------------------- models


@torch.no_grad()
def _probabilities(shape):
    model = models.build(shape)
    ids = torch.randint(
        models.SPECIAL, models.VOCABULARY, (4, 48), generator=torch.Generator().manual_seed(5)
    )
    return model(ids).logits.softmax(-1)


def test_the_end_token_has_the_probability_that_is_asked_for():
    end = _probabilities(SMALL)[..., models.END]
    assert float(end.mean()) == pytest.approx(1 / 16, rel=0.1)
    assert float(end.std()) < 0.02


def test_special_tokens_are_never_sampled_and_without_an_end_nor_is_the_end():
    probabilities = _probabilities(Shape(layers=2, dim=64, end_probability=0.0))
    assert float(probabilities[..., : models.SPECIAL].max()) < 1e-9
    others = _probabilities(SMALL)
    others[..., models.END] = 0
    assert float(others[..., : models.SPECIAL].max()) < 1e-9


@pytest.mark.parametrize(("name", "millions"), [("1m-equal", 1), ("10m-natural", 10)])
def test_models_have_about_the_size_in_their_name(name, millions):
    with torch.device("meta"):
        model = models.LlamaForCausalLM(models._config(WORKLOADS[name].shape))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.05)


# --------------------------------------------------------------------------------------------- results

SPEC = {"steps": 4, "samples": 8, "max_tokens": 16, "lengths": "equal", "shape": {}}


def _run(seconds, *, reward=0.1, tokens=128):
    return [
        {
            "seconds": s,
            "cpu_seconds": s / 2,
            "samples": 8,
            "prompt_tokens": 40 + index,
            "completion_tokens": tokens,
            "reward": reward * (1 + index),
            "stages": {"generate": s / 2, "train": s / 4},
        }
        for index, s in enumerate(seconds)
    ]


@pytest.fixture
def sides():
    return {OURS: [_run([9, 1, 1, 2])] * 2, "TRL": [_run([90, 4, 4, 3])] * 2, PLAIN: [_run([5, 1, 1, 1])] * 2}


def test_equal_work_has_no_fault(sides):
    assert results.faults(SPEC, sides) == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda run: run.pop(), "3 steps instead of 4"),
        (lambda run: run[1].update(samples=7), "not 8 samples"),
        (lambda run: run[1].update(prompt_tokens=1), "other prompt tokens"),
        (lambda run: run[1].update(completion_tokens=127), "not 128 completion tokens"),
        (lambda run: [step.update(reward=0.1) for step in run], "the reward did not rise"),
    ],
)
def test_other_work_is_named(sides, change, cause):
    sides["TRL"] = copy.deepcopy([_run([90, 4, 4, 3])])
    change(sides["TRL"][0])
    assert any(found.startswith("TRL: ") and cause in found for found in results.faults(SPEC, sides))


def test_natural_lengths_may_differ_a_little(sides):
    natural = SPEC | {"lengths": "natural"}
    sides["TRL"] = [_run([90, 4, 4, 3], tokens=140)]
    assert results.faults(natural, sides) == []
    sides["TRL"] = [_run([90, 4, 4, 3], tokens=150)]
    assert results.faults(natural, sides) == ["TRL: 1.17 times the completion tokens of titan_rl"]


def test_the_quickstart_is_too_short_to_learn(sides):
    sides["TRL"] = [_run([90, 4, 4, 3], reward=0.0)]
    assert results.faults(SPEC | {"shape": None}, sides) == []


def test_the_first_step_of_each_run_is_not_counted(sides):
    row = results.figures(sides[OURS])
    assert (row["seconds"], row["fastest"], row["slowest"]) == (1, 1, 2)
    assert (row["samples_per_second"], row["tokens_per_second"], row["length"]) == (8, 128, 16)
    assert results.figures(sides[OURS], clock="cpu_seconds")["seconds"] == 0.5


def test_the_ratio_is_of_medians_and_lies_in_its_interval(sides):
    middle, low, high = results.ratio(sides[OURS], sides["TRL"])
    assert middle == 4.0
    assert low <= middle <= high
    assert 1.5 <= low < high <= 4.0


def test_stages_add_up_to_the_step(sides):
    shares = results.stages(sides[OURS])
    assert shares["generate"] == pytest.approx(0.5)
    assert shares["other"] == pytest.approx(0.25)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_table_has_a_line_for_every_side(sides):
    lines = results.table(sides, clock="seconds").splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [OURS, "TRL", PLAIN]
    assert "4.00 (" in lines[3]


def test_steps_are_read_as_they_were_written(tmp_path):
    steps = _run([1.5, 2.5])
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert results.read_steps(path) == steps


def test_the_report_names_the_flags_the_stages_and_what_is_not_the_same(sides):
    spec = SPEC | {"name": "w", "prompts": 2, "group_size": 4}
    content = {
        "workload": spec,
        "sides": sides,
        "flags": {"beta": 0.5},
        "tried": {"a": 1.5, "b": "exit code 1"},
    }
    text = against_trl.report([content], about="Here.", clock="seconds")
    assert '`{"beta": 0.5}`; tried, a: 1.50 s a step; tried, b: failed (exit code 1).' in text
    assert "generate 50.0%" in text
    assert "Not the same work" not in text
    sides["TRL"][0].pop()
    assert "**Not the same work:** TRL: 3 steps instead of 4" in against_trl.report(
        [content], about="Here.", clock="seconds"
    )
