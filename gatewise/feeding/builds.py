"""The CUDA sources that a decoder with input feeding compiles for a call, known before the call."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from gatewise.attention import explain
from gatewise.attention.call import Needs
from gatewise.attention.fused.builds import launches
from gatewise.contract.device import Device
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.derivation.device import DeviceCode, device_code
from gatewise.feeding import elementwise_kernels, fused_attention
from gatewise.feeding.choice import choose
from gatewise.feeding.kernel import Kernel
from gatewise.feeding.problem import Problem
from gatewise.kernels.cuda import toolchain


class Compilation(NamedTuple):
    """A source to compile.

    Attributes:
        file: The file.
        architecture: The architecture.
        macros: The template parameters.
        code: The code of a cell that the source includes; None if it includes none.
    """

    file: Path
    architecture: str
    macros: tuple[tuple[str, int], ...]
    code: DeviceCode | None

    @property
    def source(self) -> Compilation:
        """The key of the machine code."""
        return self

    def compile(self) -> bytes:
        """Compile the source, or take it from the cache on the disk."""
        return toolchain.compile_source(self.file, self.architecture, dict(self.macros), self.code)


def compilations(problem: Problem, device: Device) -> list[Compilation | TritonLaunch]:
    """Return the kernels that a call with contiguous keys and values compiles; none for PyTorch's operators."""
    kernel = choose(problem, device)
    return [
        *(_compilations(kernel, problem, device) if kernel.name == "fused" else ()),
        *_launches(kernel, problem, device),
    ]


def _compilations(kernel: Kernel, problem: Problem, device: Device) -> list[Compilation]:
    """Return the CUDA kernels of the kernel "fused"."""
    halves = kernel.halves(problem, device)
    width = elementwise_kernels.width_of(
        problem.batch, problem.units, problem.features, problem.dtype, device.multiprocessors
    )
    macros = elementwise_kernels.macros_of(problem.dtype, width, halves)
    code = device_code(elementwise_kernels.CELL)
    found = [Compilation(elementwise_kernels.SOURCE, device.architecture, macros, code)]
    if kernel.attends_at_once(problem, device):
        operand = (torch.float16 if halves else problem.dtype).itemsize
        width = math.gcd(fused_attention.VECTOR_BYTES // operand, problem.features, problem.value_size)
        widest = max(problem.features, problem.units)
        macros = fused_attention.macros(problem.dtype, width, widest, operand, halves=halves)
        found.append(Compilation(fused_attention.SOURCE, device.architecture, macros, None))
    return found


def _launches(kernel: Kernel, problem: Problem, device: Device) -> list[TritonLaunch]:
    """Return the Triton kernels of attention."""
    of_all = problem.attention
    if explain(of_all, device, problem.attention_kernel).chosen != "fused":
        return []
    found = []
    if not kernel.attends_at_once(problem, device):
        found = launches(of_all.replace(steps=1), needs=Needs(query=True, source=False))
    if problem.needs_grad:
        found += launches(of_all, forward=False, needs=Needs(query=False, source=True))
    return found
