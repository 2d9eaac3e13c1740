"""Launching Triton's functions, and compiling them before, with a stand-in for Triton."""

from __future__ import annotations

import functools
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gatewise.contract import triton_kernels
from gatewise.contract.triton_kernels import TritonFunction, launch, noted


class Program:
    """A stand-in for what `triton.jit` returns, which counts its compilations."""

    def __init__(self, *general: str) -> None:
        self.params = [SimpleNamespace(do_not_specialize=name in general) for name in ("x", "n", "y", "m")]
        self.compilations, self.launches = [], []
        self.waits = threading.Event()
        self.waits.set()

    def warmup(self, *arguments, grid, **options):
        assert self.waits.wait(10)
        self.compilations.append(options)
        return Compiled(self)


class Compiled:
    src, metadata = "source", "metadata"

    def __init__(self, program) -> None:
        self.program = program

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.program.launches.append((grid, arguments))


@pytest.fixture
def driver(monkeypatch):
    """Replace the parts of PyTorch and Triton that need a GPU; return the launchers that were built ahead."""
    known, turns, built = {}, {}, []
    monkeypatch.setattr(triton_kernels, "_compiled", lambda: known)
    monkeypatch.setattr(triton_kernels, "_turns", lambda: turns)
    monkeypatch.setattr(triton_kernels, "_start_driver", lambda: None)
    monkeypatch.setattr(triton_kernels, "_build_launcher", built.append)
    monkeypatch.setattr(TritonFunction, "takes_all", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return built


def test_a_function_is_compiled_once_for_what_triton_looks_at(driver):
    program = Program()
    function = TritonFunction(lambda: program)

    def run(*arguments, **constants):
        launch(function, (1,), arguments, num_warps=4, **constants)

    tensor = torch.zeros(64)
    for _ in range(2):
        run(tensor, 32, None, BT=4)
    run(torch.ones(8), 48, None, BT=4)  # another tensor as aligned, another multiple of 16
    assert len(program.compilations) == 1
    run(tensor, 33, None, BT=4)
    run(tensor, 1, None, BT=4)
    run(tensor[1:], 32, None, BT=4)
    run(tensor.half(), 32, None, BT=4)
    run(tensor, 32, tensor, BT=4)
    run(tensor, 32, None, BT=8)
    assert len(program.compilations) == 7
    assert program.launches[-1] == ((1, 1, 1), (tensor, 32, None, 8))


def test_values_that_triton_does_not_look_at_share_their_machine_code(driver):
    program = Program("n")
    function = TritonFunction(lambda: program)
    for n in (1, 16, 33):
        launch(function, (1,), (torch.zeros(64), n, None, 7), num_warps=4)
    assert len(program.compilations) == 1
    launch(function, (1,), (torch.zeros(64), 1 << 40, None, 7), num_warps=4)
    launch(function, (1,), (torch.zeros(64), 1, None, 16), num_warps=4)
    assert len(program.compilations) == 3


def test_what_is_remembered_does_not_grow_without_bound(driver, monkeypatch):
    monkeypatch.setattr(triton_kernels, "_MOST_COMPILED", 3)
    program = Program()
    function = TritonFunction(lambda: program)
    for steps in (1, 2, 4, 8, 16):
        launch(function, (1,), (torch.zeros(64),), num_warps=4, BT=steps)
        assert len(triton_kernels._compiled()) <= 3
    launch(function, (1,), (torch.zeros(64),), num_warps=4, BT=16)
    assert len(program.compilations) == 5


def test_a_noted_launch_is_compiled_for_the_launch_with_memory(driver):
    program = Program("n")
    function = TritonFunction(lambda: program)
    with noted() as found:
        launch(function, (1,), (torch.empty(64, device="meta"), 3), num_warps=4, maxnreg=128, BT=8)
    assert not program.compilations
    (each,) = found
    each.compile()
    assert program.compilations == [{"BT": 8, "num_warps": 4, "maxnreg": 128}]
    assert len(driver) == 1
    launch(function, (5,), (torch.zeros(8), 4), num_warps=4, maxnreg=128, BT=8)
    assert len(program.compilations) == len(program.launches) == 1
    launch(function, (5,), (torch.zeros(8), 4), num_warps=8, maxnreg=128, BT=8)
    assert len(program.compilations) == 2
    assert len(driver) == 1


def test_launches_are_executed_after_the_block_that_notes_them(driver):
    function = TritonFunction(Program)
    with pytest.raises(RuntimeError), noted() as found:
        raise RuntimeError
    launch(function, (1,), (torch.zeros(8),), num_warps=4)
    assert not found
    assert len(function.program.launches) == 1


def test_a_launch_waits_for_its_compilation_in_another_thread(driver):
    program = Program()
    function = TritonFunction(lambda: program)
    program.waits.clear()
    tensor = torch.zeros(8)
    with noted() as found:
        launch(function, (1,), (tensor,), num_warps=4)
    threads = [threading.Thread(target=found[0].compile)]
    threads.append(threading.Thread(target=launch, args=(function, (1,), (tensor,)), kwargs={"num_warps": 4}))
    for thread in threads:
        thread.start()
    assert not program.launches
    program.waits.set()
    for thread in threads:
        thread.join(10)
    assert len(program.compilations) == len(program.launches) == 1


def test_a_compilation_that_fails_fails_again_where_it_is_launched(driver):
    program = Program()
    program.warmup = lambda *arguments, **options: 1 / 0
    function = TritonFunction(lambda: program)
    with noted() as found:
        launch(function, (1,), (torch.zeros(8),), num_warps=4)
    for action in (found[0].compile, lambda: launch(function, (1,), (torch.zeros(8),), num_warps=4)):
        with pytest.raises(ZeroDivisionError):
            action()


def test_in_the_interpreter_nothing_is_compiled_ahead(driver, monkeypatch):
    monkeypatch.setattr(TritonFunction, "takes_all", False)
    with noted() as found:
        launch(TritonFunction(Program), (1,), (torch.zeros(8),), num_warps=4)
    assert found[0].compile() is None
    assert not found[0].function.program.compilations


class Triton:
    """A stand-in for the modules of Triton that find the GPU and the keys of its cache, which counts what they do."""

    def __init__(self, monkeypatch, home: str) -> None:
        self.hashed, self.versions = 0, 0
        modules = {name: ModuleType(name) for name in ("triton", "triton.compiler", "triton.compiler.compiler")}
        modules |= {name: ModuleType(name) for name in ("triton.runtime", "triton.runtime.cache")}
        modules["triton.compiler"].make_backend = lambda target: SimpleNamespace(hash=self.version)
        target = SimpleNamespace(get_current_target=lambda: "target")
        modules["triton.runtime"].driver = SimpleNamespace(active=target)
        if home:
            modules[home].triton_key = functools.lru_cache(self.hash_files)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def hash_files(self):
        time.sleep(0.05)
        self.hashed += 1

    def version(self):
        self.versions += 1


@pytest.mark.parametrize("home", ["triton.runtime.cache", "triton.compiler.compiler", ""])
def test_triton_hashes_its_files_once_for_all_threads(monkeypatch, home):
    turns, triton = {}, Triton(monkeypatch, home)
    monkeypatch.setattr(triton_kernels, "_turns", lambda: turns)
    threads = [threading.Thread(target=triton_kernels._start_driver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert triton.hashed == (1 if home else 0)
    assert triton.versions == 4
