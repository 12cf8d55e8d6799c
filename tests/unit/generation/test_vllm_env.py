"""What is settled before vLLM starts, and what it must not change; vLLM itself is not imported here."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from titan_rl.errors import ConfigError
from titan_rl.generation.protocol import GeneratorContext
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.generation.vllm_env import preserved_random_state, preserved_threads, set_vllm_environment

CONTEXT = GeneratorContext(
    model_dir="",
    model_config=None,
    adapter=None,
    max_model_len=64,
    dtype="float32",
    seed=0,
    device_type="cpu",
    run_threads=1,
)


@pytest.fixture
def torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_random_draws_go_on_as_if_nothing_had_been_drawn_in_between() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    with preserved_random_state():
        random.seed(9), np.random.seed(9), torch.manual_seed(9)
        assert draw() not in undisturbed
    assert [first, draw()] == undisturbed


def test_random_state_comes_back_after_an_error() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)

    def disturb() -> None:
        with preserved_random_state():
            torch.manual_seed(9)
            raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        disturb()
    assert torch.rand(()) == expected


def test_thread_count_and_the_function_that_sets_it_come_back() -> None:
    before, function = torch.get_num_threads(), torch.set_num_threads
    with preserved_threads(before):
        torch.set_num_threads(before + 1)
        torch.set_num_threads = lambda count: None
    assert torch.set_num_threads is function
    assert torch.get_num_threads() == before


def test_environment_keeps_what_the_user_chose_and_sets_what_must_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_vllm_environment(run_threads=3)
    names = ("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")
    assert [os.environ[name] for name in names] == ["DEBUG", "0", "3"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_without_torchrun_the_remedy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"got no RANK\. Start with torchrun"):
        VllmGenerator(VllmGenerator.Config(), CONTEXT)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree must divide the 3 ranks"),
        ({"tensor_parallel_degree": 3}, "agree must be given"),
        ({"block_size": 16}, "block_size must be a multiple of 32 on CPU; got 16"),
    ],
)
@pytest.mark.usefixtures("torchrun_environment")
def test_contradictions_are_found_before_the_engine_starts(config: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmGenerator(VllmGenerator.Config(**config), CONTEXT)


def test_a_generator_group_over_two_machines_is_refused_on_a_cpu(
    torchrun_environment: pytest.MonkeyPatch,
) -> None:
    torchrun_environment.setenv("WORLD_SIZE", "4")
    torchrun_environment.setenv("LOCAL_WORLD_SIZE", "2")
    context = dataclasses.replace(CONTEXT, agree=lambda flag: flag)
    with pytest.raises(ConfigError, match=r"must divide the 2 ranks of each machine on CPU; got 4\."):
        VllmGenerator(VllmGenerator.Config(tensor_parallel_degree=4), context)


def test_configuration_can_be_read_without_importing_vllm() -> None:
    code = "import sys, titan_rl.generation.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
