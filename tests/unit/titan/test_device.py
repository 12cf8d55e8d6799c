"""The device of a process, and TorchTitan prepared for a CPU."""

import sys
from importlib import metadata

import pytest
import torch
import torchtitan.components.metrics
import torchtitan.distributed.utils
import torchtitan.trainer
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel_attention
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.metrics import DeviceMemoryMonitor
from torchtitan.distributed import fsdp
from torchtitan.models.common import attention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.tools import utils

from titan_rl.errors import ConfigError
from titan_rl.titan import device, versions


@pytest.fixture
def has_gpu(monkeypatch):
    return lambda answer: monkeypatch.setattr(torch.cuda, "is_available", lambda: answer)


@pytest.mark.parametrize(
    ("asked", "gpu", "chosen"),
    [
        (None, False, "cpu"),
        (None, True, "cuda"),
        ("", True, "cuda"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_the_device_is_the_gpu_unless_the_variable_decides(monkeypatch, has_gpu, asked, gpu, chosen):
    has_gpu(gpu)
    monkeypatch.delenv("TITAN_RL_DEVICE", raising=False)
    if asked is not None:
        monkeypatch.setenv("TITAN_RL_DEVICE", asked)
    assert device.choose_device() == chosen


@pytest.mark.parametrize(
    ("asked", "shown"),
    [("tpu", "TITAN_RL_DEVICE must be cpu or cuda; got 'tpu'"), ("cuda", "name a device that torch can use")],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, has_gpu, asked, shown):
    has_gpu(False)
    monkeypatch.setenv("TITAN_RL_DEVICE", asked)
    with pytest.raises(ConfigError, match=shown):
        device.choose_device()


def replaced() -> list[object]:
    return [
        utils.device_module,
        fsdp.disable_fsdp_gradient_division,
        attention._compiled_create_block_mask,
        context_parallel_attention._compiled_create_block_mask,
        Decoder._create_flex_attention_mask_for_document,
        Module._init_self_parameters,
    ]


def test_installing_again_changes_nothing():
    assert device.install() == "cpu"
    first = replaced()
    assert device.install() == "cpu"
    assert all(a is b for a, b in zip(first, replaced(), strict=True))
    assert attention._compiled_create_block_mask is create_block_mask
    assert context_parallel_attention._compiled_create_block_mask is create_block_mask


def test_every_module_of_torchtitan_sees_the_cpu(monkeypatch):
    device.install()
    stale = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torchtitan")
        and module is not None
        and (
            vars(module).get("device_type", "cpu") != "cpu"
            or vars(module).get("device_module", utils.device_module) is not utils.device_module
        )
    ]
    assert stale == []
    assert torchtitan.distributed.utils.device_type == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert utils.get_local_device() == torch.device("cpu", 0)  # all local ranks share it


def test_the_memory_monitor_of_torchtitan_runs_on_a_cpu():
    device.install()
    monitor = torchtitan.components.metrics.build_device_memory_monitor()
    assert isinstance(monitor, DeviceMemoryMonitor)
    kept = bytearray(64 * 2**20)
    kept[::4096] = b"x" * len(kept[::4096])
    peak = monitor.get_peak_stats()
    assert peak.max_reserved_gib * 2**30 >= len(kept)
    assert 0 < peak.max_reserved_pct < 100
    assert (peak.num_alloc_retries, peak.num_ooms) == (0, 0)


def test_what_torchtitan_asks_of_its_device_has_an_answer():
    device.install()
    module = utils.device_module
    module.set_device(torch.device("cpu:0"))
    module.synchronize()
    module.empty_cache()
    module.reset_peak_memory_stats()
    assert (module.current_device(), module.device_count(), module.get_device_name()) == (0, 1, "CPU")
    assert module.get_device_properties().total_memory > 2**28
    assert module.is_available is torch.cpu.is_available  # everything else is torch.cpu's


def test_peak_memory_never_falls_and_counts_what_is_touched():
    device.install()
    before = device.peak_memory_bytes()
    wanted = before + 32 * 2**20
    kept = []
    while device.peak_memory_bytes() < wanted and len(kept) < 200:
        kept.append(torch.ones(16 * 2**20 // 4))
    assert device.peak_memory_bytes() >= wanted
    peak = device.peak_memory_bytes()
    kept.clear()
    assert device.peak_memory_bytes() >= peak


def test_the_installed_versions_are_those_that_are_wanted():
    versions.check_versions()


@pytest.mark.parametrize(
    ("package", "version", "shown"),
    [
        ("torchtitan", "0.4.0", "torchtitan must be version 0.3.0; got '0.4.0'"),
        ("torchtitan", None, "torchtitan must be version 0.3.0; got not installed"),
        ("torch", "2.13.0", "torch must be of the 2.14 series"),
        ("torch", "2.140.0", "torch must be of the 2.14 series"),
    ],
)
def test_another_version_is_refused_and_the_remedy_is_a_command(monkeypatch, package, version, shown):
    real = metadata.version

    def version_of(name):
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(versions.metadata, "version", version_of)
    with pytest.raises(ConfigError) as caught:
        versions.check_versions()
    assert shown in str(caught.value)
    assert "pip install" in str(caught.value)
