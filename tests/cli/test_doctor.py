"""`gatewise doctor` on a healthy machine, on one with missing packages, and on broken ones."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from gatewise.cli import doctor, environment
from gatewise.kernels import ALL
from gatewise.kernels.eager import eager

ROOT = Path(__file__).parents[2]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


class Sick:
    """The eager kernel, with one part replaced."""

    def __init__(self, **parts):
        self._parts = parts

    def __getattr__(self, name):
        return self._parts.get(name) or getattr(eager, name)


def wrong(problem, inputs):
    result = eager.forward(problem, inputs)
    return result._replace(y=result.y * 1.01)


def crashing(problem, inputs):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_healthy_machine(gatewise):
    answer = gatewise("doctor")
    assert answer.status == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "\x1b" not in answer.out
    assert answer.out.splitlines()[-1] == "nothing is broken"
    for words in ("python", f"torch      {torch.__version__}", "devices", "  cpu        CPU with", "extras", "driver"):
        assert words in answer.out


@needs_no_gpu
def test_every_kernel_is_tested_or_says_why_not(gatewise):
    answer = gatewise("doctor")
    for name in ("aten", "eager"):
        (line,) = [line for line in answer.out.splitlines() if line.startswith(f"  cpu        {name} ")]
        assert "ok       float32" in line
    assert "  cpu        cudnn       refuses\n" in answer.out
    assert "device is CPU with" in answer.out


def test_the_json_has_everything(gatewise):
    data = json.loads(gatewise("doctor", "--json").out)
    assert data["versions"]["torch"] == torch.__version__
    tests = {(test["device"], test["kernel"]): test for test in data["tests"]}
    assert {kernel for device, kernel in tests if device == "cpu"} == {kernel.name for kernel in ALL}
    assert set(tests["cpu", "eager"]["passed"]) == {"float32", "bfloat16", "float16", "float64"}
    assert all(0 <= share <= 1 for share in tests["cpu", "eager"]["passed"].values())
    assert data["broken"] == []
    for test in data["tests"]:
        assert set(test["passed"]) | set(test["failed"]) | set(test["refused"]) == {
            "float32",
            "bfloat16",
            "float16",
            "float64",
        }


def test_without_the_self_test(gatewise):
    answer = gatewise("doctor", "--no-test", "--json")
    assert answer.status == 0
    assert json.loads(answer.out)["tests"] == []


@pytest.mark.parametrize(
    ("forward", "message"),
    [(wrong, "y: relative error 0.01"), (crashing, "RuntimeError: CUDA error: an illegal memory access")],
)
def test_a_kernel_that_computes_wrongly_or_not_at_all_is_broken(gatewise, monkeypatch, forward, message):
    monkeypatch.setattr(doctor, "ALL", (Sick(name="sick", forward=forward), eager))
    answer = gatewise("doctor")
    assert answer.status == 1
    assert "sick        FAILED in float32" in answer.out
    assert message in " ".join(answer.out.split())
    assert "  cpu        eager       ok" in answer.out
    assert "nothing is broken" not in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "sick on cpu in float32" in json.loads(gatewise("doctor", "--json").out)["broken"][0]


def installed(monkeypatch, **versions):
    """Change the versions that seem to be installed; None for a missing package."""
    real = environment.importlib.metadata.version

    def version(package):
        found = versions.get(package.replace("-", "_"), "")
        if found is None:
            raise environment.importlib.metadata.PackageNotFoundError(package)
        return found or real(package)

    monkeypatch.setattr(environment.importlib.metadata, "version", version)


def test_a_missing_extra_is_no_fault_and_its_command_is_given(gatewise, monkeypatch):
    installed(monkeypatch, cuda_core=None, nvidia_cuda_nvrtc=None)
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 0
    assert "  cuda       missing    CUDA kernels, compiled for the GPU of the machine" in answer.out
    assert "lacks cuda-core, nvidia-cuda-nvrtc. Run: pip install 'gatewise[cuda]'" in " ".join(answer.out.split())


def test_an_old_package_of_an_extra_that_is_missing_is_no_fault(gatewise, monkeypatch):
    installed(monkeypatch, cuda_core=None, cuda_bindings="12.9.4")  # as with PyTorch 2.10 for CUDA 12
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 0
    text = " ".join(answer.out.split())
    assert "lacks cuda-core, cuda-bindings (12.9.4). Run: pip install 'gatewise[cuda]'" in text
    assert "nothing is broken" in text


def test_a_package_that_is_too_old_is_broken(gatewise, monkeypatch):
    installed(monkeypatch, torch="2.5.1+cu121", tokenizers="0.19.9")
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 1
    text = " ".join(answer.out.split())
    assert "torch is 2.5.1+cu121, needed: 2.6 or newer. Run: pip install -U torch" in text
    assert "tokenizers is 0.19.9, needed for gatewise[train]: 0.20 or newer. Run: pip install 'gatewise[train]'" in text


@needs_no_gpu
def test_a_gpu_that_lies_idle_is_noted_and_one_that_cannot_be_used_is_broken(gatewise, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: (environment.Gpu("NVIDIA H200", "450.80"),))
    monkeypatch.setattr(torch.version, "cuda", None)
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 0
    assert "note: NVIDIA H200 is not used" in answer.out
    assert "pip install --force-reinstall torch --index-url" in " ".join(answer.out.split())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 1
    assert "PyTorch for CUDA 13.0 does not see NVIDIA H200: the driver 450.80 may be too old" in " ".join(
        answer.out.split()
    )


def test_the_drivers_table_is_read_and_its_absence_borne(monkeypatch):
    class Answer:
        stdout = "NVIDIA H200, 580.159.04\nNVIDIA H200, 580.159.04\n"

    monkeypatch.setattr(environment.subprocess, "run", lambda *words, **options: Answer)
    assert environment.gpus() == (environment.Gpu("NVIDIA H200", "580.159.04"),) * 2

    def absent(*words, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(environment.subprocess, "run", absent)
    assert environment.gpus() == ()


def test_settings_that_are_made_are_shown(gatewise, monkeypatch, tmp_path):
    assert "GATEWISE_CACHE" not in gatewise("doctor", "--no-test").out
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    assert json.loads(gatewise("doctor", "--no-test", "--json").out)["settings"] == {"GATEWISE_CACHE": str(tmp_path)}


@pytest.mark.parametrize("name", ["GATEWISE_KERNEL", "GATEWISE_POLICY"])
def test_a_setting_that_every_call_refuses_is_broken(gatewise, monkeypatch, name):
    monkeypatch.setenv(name, "fast")
    answer = gatewise("doctor", "--no-test")
    assert answer.status == 1
    assert f"`{name}` must be " in " ".join(answer.out.split())


def test_every_extra_says_what_it_adds():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert environment.ADDS.keys() == declared.keys() - {"dev"}, "a new extra wants its line in ADDS"
    found = {extra.name: [one.package for one in extra.requirements] for extra in environment.extras()}
    assert sorted(found["cuda"]) == ["cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"]  # a wheel has them sorted


def test_an_installation_without_its_sources_is_read_from_its_metadata(monkeypatch):
    lines = ["torch>=2.6", "numpy>=1.26", "cuda-core>=1.0; extra == 'cuda'", 'rich>=13 ; extra == "train"']
    monkeypatch.setattr(environment.importlib.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(environment.Path, "is_file", lambda path: False)
    assert [(one.package, one.least) for one in environment.core()] == [("torch", "2.6"), ("numpy", "1.26")]
    assert [(extra.name, extra.requirements[0].package) for extra in environment.extras()] == [
        ("cuda", "cuda-core"),
        ("train", "rich"),
    ]


@pytest.mark.parametrize(
    ("installed", "least", "too_old"),
    [
        ("2.6.0", "2.6", False),
        ("2.5.9", "2.6", True),
        ("2.13.0+cpu", "2.6", False),
        ("13.3.1", "13", False),
        ("0.9", "1.0", True),
        ("2.6.0rc1", "2.6", False),
        ("", "1.0", False),
        ("1.0", "", False),
    ],
)
def test_versions_are_compared_as_numbers(installed, least, too_old):
    assert environment.Requirement("a", least, installed).too_old is too_old


@pytest.mark.gpu
def test_a_gpu_is_tested_with_every_kernel(gatewise):
    answer = gatewise("doctor", "--json")
    assert answer.status == 0, answer.out
    data = json.loads(answer.out)
    assert data["versions"]["driver"]
    assert data["versions"]["cuda"]
    tests = {test["kernel"]: test for test in data["tests"] if test["device"] == "cuda:0"}
    assert set(tests["eager"]["passed"]) == {"float32", "bfloat16", "float16", "float64"}
    assert "float16" in tests["cudnn"]["passed"]
    if torch.cuda.get_device_capability() >= (8, 0) and data["extras"][0]["complete"]:
        assert {"bfloat16", "float16"} <= set(tests["persistent"]["passed"])
