"""The forward and backward pass of a kernel on sequences as the caller laid them out.

Around the kernel's own pass, sequences are converted to a layout that the kernel reads, autocast is switched off, and
the work of a first call is permitted during CUDA graph capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from gatewise.contract.kernel import Kernel
from gatewise.contract.masks import mask_specs
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.functional.packing import conversion
from gatewise.selection import REFERENCE, differentiable

_NOTHING = contextlib.nullcontext()
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Passes(Protocol):
    """The passes of a kernel, whose own object is one of these."""

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Compute the outputs and keep what the backward pass needs."""
        ...

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        """Compute the outputs by operators that autograd records, or return None."""
        ...

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Compute the gradients of the inputs from the result of `forward`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Guarded:
    """The passes of a kernel with the layout converted, autocast switched off, and first calls permitted in captures.

    Attributes:
        kernel: The kernel.
    """

    kernel: Kernel

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Run the kernel's forward pass in a layout that it reads."""
        between = conversion(problem, inputs, self.kernel.layouts)
        with _around(problem, inputs.x):
            if between is None:
                return self.kernel.forward(problem, inputs)
            return between.result_out(self.kernel.forward(between.problem(problem), between.inputs(inputs)), inputs)

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        """Run the kernel's recorded forward pass, with the layout converted by operators that autograd records."""
        between = conversion(problem, inputs, self.kernel.layouts)
        with _around(problem, inputs.x):
            if between is None:
                return self.kernel.recorded(problem, inputs)
            found = self.kernel.recorded(between.problem(problem), between.inputs(inputs))
            return None if found is None else between.result_out(found, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Run the kernel's backward pass on the result of its own forward pass."""
        between = conversion(problem, inputs, self.kernel.layouts)
        with _around(problem, inputs.x):
            if between is None:
                return self.kernel.backward(problem, inputs, result, gradients, needs)
            found = self.kernel.backward(
                between.problem(problem),
                between.inputs(inputs),
                between.result_in(result),
                between.gradients_in(gradients),
                needs,
            )
        return between.gradients_out(found, gradients)


class PlainPyTorch:
    """The reference's passes by PyTorch operators that `torch.func` transforms one by one; it keeps nothing."""

    # Operators of compiled graphs and the explicit passes call these, in any layout.
    forward = staticmethod(Guarded(REFERENCE).forward)
    backward = staticmethod(Guarded(REFERENCE).backward)

    def recorded(self, problem: Problem, inputs: Inputs) -> Result:
        """Compute the outputs, with dropout masks drawn where there are none."""
        with _around(problem, inputs.x):
            return in_plain_pytorch(problem, with_masks(problem, inputs))


def in_plain_pytorch(problem: Problem, inputs: Inputs) -> Result:
    """Run the reference's forward pass by PyTorch operators that autograd and `torch.func` see one by one."""
    between = conversion(problem, inputs, REFERENCE.layouts)
    if between is None:
        return differentiable(problem, inputs)
    return between.result_out(differentiable(between.problem(problem), between.inputs(inputs)), inputs)


def with_masks(problem: Problem, inputs: Inputs) -> Inputs:
    """Return the inputs with masks drawn from PyTorch's generator.

    They are those of dropout, one for each gap between layers, and those of a regularised cell.
    """
    specs, device = mask_specs(problem, inputs.x.shape[:-1], inputs.h0.shape), inputs.x.device
    # torch.func.vmap takes no random function that works in place.
    masks = [torch.bernoulli(torch.empty(shape, dtype=torch.bool, device=device), share) for shape, share in specs]
    return inputs._replace(masks=tuple(masks))


@contextlib.contextmanager
def first_calls_permitted() -> Iterator[None]:
    """Permit the calling thread to load code and reserve memory during CUDA graph capture, as kernels do on first use.

    The calls that warmed up the capture may have run other kernels than the captured one. Loaded code and reserved
    memory are not part of the graph. Nothing changes for other threads, nor without a CUDA driver.
    """
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    # Loaded by ctypes: PyTorch's own kernels initialise themselves too, where the extra `cuda` is not installed.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, or one of another file name: first calls must then precede the capture
        return None


def _around(problem: Problem, x: Tensor) -> contextlib.AbstractContextManager:
    return _captured(x) if problem.captured else without_autocast(x)


@contextlib.contextmanager
def _captured(x: Tensor) -> Iterator[None]:
    with first_calls_permitted(), without_autocast(x):
        yield


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Return a context without autocast on the device of x."""
    # The inputs have their dtype already; autocast must not convert the operands of a kernel once more.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return _NOTHING
