"""Launching kernels in Triton's language, and compiling them before their first launch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_COMPILED = 1024  # compiled kernels that are remembered; those that are dropped remain in Triton's own cache

# The list to which launches are added instead of being executed; None outside of `noted` blocks.
_noted: ContextVar[list[TritonLaunch] | None] = ContextVar("gatewise_noted_triton_launches", default=None)


def float32_holds(*dtypes: torch.dtype) -> bool:
    """Return whether float32, in which most functions compute, holds all numbers of these dtypes."""
    return all(each.is_floating_point and each.itemsize <= 4 for each in dtypes)


class TritonFunction:
    """A function in Triton's language, which is imported when it is first launched or compiled.

    Triton takes up to a second to import, and comes with PyTorch's builds for GPUs alone.

    Args:
        load: A function that imports the Triton function and returns it.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @functools.cached_property
    def program(self) -> Any:
        """The function, as `triton.jit` returns it."""
        return self._load()

    @functools.cached_property
    def general(self) -> tuple[bool, ...]:
        """Whether the machine code is the same for all values of an argument, for each parameter in order."""
        return tuple([bool(each.do_not_specialize) for each in getattr(self.program, "params", ())])

    @functools.cached_property
    def takes_all(self) -> bool:
        """Whether the compiled form takes all arguments, as it does since Triton 3.3, other than in the interpreter."""
        import triton  # pyright: ignore[reportMissingImports]

        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        return version >= (3, 3) and isinstance(self.program, triton.JITFunction)


class TritonLaunch(NamedTuple):
    """A launch of a Triton function, as far as its machine code depends on it.

    Attributes:
        function: The function.
        arguments: All arguments except the compile-time constants, in order; tensors may be of the device "meta".
        constants: The compile-time constants by name, in order.
        warps: The number of warps of a program.
        registers: The maximum number of registers per thread; None for no limit.
    """

    function: TritonFunction
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int | None

    @property
    def source(self) -> Hashable:
        """The key of the machine code: equal for launches that differ only in what Triton does not look at."""
        properties = [
            _specialization(argument, general)
            for argument, general in itertools.zip_longest(self.arguments, self.function.general[: len(self.arguments)])
        ]
        return (self.function, self.warps, self.registers, *self.constants.values(), *properties)

    def compile(self) -> object:
        """Compile the function for the current device of this thread, or take it from Triton's cache on the disk.

        Another thread that launches the function waits for it. Nothing is loaded into the device's memory, because
        another thread may be capturing a CUDA graph.
        """
        return self._compiled(with_launcher=True) if self.function.takes_all else None

    def _compiled(self, *, with_launcher: bool = False) -> Any:
        key = (torch.cuda.current_device(), self.source)
        with _turns().setdefault(key, threading.Lock()):
            found = _compiled().get(key)
            if found is None:
                found = self._compile_afresh()
                if with_launcher:
                    _build_launcher(found)
                if len(_compiled()) >= _MOST_COMPILED:
                    _compiled().clear()
                    _turns().clear()
                _compiled()[key] = found
        return found

    def _compile_afresh(self) -> Any:
        _start_driver()
        options = {"num_warps": self.warps, "maxnreg": self.registers}
        return self.function.program.warmup(*self.arguments, grid=(1,), **self.constants, **options)


def launch(
    function: TritonFunction,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    *,
    num_warps: int,
    maxnreg: int | None = None,
    **constants: Any,
) -> None:
    """Launch a Triton function on the current stream, bypassing Triton's argument handling.

    Triton binds and looks up every argument by its name at each launch, which takes longer than all other work of a
    call. The lookup key used here is much cheaper.

    Args:
        function: The function.
        grid: The numbers of programs in each dimension of the grid.
        arguments: All arguments except the compile-time constants, in order.
        num_warps: The number of warps of a program.
        maxnreg: The maximum number of registers per thread; None for no limit.
        constants: The compile-time constants, in order.
    """
    this = TritonLaunch(function, arguments, constants, num_warps, maxnreg)
    noting = _noted.get()
    if noting is not None:
        noting.append(this)
        return
    if not function.takes_all:
        function.program[grid](*arguments, **constants, num_warps=num_warps, maxnreg=maxnreg)
        return
    device = torch.cuda.current_device()
    compiled = _compiled().get((device, this.source))
    if compiled is None:
        compiled = this._compiled()
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values(), stream=stream)


@contextlib.contextmanager
def noted() -> Iterator[list[TritonLaunch]]:
    """Add the launches in the block to the list that it yields, instead of executing them.

    The tensors of the calls in the block can be of the device "meta", so that a call can be followed without a GPU.
    """
    found: list[TritonLaunch] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def _specialization(argument: Any, general: bool | None) -> Any:
    """Return the properties on which Triton may specialise: dtype and alignment, being 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        if general:
            return argument < 2**31
        return 1 if argument == 1 else (argument % 16 == 0, argument < 2**31)
    return argument


@functools.cache
def _compiled() -> dict[Hashable, Any]:
    """Return the compiled functions, by device and source."""
    return {}


@functools.cache
def _turns() -> dict[Hashable, threading.Lock]:
    """Return the lock of each compilation, so that one thread compiles and the others wait for it."""
    return {}


def _start_driver() -> None:
    """Let Triton find the GPU, for which it compiles C code when it has not done so before on this machine.

    It also hashes its own files, of hundreds of megabytes, for the keys of its cache, and asks the assembler for its
    version. It remembers both, but threads that compile their first kernels at the same time would each do the work.
    """
    from triton.compiler import make_backend  # pyright: ignore[reportMissingImports]
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    with _turns().setdefault("driver", threading.Lock()):
        make_backend(driver.active.get_current_target()).hash()
        hash_files = _triton_key()
        if hash_files is not None:
            hash_files()


def _triton_key() -> Callable[[], object] | None:
    """Return the function of Triton that hashes its files; None for a version in which it has another name."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):  # of Triton 3.6, and of older ones
        if found := getattr(importlib.import_module(module), "triton_key", None):
            return found
    return None


def _build_launcher(compiled: Any) -> None:
    """Let Triton compile the C code that launches a kernel, as it does at the first launch otherwise."""
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    # The class is part of Triton's interface for backends; without it, the first launch takes longer.
    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:
        launcher(compiled.src, compiled.metadata)
