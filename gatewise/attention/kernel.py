"""The interface of attention kernels: criteria, statement of work, and forward and backward as one unit."""

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
    """The work of a call, in quantities that do not depend on the speed of the device.

    Attributes:
        matmul_flops: The number of floating-point operations in matrix products; a multiply-add counts as two.
        tanhs: The number of results of the special function units, of which a hyperbolic tangent may take several.
        bytes_moved: The number of bytes read from and written to device memory.
        launches: The number of device kernels that run one after another.
        operators: The number of PyTorch operators (and Triton launches) that the CPU issues.
        workspace_bytes: The peak size of temporary memory, besides inputs, outputs and kept tensors.
    """

    matmul_flops: float = 0.0
    tanhs: float = 0.0
    bytes_moved: float = 0.0
    launches: int = 0
    operators: int = 0
    workspace_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Return the work of two calls that run one after the other: sums, and the larger workspace."""
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
    size is zero, that the score is additive or dot (the weight of the general score is applied outside), and that
    autograd is off. It must not modify its inputs, and keys and values beyond a length must not influence its results.
    """

    @property
    def name(self) -> str:
        """The name of the kernel, as in `kernel="fused"`."""
        ...

    @property
    def summary(self) -> str:
        """A description of one line, for `explain`."""
        ...

    def criteria(self) -> Sequence[Criterion]:
        """Return all criteria, in the order in which they are printed."""
        ...

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work of the forward pass, and of the backward pass too when the problem needs a gradient."""
        ...

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the tensors of `Result.kept`, in order, each with T as its first size; empty without a gradient."""
        ...

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Compute the context and keep the tensors that the backward pass needs.

        Args:
            problem: The description of the call.
            inputs: The inputs of the call.
            need_weights: Whether to return the attention weights; not supported together with `out`.
            out: Tensors to write the context and the kept tensors into, for instance one step of those of a whole
                sequence. None allocates them.
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
            problem: The description of the call, as in `forward`.
            inputs: The inputs of the call, as in `forward`.
            result: The result of `forward`.
            dcontext: The gradient of the context [T, B, V].
            dweights: The gradient of the attention weights [T, B, S]; None for zero.
            into: Tensors to which the gradients of keys, values, v and layer norm are added in place; its query and
                weight are ignored. None allocates new tensors.
            needs: The gradients that are needed; the others are None.
            dquery: A tensor to write the query's gradient into; None allocates it.

        Returns:
            The gradients; those in `into` if it is given.
        """
        ...


@runtime_checkable
class Gathering(Protocol):
    """The optional interface of a kernel that recomputes the feature map of a step for the gradient of its query.

    The gradients of the source depend on the feature maps of all steps, too. With this interface their contribution is
    accumulated while each map is in memory, so that no map is computed a third time.
    """

    def gathers(self, problem: Problem) -> bool:
        """Return whether the kernel recomputes a feature map for this problem."""
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
        """Write the gradient of one step's query, and accumulate the step's contribution to the source gradients.

        Args:
            problem: The description of the step.
            inputs: The inputs of the step.
            result: The result of the step.
            dcontext: The gradient of the step's context [1, B, V].
            gathered: The accumulators, shaped as keys, v and layer norm, zero before the first step. Their content is
                private to the kernel.
            dquery: The tensor for the gradient of the query [1, B, H].
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
        """Return the gradients of the inputs that all steps share, from the accumulators.

        Args:
            problem: The description of all steps together.
            inputs: The inputs of all steps.
            result: The result of all steps.
            dcontexts: The gradients of all contexts [T, B, V].
            gathered: The accumulators, to which `gather_step` has added every step once.
            into: The tensors to add to, as in `Kernel.backward`.
        """
        ...
