"""The cost of `import gatewise`, and its public names, all of them documented."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import gatewise

HEAVY = ("triton", "cuda", "typer", "rich", "tokenizers", "safetensors", "tensorboard", "matplotlib", "keras", "h5py")


# Each step finds what the steps before it left; torch is first, because what it loads is not our doing. Looking for
# garbage would take a fifth of the time: imports leave none.
PROGRAM = """
import gc
gc.disable()
import json, sys, time, torch
found, before, start = {}, set(sys.modules), time.perf_counter()
import gatewise
found["seconds"] = time.perf_counter() - start
found["loaded"] = sorted(set(sys.modules) - before)
found["cuda"] = torch.cuda.is_initialized()
found["bound"] = [name for name in vars(gatewise) if not name.startswith("_")]
import gatewise.kernels.persistent.kernel, gatewise.kernels.stepwise
found["with kernels"] = sorted(set(sys.modules) - before)
found["attention"] = [gatewise.attention.attend.__name__, gatewise.nn.Attention.__name__, hasattr(gatewise, "atention")]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """The findings of a separate process while it imported the package, which takes seconds."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_import_brings_no_heavy_module_and_starts_no_cuda(found) -> None:
    assert not {name.partition(".")[0] for name in found["loaded"]} & set(HEAVY)
    assert not found["cuda"]


def test_import_costs_little(found, record_property: Callable[[str, object], None]) -> None:
    # The time is only reported (`pytest --junit-xml`). The assertions are about imported modules, on any machine.
    record_property("seconds_on_top_of_torch", found["seconds"])
    others = [name for name in found["loaded"] if name.partition(".")[0] != "gatewise"]
    assert others == [], "modules that torch alone would not have loaded"


def test_importing_our_kernels_loads_no_compiler(found) -> None:
    assert {"gatewise.kernels.persistent.kernel", "gatewise.kernels.stepwise"} <= set(found["with kernels"])
    assert not {"cuda.core", "gatewise.kernels.cuda.driver"} & set(found["with kernels"])


def test_attention_is_there_and_loaded_when_it_is_used(found) -> None:
    assert "gatewise.attention" not in found["loaded"]
    assert found["attention"] == ["attend", "Attention", False]


def test_public_names_are_the_declared_ones(found) -> None:
    bound = set(found["bound"])
    submodules = {name for name in bound if inspect.ismodule(getattr(gatewise, name))}
    assert bound - submodules <= set(gatewise.__all__)
    assert all(hasattr(gatewise, name) for name in gatewise.__all__)
    assert len(gatewise.__all__) == len(set(gatewise.__all__))


PACKAGES = ("", ".functional", ".nn", ".attention", ".models", ".data", ".training", ".planning", ".testing")
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (importlib.import_module(f"gatewise{package}") for package in PACKAGES)
    for name in module.__all__
    if callable(getattr(module, name))
}
AS_IN = re.compile(r"Args: The same as for `(?:gatewise\.attention\.)?attend`")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name: str) -> None:
    public = PUBLIC[name]
    text = public.__doc__
    assert text, f"{name} has no docstring"
    assert text.strip().splitlines()[0].endswith((".", ":")), f"{name}: the first line must be a sentence"
    if inspect.isfunction(public) or (inspect.isclass(public) and issubclass(public, torch.nn.Module)):
        signature = inspect.signature(public)
        named = set(re.findall(r"^ +\*{0,2}(\w+)(?: \(.*\))?: ", text, flags=re.MULTILINE))
        if AS_IN.search(text):
            named |= set(inspect.signature(gatewise.attention.attend).parameters)
        assert set(signature.parameters) <= named, f"{name}: `Args` must name every parameter"
    if inspect.isfunction(public):
        returns_nothing = str(signature.return_annotation) in ("None", "Iterator[None]")
        assert returns_nothing or re.search(r"Returns:|Yields:|\AReturn ", text), f"{name}: what it returns"
