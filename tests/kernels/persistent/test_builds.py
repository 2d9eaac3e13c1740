"""What is built ahead of calls is what calls launch."""

import dataclasses
import importlib.machinery
import sys
import threading
import types

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent import dry_run, launches
from gatewise.kernels.persistent.launches import auxiliary, builds, forward_launch, launch_of

PROBLEM = Problem(8, 4, 64, 64, dtype=torch.bfloat16, needs_grad=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["forward", "backward"]),
        ({"needs_grad": False}, ["forward"]),
        ({"num_layers": 2}, ["stacked forward", "stacked backward"]),
        ({"num_layers": 3}, ["stacked forward", "forward", "stacked backward", "backward"]),
        ({"num_layers": 2, "bidirectional": True}, ["forward", "backward"]),
    ],
)
def test_each_pass_is_built_as_it_runs(monkeypatch, changes, expected):
    found = []
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, device: Device.named("h200")))

    def launch(name):
        return types.SimpleNamespace(compile=lambda: found.append(name))

    monkeypatch.setattr(builds, "forward_launch", lambda *given: launch("forward"))
    monkeypatch.setattr(builds, "backward_launch", lambda *given: launch("backward"))
    monkeypatch.setattr(builds, "pair_launch", lambda name, *given: launch(f"stacked {name}"))
    builds.build_launches(PROBLEM.replace(**changes), torch.device("cuda", 0))
    assert found == expected


def test_a_pass_is_compiled_when_it_is_first_launched(monkeypatch):
    compiled = []
    monkeypatch.setattr(toolchain, "compile_source", lambda source, *given: compiled.append(source.stem) or b"code")
    launch_of.cache_clear()
    launch = forward_launch(PROBLEM, 4, 1, False, Device.named("a100"))
    assert launch.tiling.units
    assert not compiled
    assert launch.binary == launch.binary == b"code"
    assert compiled == ["forward"]
    launch_of.cache_clear()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"needs_grad": False},
        {"num_layers": 2},
        {"num_layers": 3, "dtype": torch.float32, "allow_tf32": True},
        {"bidirectional": True, "layout": Layout.PACKED},
        {"num_layers": 2, "bidirectional": True, "time": 50, "batch": 128, "hidden_size": 256, "input_size": 512},
        {"lean": True, "time": 64, "batch": 32},
        {"resets": True},
    ],
    ids=str,
)
def test_what_is_built_ahead_is_what_a_call_launches(monkeypatch, changes):
    problem, device, asked = PROBLEM.replace(**changes), Device.named("h200"), []

    def recorded(function):
        def call(*given):
            asked.append(function(*given))
            return asked[-1]

        return call

    for name in ("forward_launch", "backward_launch", "pair_launch"):
        monkeypatch.setattr(launches, name, recorded(getattr(launches, name)))
    dry_run._memory_of.__wrapped__(problem, device)
    assert {launch.source for launch in asked} == {launch.source for launch in builds.launches_of(problem, device)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"layout": Layout.DEVICE_LENGTHS}, [("operands", 16, False)]),
        ({"resets": True, "dtype": torch.float32}, [("operands", 16, True)]),
        ({"layout": Layout.DEVICE_LENGTHS, "needs_grad": False}, []),
        ({"hidden_size": 650, "input_size": 200}, [("fit", 4, False)]),
        ({"hidden_size": 650, "layout": Layout.DEVICE_LENGTHS}, [("fit", 4, False), ("operands", 4, False)]),
        ({"input_size": 33}, [("fit", 2, False)]),
    ],
    ids=str,
)
def test_copies_are_built_for_the_sizes_of_the_call(changes, expected):
    found = builds.copies_of(PROBLEM.replace(**changes), Device.named("h200"))
    assert [(each.name, each.word, each.resets) for each in found] == expected


def test_a_copy_is_compiled_from_the_cache(monkeypatch):
    asked = []
    monkeypatch.setattr(toolchain, "compile_source", lambda *given: asked.append(given) or b"code")
    assert auxiliary.Copying("fit", 8, "sm_90").compile() == b"code"
    ((source, *others),) = asked
    assert (source.name, *others) == ("fit.cu", "sm_90", {"BYTES": 8, "RESETS": 0, "HALVES": 0, "AT_ONCE": 4})


def test_the_same_code_is_compiled_once_and_all_of_it_by_the_end():
    compiled, gate = [], threading.Event()

    def launch(source):
        def compile_pass():
            gate.wait(10)
            compiled.append(source)
            if source == "broken":
                raise RuntimeError("the compiler failed")
            return b""

        of_another = forward_launch(PROBLEM, 4, 1, False, Device.named("h200"))
        return dataclasses.replace(of_another, compile=compile_pass, source=(source,))

    with builds.building([launch(name) for name in ("a", "broken", "b", "a")], workers=3) as count:
        assert count == 3
        assert not compiled, "compilation does not keep the caller waiting"
        gate.set()
        while len(compiled) < 3:
            pass
    assert sorted(compiled) == ["a", "b", "broken"]


def test_compilations_that_have_not_begun_are_cancelled_at_the_end():
    begun = threading.Event()
    of_another = forward_launch(PROBLEM, 4, 1, False, Device.named("h200"))
    many = [dataclasses.replace(of_another, compile=begun.set, source=(number,)) for number in range(1000)]
    stop = threading.Event()
    first = dataclasses.replace(of_another, compile=lambda: stop.wait(10), source=("first",))
    with builds.building([first, *many], workers=1):
        timer = threading.Timer(0.05, stop.set)
        timer.start()
    assert not begun.is_set()


def test_two_threads_do_not_compile_the_same_code(monkeypatch, tmp_path):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    compiled, inside = [], threading.Barrier(2)

    def slowly(source, *given):
        compiled.append(source.stem)
        threading.Event().wait(0.05)
        return b"code", None

    monkeypatch.setattr(toolchain, "compile_afresh", slowly)
    found = []

    def ask():
        inside.wait(10)
        found.append(toolchain.compile_source(launches.SOURCES / "forward.cu", "sm_90", {"SIZE": 8}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"code", b"code"]
    assert compiled == ["forward"]


class _Sympy:
    """What finds sympy, as an empty module, and remembers the threads that import it."""

    def __init__(self):
        self.by = []

    def find_spec(self, name, path=None, target=None):
        if name != "sympy":
            return None
        self.by.append(threading.current_thread())
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        pass


def test_sympy_is_imported_by_the_thread_that_builds(monkeypatch):
    # Imported first by the threads that compile, sympy was once left without its attribute `core`.
    found = _Sympy()
    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [found, *sys.meta_path])
    with builds.building([]):
        assert found.by == [threading.current_thread()]
    monkeypatch.delitem(sys.modules, "sympy")  # the empty one
