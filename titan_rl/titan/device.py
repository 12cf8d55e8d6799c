"""Which device a run uses, and what TorchTitan 0.3.0 needs to run on a CPU with gloo.

On every device :func:`install` changes three things: masks of packed documents know branches, the ranks of a
restart meet under a name of their own, and gloo's groups have one thread. On a CPU it makes four more
adjustments, each named where it is made: the device module, FSDP's reduction, attention, and random
initialisation.
"""

import os
import resource
import sys
import types
import warnings

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common import decoder as titan_decoder
from torchtitan.protocols import module as titan_module
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan import attention, gloo, init, rendezvous
from titan_rl.titan.versions import check_versions

DEVICE_VARIABLE = "TITAN_RL_DEVICE"


def choose_device() -> str:
    """The device type of this process: ``"cuda"`` when torch sees a GPU, otherwise ``"cpu"``.

    ``TITAN_RL_DEVICE=cpu`` (or ``cuda``) in the environment decides instead.

    Raises:
        ConfigError: the variable asks for a device that is not there.
    """
    asked = os.environ.get(DEVICE_VARIABLE, "")
    available = "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("", "cpu", "cuda"):
        raise ConfigError(DEVICE_VARIABLE, "be cpu or cuda", asked, "Unset it to choose automatically.")
    if asked == "cuda" and available == "cpu":
        raise ConfigError(
            DEVICE_VARIABLE,
            "name a device that torch can use",
            asked,
            "torch.cuda.is_available() is False here: check the driver with nvidia-smi, or unset it.",
        )
    return asked or available


def install() -> str:
    """Prepare TorchTitan for this process's device. Call it before building a trainer; repeating is free.

    Returns:
        The device type, ``"cuda"`` or ``"cpu"``.
    """
    check_versions()
    rendezvous.install()
    gloo.install()
    device_type = choose_device()
    attention.install(titan_decoder)
    if device_type == "cpu" and titan_utils.device_type != "cpu":
        _use_cpu_device_module()
        _sum_gradients_without_premultiply()
        attention.install_on_cpu(titan_attention)
        init.install(titan_module)
        # TorchTitan's routers ask for fp32 in a form that a CPU does not have, and compute as the layers do.
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    return device_type


def peak_memory_bytes() -> int:
    """Peak memory of this process: of the GPU allocator on CUDA, resident set size on a CPU."""
    if titan_utils.device_type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_reserved()


class _CpuDeviceModule(types.ModuleType):
    """What TorchTitan asks of ``torch.cuda``, answered for a CPU; everything else is ``torch.cpu``'s."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: object = None) -> types.SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="CPU", total_memory=total)

    @staticmethod
    def current_device() -> int:
        # torch.cpu.current_device() is the string "cpu", which barrier(device_ids=[...]) refuses.
        return 0

    @staticmethod
    def device_count() -> int:
        # One device, so that every local rank maps to cpu:0.
        return 1

    @staticmethod
    def set_device(device: object = None) -> None:
        """There is only one."""

    @staticmethod
    def synchronize(device: object = None) -> None:
        """CPU work is synchronous."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU allocator keeps no cache."""

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The kernel's peak cannot be reset."""

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def _use_cpu_device_module() -> None:
    """Replace TorchTitan's device type and module, also where other modules copied them at import."""
    new = _CpuDeviceModule("titan_rl_cpu_device")
    old_module, old_type = titan_utils.device_module, titan_utils.device_type
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan") or module is None:
            continue
        if vars(module).get("device_module") is old_module:
            module.device_module = new  # type: ignore[attr-defined]
        if vars(module).get("device_type") == old_type:
            module.device_type = "cpu"  # type: ignore[attr-defined]
    titan_utils.device_type, titan_utils.device_module = "cpu", new  # pyrefly: ignore[bad-assignment]


def _sum_gradients_without_premultiply() -> None:
    """Make FSDP reduce with a plain SUM.

    TorchTitan sets FSDP's gradient division to 1.0, which FSDP turns into ``ReduceOp.PREMUL_SUM``; gloo
    has no such operation. A forced SUM is the same number.
    """
    original = titan_fsdp.disable_fsdp_gradient_division

    def disable_fsdp_gradient_division(model: torch.nn.Module) -> None:
        original(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    titan_fsdp.disable_fsdp_gradient_division = disable_fsdp_gradient_division
