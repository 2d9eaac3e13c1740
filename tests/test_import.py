"""What `import gatewise` costs and brings: little, and exactly the public names, each documented."""

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


def in_new_process(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_import_brings_no_heavy_module_and_starts_no_cuda() -> None:
    # What torch itself loads is not our doing.
    program = f"""
import json, sys, torch
before = set(sys.modules)
import gatewise
heavy = {{name.partition(".")[0] for name in set(sys.modules) - before}} & set({HEAVY!r})
print(json.dumps([sorted(heavy), torch.cuda.is_initialized()]))
"""
    heavy, initialised = json.loads(in_new_process(program))
    assert heavy == []
    assert not initialised


def test_import_costs_little(record_property: Callable[[str, object], None]) -> None:
    # The time is a report (`pytest --junit-xml`). What is asserted is what is loaded, busy machine or not.
    program = """
import json, sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import gatewise
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(n for n in set(sys.modules) - before if n.partition(".")[0] != "gatewise")]))
"""
    seconds, others = json.loads(in_new_process(program))
    record_property("seconds_on_top_of_torch", seconds)
    assert others == [], "modules that torch alone would not have loaded"


def test_attention_is_there_and_loaded_when_it_is_used() -> None:
    program = """
import sys, gatewise
loaded = "gatewise.attention" in sys.modules
print(loaded, gatewise.attention.attend.__name__, gatewise.nn.Attention.__name__, hasattr(gatewise, "atention"))
"""
    assert in_new_process(program).split() == ["False", "attend", "Attention", "False"]


def test_public_names_are_the_declared_ones() -> None:
    program = "import json, gatewise; print(json.dumps([n for n in vars(gatewise) if not n.startswith('_')]))"
    bound = set(json.loads(in_new_process(program)))
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
AS_IN = re.compile(r"Args: as in `(?:gatewise\.attention\.)?attend`")


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
