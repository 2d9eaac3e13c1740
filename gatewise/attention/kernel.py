"""What every way of computing attention offers: criteria, stated work, forward and backward as one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from gatewise.attention.call import ALL, Gradients, Inputs, Needs, Result
from gatewise.attention.problem import Problem
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a call does, in quantities that do not depend on how fast the device is.

    Attributes:
        matmul_flops: Floating-point operations in matrix products; a multiply-add counts two.
        tanhs: Results of the special function units: as many for each hyperbolic tangent as the kernel takes.
        bytes_moved: Bytes read from and written to device memory.
        launches: Device kernels that run one after another.
        operators: PyTorch operators (and Triton launches) that the CPU issues.
        workspace_bytes: The largest scratch memory alive at once, besides inputs, outputs and what is kept.
    """

    matmul_flops: float = 0.0
    tanhs: float = 0.0
    bytes_moved: float = 0.0
    launches: int = 0
    operators: int = 0
    workspace_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Work done one after the other: sums, and the larger workspace."""
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.tanhs + other.tanhs,
            self.bytes_moved + other.bytes_moved,
            self.launches + other.launches,
            self.operators + other.operators,
            max(self.workspace_bytes, other.workspace_bytes),
        )


class Kernel(Protocol):
    """One way to compute attention, forward and backward.

    A kernel is a module-level object without state. It may assume that every criterion holds, that shapes fit, that no
    size is zero, that the score is additive or dot (the weight of the general score is multiplied outside), and that
    autograd is off; it must leave every input as it was, and must not look at keys and values beyond a length.
    """

    @property
    def name(self) -> str:
        """The name users write: `kernel="fused"`."""
        ...

    @property
    def summary(self) -> str:
        """One line for `explain`: what it is."""
        ...

    def criteria(self) -> Sequence[Criterion]:
        """Every demand, in the order they are printed."""
        ...

    def work(self, problem: Problem, device: Device) -> Work:
        """The work of the forward pass, and of the backward pass too when the problem needs a gradient."""
        ...

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """The tensors of `Result.kept`, in order, each with T as its first size; empty without a gradient."""
        ...

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Compute the context and keep what backward needs.

        Args:
            problem: What is computed.
            inputs: Of what.
            need_weights: Whether the weights are returned; not with `out`.
            out: Tensors to write context and kept into, for instance one step of those of a whole sequence.
        """
        ...

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        result: Result,
        dcontext: Tensor,
        dweights: Tensor | None,
        into: Gradients | None = None,
        *,
        needs: Needs = ALL,
        dquery: Tensor | None = None,
    ) -> Gradients:
        """Compute the gradients of all inputs, or of the query or the source alone.

        Args:
            problem: As in `forward`.
            inputs: As in `forward`.
            result: What `forward` returned.
            dcontext: Gradient of the context [T, B, V].
            dweights: Gradient of the weights [T, B, S]; None for zero.
            into: Tensors that the gradients of keys, values, v and layer norm are added to, in place; its query and
                weight are not looked at. None for new tensors.
            needs: Which are wanted; the others are None.
            dquery: A tensor to write the query's gradient into; None for a new one.

        Returns:
            The gradients; those of `into` when it is given.
        """
        ...


@runtime_checkable
class Gathering(Protocol):
    """What a kernel offers besides, if it makes a step's map again for the gradient of the step's query.

    The source's gradients need the maps of all steps, too. What they need of a map is added up while it is there, so
    that none is made a third time.
    """

    def gathers(self, problem: Problem) -> bool:
        """Tell whether there is anything to gather."""
        ...

    def gather_step(
        self,
        problem: Problem,
        inputs: Inputs,
        result: Result,
        dcontext: Tensor,
        gathered: Gradients,
        dquery: Tensor,
    ) -> None:
        """Write the gradient of one step's query, and gather what its map gives.

        Args:
            problem: Of one step.
            inputs: The same.
            result: The same.
            dcontext: Gradient of its context [1, B, V].
            gathered: Shaped as keys, v and layer norm, zero before the first step; each step is added. Private to the
                kernel.
            dquery: Written [1, B, H].
        """
        ...

    def gather_source(
        self,
        problem: Problem,
        inputs: Inputs,
        result: Result,
        dcontexts: Tensor,
        gathered: Gradients,
        into: Gradients | None,
    ) -> Gradients:
        """Return the gradients of what all steps share, from what they gathered.

        Args:
            problem: Of all steps.
            inputs: The same.
            result: The same.
            dcontexts: Gradients of all contexts [T, B, V].
            gathered: What `gather_step` added every step to, each once.
            into: As in `Kernel.backward`.
        """
        ...
