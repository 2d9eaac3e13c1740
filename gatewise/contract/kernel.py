"""What every way of computing an LSTM offers: criteria, stated work, forward and backward as one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that does not exist yet.

    Attributes:
        shape: Its sizes.
        dtype: Its dtype.
        exact: False when a library decides the size and the shape is an estimate.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass does, in quantities that do not depend on how fast the device is.

    Attributes:
        matmul_flops: Floating-point operations in matrix products that libraries make, those of steps too; a
            multiply-add counts two.
        exact_flops: Of these, the ones in products that are not rounded to TF32 even where that is allowed.
        resident_flops: Floating-point operations in products that a resident kernel makes between two exchanges,
            counted as if every multiprocessor made as many as the busiest.
        bytes_moved: Bytes read from and written to device memory.
        cached_bytes: Bytes that multiprocessors read from and write to the second-level cache: weights that every step
            reads again, states that steps hand on.
        launches: Device kernels (on a CPU: parallel regions) that run one after another.
        replayed: Of these, the ones that the kernel recorded in CUDA graphs of its own, so that the CPU does not issue
            them.
        operators: PyTorch operators that the CPU issues from Python or C++, each with its dispatch.
        exchanges: Times that one resident kernel waits for data from another multiprocessor.
        workspace_bytes: The largest scratch memory alive at once, besides inputs, outputs and what is kept.
        held_bytes: Of it, what stays allocated between calls, so that only the first of them allocates it.
    """

    matmul_flops: float = 0.0
    exact_flops: float = 0.0
    resident_flops: float = 0.0
    bytes_moved: float = 0.0
    cached_bytes: float = 0.0
    launches: int = 0
    replayed: int = 0
    operators: int = 0
    exchanges: int = 0
    workspace_bytes: int = 0
    held_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Work done one after the other: sums, and the larger memory."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Work)}
        others = {name: getattr(other, name) for name in fields}
        return Work(
            **{
                name: max(value, others[name]) if name in ("workspace_bytes", "held_bytes") else value + others[name]
                for name, value in fields.items()
            }
        )


def read_again(count: float, times: float, device: Device) -> Work:
    """Return the work of reading the same bytes several times: from the second-level cache where it holds them.

    Args:
        count: The bytes, such as those of the recurrent weights.
        times: How often all of them are read.
        device: The device.
    """
    if count <= device.cache_bytes:
        return Work(cached_bytes=times * count)
    return Work(bytes_moved=times * count)


class Traces(NamedTuple):
    """The names by which a profile shows that a kernel ran: operators, as PyTorch records them, or GPU kernels.

    One of the names in a layer's pass is proof enough; no other kernel may leave any of them there.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass.
    """

    forward: frozenset[str]
    backward: frozenset[str]


class Kernel(Protocol):
    """One way to compute an LSTM, forward and backward.

    A kernel is a module-level object without state. `forward` and `backward` may assume that every criterion holds,
    that the layout is one of `layouts`, that shapes fit, and that autograd is off; they must leave every input as it
    was.
    """

    @property
    def name(self) -> str:
        """The name users write: `kernel="cudnn"`."""
        ...

    @property
    def summary(self) -> str:
        """One line for `explain`: what it is."""
        ...

    @property
    def layouts(self) -> frozenset[Layout]:
        """The layouts its `forward` takes; `functional` converts others to one of these."""
        ...

    @property
    def sets_up_in_captures(self) -> bool:
        """Whether its first call may come while a CUDA graph is captured.

        PyTorch's operators set up a library's handle in each thread that first calls it, autograd's too, where a
        capture forbids it.
        """
        ...

    @property
    def traces(self) -> Traces:
        """What it leaves in a profile; `gatewise.verify` holds a real call to it."""
        ...

    def single_use(self, problem: Problem) -> bool:
        """Whether `backward` consumes `Result.kept`, so that a second backward must repeat the forward."""
        ...

    def criteria(self) -> Sequence[Criterion]:
        """Every demand, in the order they are printed."""
        ...

    def algorithm(self, problem: Problem, device: Device) -> str:
        """Which of its own ways it takes for this problem, in a few words; may be empty."""
        ...

    def work(self, problem: Problem, device: Device) -> Work:
        """The work of the forward pass, and of the backward pass too when the problem needs a gradient."""
        ...

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """The tensors of `Result.kept`, in order; empty when the problem needs no gradient."""
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Compute the outputs and keep what backward needs."""
        ...

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        """Compute the outputs by operators that autograd records and differentiates itself, or return None.

        For kernels that are PyTorch's own: their graph costs less than a function around the explicit passes. Called
        with autograd on, instead of `forward` and `backward`, where nothing stands between the caller and the kernel;
        without masks: dropout is drawn as PyTorch draws it there.
        """
        ...

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Compute the gradients of the inputs from those of the outputs, without repeating the forward pass."""
        ...
