"""docs/algorithms/your_own.md: the example is what the page shows, and gives the numbers that it states."""

import dataclasses
import importlib
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

from titan_rl.algorithms.interfaces import GroupRewards, LossInputs, Needs
from titan_rl.algorithms.preset import check_composition, derive_needs
from titan_rl.config.choice import build
from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError
from titan_rl.rewards.spec import RewardSpec, WeightedSum
from titan_rl.trainers.checks import check_config
from titan_rl.trainers.configuration import configure
from titan_rl.types import Completion, FinishReason, Message, Prompt, Rollout, Turn

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "algorithms" / "your_own.md").read_text()
TOML, WHOLE = str(EXAMPLES / "my_parts.toml"), str(EXAMPLES / "my_loss.toml")


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


def configured(*options, file=TOML):
    return configure(*read_checked(file, list(options)))


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def three_tokens():
    """Ratios of 2, 1 and 3, advantages of 1, 1 and -1, distances to the reference of 0.3, -0.6 and 0.9."""
    policy = torch.tensor([[-1.0, -2.0, -0.5, 7.0]], requires_grad=True)
    old = policy.detach() - torch.tensor([[2.0, 1.0, 3.0, 1.0]]).log()
    return LossInputs(
        policy_logprobs=policy,
        old_logprobs=old,
        generator_logprobs=old,
        ref_logprobs=policy.detach() - torch.tensor([[0.3, -0.6, 0.9, 5.0]]),
        advantages=torch.tensor([[1.0, 1.0, -1.0, 9.0]]),
        loss_mask=torch.tensor([[True, True, True, False]]),
        sample_index=torch.tensor([[0, 0, 1, -1]]),
        num_loss_tokens=3,
        num_samples=2,
        max_tokens=2,
    )


def test_the_loss_of_the_file_is_the_page_s_number_and_its_gradient_the_hand_computed_one():
    inputs = three_tokens()
    output = configured().loss.build()(inputs)
    assert output.metrics["policy_loss/mean"].item() == pytest.approx((-1.0 - 0.5 + 3.0) / 3, abs=1e-6)
    assert output.loss.item() == pytest.approx(0.506, abs=1e-6)
    output.loss.backward()
    gradient = [(-1.0 + 0.01) / 3, (-0.5 - 0.01) / 3, (3.0 + 0.01) / 3, 0.0]
    assert inputs.policy_logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_the_whole_loss_of_the_file_gives_the_page_s_number_and_the_hand_computed_gradient():
    config = configured("--loss.kl.coefficient=0", file=WHOLE)
    inputs = three_tokens()
    loss_fn = config.loss.build()
    output = loss_fn(inputs)
    residuals = 1 - 0.5 * math.log(2), -1 - 0.5 * math.log(3)  # of two tokens and of one
    assert residuals == pytest.approx((0.653, -1.549), abs=5e-4)
    assert output.loss.item() == pytest.approx(sum(r * r / 2 for r in residuals) / 2, abs=1e-6)
    assert output.loss.item() == pytest.approx(0.707, abs=5e-4)
    assert output.metrics["residual_abs/mean"].item() == pytest.approx(
        (2 * residuals[0] - residuals[1]) / 3, abs=1e-6
    )
    output.loss.backward()
    gradient = [-0.5 * residuals[0] / 2, -0.5 * residuals[0] / 2, -0.5 * residuals[1] / 2, 0.0]
    assert inputs.policy_logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)
    # A sample of advantage 0 is pulled to the old policy too, and no part has anything to report.
    assert not loss_fn.is_zero_without_advantage
    assert "ratio/mean" not in output.metrics
    assert {"advantage/mean", "mismatch_abs/mean", "old_kl/mean"} <= output.metrics.keys()


def test_the_terms_are_added_to_a_whole_loss():
    bare = configured("--loss.kl.coefficient=0", file=WHOLE).loss.build()(three_tokens())
    inputs = three_tokens()
    output = configured("--loss.kl.coefficient=0.25", file=WHOLE).loss.build()(inputs)
    distances = [-0.3, 0.6, -0.9]  # log reference - log policy; the first two of one sample
    k3 = [math.expm1(d) - d for d in distances]
    expected = bare.loss.item() + 0.25 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    assert output.metrics["policy_loss/mean"].item() == pytest.approx(bare.loss.item(), abs=1e-6)


def test_a_whole_loss_is_the_same_over_any_micro_batches():
    loss_fn = configured("--loss.kl.coefficient=0", file=WHOLE).loss.build()
    whole = loss_fn(three_tokens()).loss
    parts = []
    for kept in ([True, True, False, False], [False, False, True, False]):
        inputs = three_tokens()
        keep = torch.tensor([kept])
        parts.append(loss_fn(dataclasses.replace(inputs, loss_mask=inputs.loss_mask & keep)).loss)
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--loss.tua=1", r"loss\.tua must be a key of \[loss\] of type .*Did you mean 'tau'"),
        ("--loss.tau=0", r"loss\.tau must be a number > 0"),
        ("--loss.surrogate.clip_high=0.3", r"loss\.surrogate must be a key of \[loss\]"),
        ("--loss.type=my_parts:MedianBaseline", r"loss\.type must name a class derived from Loss"),
        ("--loss.type=composd", r"loss\.type must be 'composed' or .*Did you mean 'composed'"),
    ],
)
def test_what_a_whole_loss_does_not_have_is_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        configured(option, file=WHOLE)


def test_a_whole_loss_that_is_wrong_after_the_first_step_refuses_more(monkeypatch):
    config = configured("--algorithm.steps_per_iteration=2", file=WHOLE)
    check_config(config, world_size=1, device_type="cpu")
    monkeypatch.setattr(importlib.import_module("my_parts").SquaredResidual, "is_on_policy_only", True)
    with pytest.raises(
        ConfigError, match=r'steps_per_iteration must be 1 with loss\.type = "my_parts:Squared'
    ):
        check_config(config, world_size=1, device_type="cpu")


def test_the_advantage_of_the_file_gives_the_page_s_numbers():
    advantage = build(configured().advantage)
    assert advantage([GroupRewards([1.0, 0.5, 0.0]), GroupRewards([2.0, 2.0, 5.0])]) == [1, 0, -1, 0, 0, 6]


def test_needs_follow_from_the_parts_and_a_group_of_two_is_refused():
    config = configured()
    needs = derive_needs(build(config.advantage), config.loss.build(), steps_per_iteration=1)
    assert needs == Needs(reference=True, smallest_group=3)
    with pytest.raises(ConfigError, match=r"sampling\.group_size must be at least 3 with advantage\.type"):
        check_composition(needs, group_size=2, advantage_type="my_parts:MedianBaseline")


@pytest.mark.parametrize(("text", "expected"), [("9", 1.0), ("7", 0.6), ("4", 0.0), ("x", 0.0), ("nan", 0.0)])
def test_the_reward_of_the_file_gives_the_page_s_number(text, expected):
    specs = [RewardSpec.from_table(table) for table in configured().reward]
    completion = Completion(
        request_id="a/0/0",
        token_ids=(1, 2),
        logprobs=(),
        finish_reason=FinishReason.STOP,
        policy_versions=((0, 0),),
    )
    prompt = Prompt(id="a", messages=(Message("user", "4+5="),), answer="9", metadata={})
    turn = Turn(prompt_token_ids=(1,), completion=completion, text=text)
    reward = WeightedSum(specs)(Rollout(prompt=prompt, sample_index=0, seed=1, turns=[turn]))
    assert reward.total == pytest.approx(expected)
    assert reward.parts == pytest.approx({"close": expected})


def test_a_preset_of_one_s_own_stands_in_the_place_of_a_name_and_the_file_goes_over_it():
    config = configured(
        "--algorithm.type",
        "my_parts:preset",
        "--advantage.type",
        "my_parts:MedianBaseline",
        "--advantage.scale",
        "3",
        file=str(ROOT / "train_configs/tiny_grpo.toml"),
    )
    assert type(config.loss.surrogate).__qualname__ == "WeightedRatio.Config"
    assert config.loss.surrogate.positive_weight == 0.1
    assert (config.advantage.scale, config.loss.kl.coefficient) == (3.0, 0.01)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--loss.surrogate.positive_wieght=1", r"loss\.surrogate\.positive_wieght must be a key"),
        ("--loss.surrogate.positive_weight=-1", r"loss\.surrogate\.positive_weight must be a number >= 0"),
        ("--advantage.type=my_parts:Nothing", r"advantage\.type must .*my_parts"),
    ],
)
def test_a_wrong_key_or_value_of_an_own_part_is_refused_by_its_name(option, message):
    with pytest.raises(ConfigError, match=message):
        configured(option)


def test_the_page_shows_what_the_files_say():
    sources = "".join(path.read_text() for path in sorted(EXAMPLES.glob("*.py")))
    assert len(blocks("python")) == 5
    # Methods are shown without the indentation of their class, so white space does not count.
    squeezed = "".join(sources.split())
    assert [block for block in blocks("python") if "".join(block.split()) not in squeezed] == []
    files = (("my_parts.toml", ("advantage", "loss", "reward")), ("my_loss.toml", ("loss",)))
    for shown, (name, tables) in zip(blocks("toml"), files, strict=True):
        document = tomllib.loads((EXAMPLES / name).read_text())
        assert tomllib.loads(shown) == {key: document[key] for key in tables}
