"""The interface of a kernel: criteria, stated work, and a forward and backward pass that belong together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that does not exist yet.

    Attributes:
        shape: The sizes of the dimensions.
        dtype: The dtype of the elements.
        exact: False if a library determines the size and `shape` is an estimate.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = True

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a call, in quantities that do not depend on the speed of the device.

    Attributes:
        matmul_flops: The floating-point operations of matrix products that libraries compute, those of time steps
            included; a multiply-add counts as two.
        exact_flops: The part of `matmul_flops` in products that are not rounded to TF32 even where that is allowed.
        half_flops: The part of `matmul_flops` in products of float16 factors, in a problem that rounds to TF32.
        resident_flops: The floating-point operations of products that a persistent kernel computes between two
            exchanges, counted as if every multiprocessor did as many as the busiest one.
        bytes_moved: The bytes read from and written to device memory.
        cached_bytes: The bytes that multiprocessors read from and write to the second-level cache: weights that every
            step reads again, and states that are passed from step to step.
        launches: The number of device kernels (on a CPU: parallel regions) that run one after another.
        replayed: The part of `launches` that the kernel replays in CUDA graphs of its own, so that the CPU does not
            issue them.
        operators: The number of PyTorch operators that the CPU dispatches.
        exchanges: The number of times that a running device kernel waits for data from another multiprocessor.
        held_bytes: The part of the workspace that stays allocated between calls, so that only the first call allocates
            it.
    """

    matmul_flops: float = 0.0
    exact_flops: float = 0.0
    half_flops: float = 0.0
    resident_flops: float = 0.0
    bytes_moved: float = 0.0
    cached_bytes: float = 0.0
    launches: int = 0
    replayed: int = 0
    operators: int = 0
    exchanges: int = 0
    held_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Add up the work of two calls in sequence; the memory held is the larger of both."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Work)}
        others = {name: getattr(other, name) for name in fields}
        return Work(
            **{
                name: max(value, others[name]) if name == "held_bytes" else value + others[name]
                for name, value in fields.items()
            }
        )


def read_again(count: float, times: float, device: Device) -> Work:
    """Return the work of reading the same bytes several times: from the second-level cache where it holds them.

    Args:
        count: The bytes, such as those of the recurrent weights.
        times: The number of times that all of them are read.
        device: The device.
    """
    if count <= device.cache_bytes:
        return Work(cached_bytes=times * count)
    return Work(bytes_moved=times * count)


class Traces(NamedTuple):
    """The names of operators or GPU kernels that prove in a profile that a kernel ran.

    One of these names in a layer's pass is sufficient; no other kernel's pass contains any of them.

    Attributes:
        forward: The names in the forward pass.
        backward: The names in the backward pass.
    """

    forward: frozenset[str]
    backward: frozenset[str]


class Operator(Protocol):
    """A function that computes a whole call by operators of PyTorch, which autograd can record."""

    def __call__(
        self, x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, h_n and c_n.

        For a cell with the hidden state alone, c0 is not read, and c_n means nothing. Without h0 and c0, the states
        before the first step are those that the cell states.
        """
        ...


class Kernel(Protocol):
    """An implementation of a recurrent layer, with its forward and backward pass.

    A kernel is a module-level object without state. `forward` and `backward` may assume that all criteria are met, that
    the layout is one of `layouts`, that shapes fit, and that autograd is off; they must not modify their inputs.
    """

    @property
    def name(self) -> str:
        """The kernel's public name, as in `kernel="cudnn"`."""
        ...

    @property
    def summary(self) -> str:
        """A description of the kernel in one line, for `explain`."""
        ...

    @property
    def layouts(self) -> frozenset[Layout]:
        """The layouts that `forward` takes; `functional` converts other layouts to one of these."""
        ...

    @property
    def widens_gradients(self) -> bool:
        """Whether backward passes compute float32 gradients of 16-bit weights (`Problem.float32_gradients`).

        The weights of such a call are copies that autograd knows nothing of, so that `recorded` and `operator` must be
        None for it.
        """
        ...

    @property
    def traces(self) -> Traces:
        """The kernel's names in a profile, with which `gatewise.verify` compares a call."""
        ...

    def sets_up_in_captures(self, problem: Problem) -> bool:
        """Return whether the kernel's first call may happen while a CUDA graph is captured.

        The first call of a library in each thread creates a handle, and autograd has threads of its own. During a
        capture this is permitted in `forward` and `backward`, but not in what autograd records itself.
        """
        ...

    def single_use(self, problem: Problem) -> bool:
        """Return whether a backward pass consumes `Result.kept`, so that another one must repeat the forward pass."""
        ...

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        """Return the widths F of the factors [T * B, F] that a backward pass can leave to a receiver.

        See `gatewise.contract.token_factors`. The gradients are those of the input weights and the recurrent weights of
        each direction of one layer. Empty if the kernel computes the gradients of this problem itself in any case.
        """
        ...

    def criteria(self) -> Sequence[Criterion]:
        """Return all criteria, in the order in which they are printed."""
        ...

    def algorithm(self, problem: Problem, device: Device) -> str:
        """Return the algorithm that the kernel uses for this problem, in a few words; may be empty."""
        ...

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work of the forward pass, plus that of the backward pass if the problem needs gradients."""
        ...

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the tensors of `Result.kept`, in order; empty if the problem needs no gradient."""
        ...

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        """Return the peak size of the workspace: memory besides inputs, outputs, gradients and kept tensors.

        A choice by time does not ask for it.
        """
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Compute the outputs, and keep the tensors that the backward pass needs."""
        ...

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        """Compute the outputs with operators that autograd records and differentiates itself, or return None.

        This is for the kernels that are PyTorch's own, whose autograd graph costs less than a custom function around
        the explicit passes. It is called instead of `forward` and `backward` while autograd is on, if no conversion is
        needed between the caller's arguments and the kernel's. It takes no masks: these operators draw the dropout
        themselves, as PyTorch does.
        """
        ...

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        """Return the function that computes all calls of a problem from the caller's own tensors, or None.

        It is called instead of `recorded`, and of `forward` in calls without gradients, with autograd as the caller
        has it. It is looked up once for equal calls, so it depends on the problem and the device alone: it reads
        PyTorch's settings whenever it is called.
        """
        ...

    def in_graph(self, problem: Problem, device: Device) -> Operator | None:
        """Return the function that puts the calls of a problem into a graph of `torch.compile`, or None.

        The graph then has the operators that this function calls, instead of one that prepares the call and runs
        `forward` or `backward`, which takes longer than a small call on a CPU. The numbers of steps and of sequences in
        the problem are not those of the calls.
        """
        ...

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Compute the gradients of the inputs from those of the outputs, without repeating the forward pass."""
        ...
