"""Combinations of algorithm and settings that make no sense are refused at start-up, with both keys named."""

import json
import shutil
from pathlib import Path

import pytest

from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError
from titan_rl.trainers.checks import check_config
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.validation import check_run

CONFIG = Path(__file__).parents[2] / "integration" / "configs" / "grpo.toml"
ASSETS = Path(__file__).parents[3] / "titan_rl" / "assets" / "tiny_llama"
PPO = ("algorithm.type", "ppo")
ALONE = ("sampling.group_size", 1)
TWO_STEPS = ("algorithm.steps_per_iteration", 2)


def check(monkeypatch, *overrides):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    arguments = [
        part
        for key, value in zip(overrides[::2], overrides[1::2], strict=True)
        for part in (f"--{key}", str(value))
    ]
    check_config(configure(*read_checked(str(CONFIG), arguments)), world_size=1, device_type="cpu")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "reinforce_pp_baseline"])
def test_an_advantage_within_groups_of_one_is_refused(monkeypatch, name):
    with pytest.raises(
        ConfigError, match=r"sampling\.group_size must be at least 2 with advantage\.type = .*; got 1"
    ):
        check(monkeypatch, "algorithm.type", name, *ALONE)


@pytest.mark.parametrize("iterations", [1, "all"])
def test_a_critic_may_warm_up_for_less_than_the_run_or_on_purpose_for_all_of_it(monkeypatch, iterations):
    check(monkeypatch, *PPO, *TWO_STEPS, "training.steps", 4, "critic.warmup_iterations", iterations)


def test_a_reward_model_of_another_tokenizer_is_refused_before_anything_starts(monkeypatch, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(ASSETS, export)
    check(monkeypatch, "reward_model.path", export)
    path = export / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"reward_model\.path must hold the tokenizer .*'7': \d+ for \d+"):
        check(monkeypatch, "reward_model.path", export)
    path.unlink()  # nothing to compare
    check(monkeypatch, "reward_model.path", export)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "remax"])
def test_what_compares_no_siblings_takes_groups_of_one(monkeypatch, name):
    check(monkeypatch, "algorithm.type", name, *ALONE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("critic.clip_range", 0.1),
            r'\[critic\] must be left out with advantage\.type = "group_normalized", which needs no critic',
        ),
        (
            (*PPO, "advantage.type", "returns", "critic.warmup_iterations", 2),
            r'\[critic\] must be left out with advantage\.type = "returns"',
        ),
        (
            (*PPO, *TWO_STEPS, "training.steps", 4, "critic.warmup_iterations", 2),
            r"critic\.warmup_iterations must be below the 2 iterations of training\.steps = 4, or the policy "
            r'is never trained; got 2\. Lower it, or set "all"',
        ),
        (
            ("loss.kl.estimator", "k1"),
            r'loss\.kl\.estimator must be "k2" or "k3" with loss\.kl\.placement = "loss"',
        ),
        (
            (*PPO, "loss.kl.placement", "loss"),
            r'loss\.kl\.estimator must be "k2" or "k3" with loss\.kl\.placement = "loss"',
        ),
        (
            ("loss.kl.coefficient", 0.0, "loss.kl.target", 0.1),
            r"loss\.kl\.coefficient must be above 0 with loss\.kl\.target",
        ),
        (
            ("loss.surrogate.clip_dual", 1.2),
            r"loss\.surrogate\.clip_dual must be 0, or above 1 \+ loss\.surrogate\.clip_high = 1\.2; got",
        ),
        (
            ("loss.rejection.type", "reject_tokens", "loss.rejection.low", 2.0),
            r"loss\.rejection\.low must be below high = 2\.0; got 2\.0",
        ),
        (
            ("loss.correction.type", "masked_tokens", "loss.correction.high", 0.5),
            r"loss\.correction\.low must be below high = 0\.5; got 0\.5",
        ),
        (
            ("loss.rejection.type", "masked_tokens", "loss.rejection.high", 0.5),
            r"loss\.rejection\.low must be below high = 0\.5; got 0\.5",
        ),
        (
            ("algorithm.type", "rloo", *TWO_STEPS),
            r'algorithm\.steps_per_iteration must be 1 with loss\.surrogate\.type = "reinforce", .*; got 2',
        ),
        (
            ("loss.surrogate.type", "reinforce", *TWO_STEPS),
            r'algorithm\.steps_per_iteration must be 1 with loss\.surrogate\.type = "reinforce"',
        ),
        (
            (*PPO, *ALONE, "refill.max_rounds", 3),
            r"refill\.max_rounds must be 0 with sampling\.group_size = 1, .*; got 3",
        ),
        (
            ("shaping.overlong_buffer_tokens", 5),
            r"shaping\.overlong_buffer_tokens must be at most sampling\.max_tokens = 4, .*; got 5",
        ),
        (
            ("algorithm.type", "on_policy_distillation"),
            r"\[teacher\] must be a table with loss\.distillation\.coefficient = 1\.0",
        ),
        (
            ("teacher.initial_load_path", "somewhere"),
            r"\[teacher\] must be left out with loss\.distillation\.coefficient = 0",
        ),
        (
            ("algorithm.type", "grpp"),
            r"algorithm\.type must be one of .*; got 'grpp'\. Did you mean 'grpo'\?",
        ),
        (
            ("data.prompts_per_iteration", 2, "algorithm.steps_per_iteration", 4),
            r"algorithm\.steps_per_iteration must be at most data\.prompts_per_iteration = 2; got 4",
        ),
    ],
)
def test_a_contradiction_names_both_keys(monkeypatch, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("shaping.reward_clip", 0.0), r"shaping\.reward_clip"),
        (("advantage.eps", 0.0), r"advantage\.eps"),
        ((*PPO, "advantage.lambda_policy", 1.5), r"advantage\.lambda_policy"),
        ((*PPO, "critic.clip_range", -0.1), r"critic\.clip_range"),
        (("loss.kl.horizon_samples", 0), r"loss\.kl\.horizon_samples"),
        (("refill.max_rounds", -1), r"refill\.max_rounds"),
        (("loss.entropy.coefficient", -0.1), r"loss\.entropy\.coefficient"),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(monkeypatch, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, *overrides)


def test_the_configuration_that_all_of_this_starts_from_is_sound(monkeypatch):
    check(monkeypatch)
    check(monkeypatch, *PPO, "critic.clip_range", 0.1, "loss.kl.target", 0.1)
    check(monkeypatch, "shaping.overlong_buffer_tokens", 4, "refill.max_rounds", 2)
    check(monkeypatch, "algorithm.type", "rloo", "loss.surrogate.type", "clipped", *TWO_STEPS)


FAULTS = CONFIG.parents[2] / "faults" / "configs"
OF_TRAINERS = {"rl": "grpo", "supervised": "sft", "preference": "dpo", "reward_model": "reward_model"}


def check_of(monkeypatch, trainer, *overrides):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    pairs = zip(overrides[::2], overrides[1::2], strict=True)
    arguments = [part for key, value in pairs for part in (f"--{key}", str(value))]
    document, found = read_checked(str(FAULTS / f"{OF_TRAINERS[trainer]}.toml"), arguments)
    assert found == trainer
    check_run(configure(document, trainer), trainer, world_size=1, opens_data=False)


@pytest.mark.parametrize("trainer", OF_TRAINERS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.gc_debug", "true"),
        ("training.enable_cpu_offload", "true"),
        ("profiler.enable_memory_snapshot", "true"),
        ("checkpoint.async_mode", "async_with_pinned_mem"),
    ],
)
def test_what_needs_an_accelerator_is_refused_on_a_cpu_by_every_trainer(monkeypatch, trainer, key, value):
    with pytest.raises(ConfigError, match=rf"^{key} must be .* on a CPU"):
        check_of(monkeypatch, trainer, key, value)


@pytest.mark.parametrize("trainer", OF_TRAINERS)
@pytest.mark.parametrize(
    ("key", "value"), [("checkpoint.load_step", 2), ("resilience.bad_step", "roll_back")]
)
def test_what_needs_checkpoints_is_refused_without_them(monkeypatch, trainer, key, value):
    check_of(monkeypatch, trainer, key, value)
    with pytest.raises(ConfigError, match=rf"^{key} must be .* with checkpoint\.enable = false"):
        check_of(monkeypatch, trainer, "checkpoint.enable", "false", key, value)


@pytest.mark.parametrize("trainer", OF_TRAINERS)
@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("checkpoint.interval", 0, "an integer >= 1"),
        ("checkpoint.load_step", -7, "an integer >= -1"),
        ("checkpoint.keep_latest_k", -1, "an integer >= 0"),
        ("metrics.log_freq", 0, "an integer >= 1"),
        ("training.max_norm", 0, "a number > 0"),
        ("training.gc_freq", 0, "an integer >= 1"),
        ("training.global_batch_size", -2, "an integer >= -1"),
        ("lr_scheduler.warmup_steps", -1, "an integer >= 0"),
        ("lr_scheduler.decay_ratio", 1.5, "a number >= 0 and <= 1"),
        ("lr_scheduler.min_lr_factor", -0.1, "a number >= 0 and <= 1"),
        ("comm.train_timeout_seconds", 0, "an integer >= 1"),
        ("profiler.profile_freq", 0, "an integer >= 1"),
        ("optimizer.betas", "[0.9, 1.5]", "a number >= 0 and < 1"),
        ("resilience.watchdog.train_seconds", -1, "a number >= 0"),
        ("resilience.spike_factor", -1, "a number >= 0"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name_before_torch(trainer, key, value, bound):
    with pytest.raises(ConfigError) as caught:
        read_checked(str(FAULTS / f"{OF_TRAINERS[trainer]}.toml"), [f"--{key}", str(value)])
    assert key in str(caught.value)
    assert bound in str(caught.value)


def test_a_rank_is_not_ended_while_it_may_wait_for_rollouts(monkeypatch):
    key = "resilience.watchdog.collective_seconds"
    check(monkeypatch, key, 3601)
    check(monkeypatch, key, 0)
    check(monkeypatch, "resilience.watchdog", "none")
    with pytest.raises(ConfigError, match=r"must be more than 2 x sampling\.timeout_seconds = 3600"):
        check(monkeypatch, key, 3600)
