"""What [lora] contradicts is refused before anything starts, with the key named; tools refuse the table."""

from pathlib import Path

import pytest

from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError
from titan_rl.tools.check import command as check_command
from titan_rl.tools.plan import command as plan_command
from titan_rl.trainers.checks import check_config
from titan_rl.trainers.configuration import configure

CONFIG = Path(__file__).parents[2] / "integration" / "configs" / "grpo.toml"
LORA = ("lora.rank", 4)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


def arguments(*overrides):
    pairs = zip(overrides[::2], overrides[1::2], strict=True)
    return [part for key, value in pairs for part in (f"--{key}", str(value))]


def check(*overrides, world_size=2, device_type="cpu"):
    document, trainer = read_checked(str(CONFIG), arguments(*LORA, *overrides))
    check_config(configure(document, trainer), world_size=world_size, device_type=device_type)


@pytest.mark.parametrize("push", ["merged", "adapter"])
def test_adapters_go_with_vllm_and_two_ranks_of_fsdp(push):
    check("generator.type", "vllm", "lora.push", push)


def test_replicas_and_a_kl_penalty_go_with_adapters():
    check("parallelism.data_parallel_replicate_degree", 2, "loss.kl.coefficient", 0.1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("parallelism.tensor_parallel_degree", 2),
            r"parallelism.tensor_parallel_degree must be 1 with \[lora\]",
        ),
        (
            ("parallelism.context_parallel_degree", 2, "training.seq_len", 512),
            r"parallelism.context_parallel_degree must be 1 with \[lora\]",
        ),
        (("algorithm.type", "ppo"), r"\[lora\] must be left out with an advantage that needs a critic"),
        (("lora.push", "adapter"), r'lora.push must be "merged" with another generator than vLLM'),
        (
            ("lora.push", "adapter", "generator.type", "vllm", "generator.tensor_parallel_degree", 2),
            r'generator.tensor_parallel_degree must be 1 with lora.push = "adapter"',
        ),
        (("lora.rank", 1000), r"lora.rank must be below"),
        (("lora.target_modules", '["q_proj"]'), r"TorchTitan's names of these are wq"),
        (("lora.alpha", 0), r"lora.alpha must be a number > 0"),
        (("lora.ranks", 4), r"lora.ranks.*rank"),
        (("reward_model.path", "x"), r"\[lora\] must be left out with \[reward_model\]"),
    ],
)
def test_what_adapters_contradict_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_an_offloaded_reference_is_refused_where_there_is_none():
    offload = ("reference.offload_to_cpu", "true", "loss.kl.coefficient", 0.1)
    with pytest.raises(ConfigError, match=r"reference.offload_to_cpu must be false with \[lora\]"):
        check(*offload, device_type="cuda")


def test_tools_that_would_take_it_for_another_run_refuse_the_table():
    document, trainer = read_checked(str(CONFIG), arguments(*LORA))
    with pytest.raises(ConfigError, match=r"\[lora\] must be left out to be planned"):
        plan_command.run(
            document, trainer, world_size=1, device_type="cpu", device_gib=None, prints_json=False
        )
    with pytest.raises(ConfigError, match=r"\[lora\] must be left out to be checked"):
        check_command.run(document, trainer, config_path=str(CONFIG), overrides=[])


@pytest.mark.parametrize("trainer", ["supervised", "preference", "reward_model"])
def test_other_trainers_do_not_take_the_table(tmp_path, trainer):
    path = tmp_path / "run.toml"
    path.write_text(f'trainer = "{trainer}"\n[lora]\nrank = 8\n')
    with pytest.raises(ConfigError, match="lora"):
        read_checked(str(path), [])
