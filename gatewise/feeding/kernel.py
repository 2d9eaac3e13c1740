"""The kernels of a decoder with input feeding: criteria, statement of work, and the operations between the products.

Both kernels run the same loops, `forward_loop` and `backward_loop`, whose matrix products are PyTorch's. They differ in
the operations between the products of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gatewise.attention.choice import decide as decide_attention
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.feeding import products
from gatewise.feeding.call import Inputs, Options
from gatewise.feeding.elementwise import Elementwise, Plain
from gatewise.feeding.problem import Problem


class Kernel(Protocol):
    """One way to compute a decoder with input feeding, forward and backward."""

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
        """Return the work of the call without that of the attention kernel, which states its own."""
        ...

    def halves(self, problem: Problem, device: Device) -> bool:
        """Return whether the operands of the steps' products are stored in float16 beside float32 numbers."""
        ...

    def attends_at_once(self, problem: Problem, device: Device) -> bool:
        """Return whether the attention of a step and the operation after it are one launch."""
        ...

    def parts(self, options: Options, inputs: Inputs) -> Elementwise:
        """Return the operations between the products of a step, for both passes of a call."""
        ...


_ATTENTION = Criterion(
    "attention_kernel",
    allowed="'auto', or an attention kernel that accepts this decoder's attention",
    actual=lambda problem, device: repr(problem.attention_kernel),  # type: ignore[attr-defined]
    holds=lambda problem, device: _attention_kernel(problem, device) is not None,  # type: ignore[arg-type]
    violation=lambda problem, device: (
        problem.replace(attention_kernel="fused"),
        device.replace(triton=False),
    ),
    advice="gatewise.attention.explain says why it refuses",
)
_DEVICE = Criterion(
    "device",
    allowed="a CUDA GPU",
    actual=lambda problem, device: device.kind,
    holds=lambda problem, device: device.kind == "cuda",
    violation=lambda problem, device: (problem, device.replace(kind="cpu")),
)
_COMPILER = Criterion(
    "CUDA compiler",
    allowed="installed",
    actual=lambda problem, device: "not available",
    holds=lambda problem, device: device.kind != "cuda" or device.compiles,
    violation=lambda problem, device: (problem, device.replace(kind="cuda", compiles=False)),
    advice='pip install "gatewise[cuda]"',
)
_CAPABILITY = Criterion(
    "compute capability",
    allowed="8.0 or later",
    actual=lambda problem, device: f"{device.capability[0]}.{device.capability[1]}",
    holds=lambda problem, device: device.kind != "cuda" or device.capability >= (8, 0),
    violation=lambda problem, device: (problem, device.replace(kind="cuda", capability=(7, 5))),
)
_BATCH = Criterion(
    "batch",
    allowed="at least 1",
    actual=lambda problem, device: str(problem.batch),
    holds=lambda problem, device: problem.batch > 0,
    violation=lambda problem, device: (problem.replace(batch=0), device),
)


class _Fused:
    """The kernel that launches one CUDA kernel for each operation between products."""

    name = "fused"
    summary = "one CUDA kernel for each operation between a step's products"

    def criteria(self) -> Sequence[Criterion]:
        """Return the criteria: a GPU that this package compiles for, and an attention kernel."""
        return _DEVICE, _COMPILER, _CAPABILITY, _BATCH, _ATTENTION

    def work(self, problem: Problem, device: Device) -> Work:
        """Count one launch for each layer's cell, and one for the attentional output."""
        element = 2 if self.halves(problem, device) else problem.dtype.itemsize
        return _work(problem, cell=1, cell_gradient=1, attended=1, attended_gradient=1, element=element)

    def halves(self, problem: Problem, device: Device) -> bool:
        """Return whether float32 products may be rounded as float16 operands are, and sizes are suitable."""
        return problem.halves and products.widens()

    def attends_at_once(self, problem: Problem, device: Device) -> bool:
        """Return whether the score is additive, without layer norm, and computed by the attention kernel "fused"."""
        additive = problem.features > 0 and not problem.layer_norm and problem.dtype != torch.float64
        return additive and _attention_kernel(problem, device) == "fused"

    def parts(self, options: Options, inputs: Inputs) -> Elementwise:
        """Return the CUDA kernels for the sizes and dtype of the call."""
        from gatewise.feeding import elementwise_kernels

        found, sizes = inputs.embedded, (inputs.batch, inputs.units, inputs.query_size)
        return elementwise_kernels.ElementwiseKernels(*sizes, found.dtype, options.halves, found.device)


class _Eager:
    """The kernel that computes the operations between products by PyTorch operators."""

    name = "eager"
    summary = "PyTorch operators, any floating-point dtype"

    def criteria(self) -> Sequence[Criterion]:
        """Return the one criterion: an attention kernel."""
        return (_ATTENTION,)

    def work(self, problem: Problem, device: Device) -> Work:
        """Count the operators of `Plain` that compute or copy; views are left out."""
        return _work(
            problem, cell=13, cell_gradient=30, attended=4, attended_gradient=6, element=problem.dtype.itemsize
        )

    def halves(self, problem: Problem, device: Device) -> bool:
        """Return False: the operands have the dtype of the computation."""
        return False

    def attends_at_once(self, problem: Problem, device: Device) -> bool:
        """Return False: attention is computed by `gatewise.attention`, and the rest follows it."""
        return False

    def parts(self, options: Options, inputs: Inputs) -> Elementwise:
        """Return the PyTorch operators."""
        return Plain()


fused, eager = _Fused(), _Eager()


def _attention_kernel(problem: Problem, device: Device) -> str | None:
    return decide_attention(problem.attention, device, problem.attention_kernel).chosen


def _work(
    problem: Problem, *, cell: int, cell_gradient: int, attended: int, attended_gradient: int, element: int
) -> Work:
    layers = problem.layers
    rows = problem.time * problem.batch
    source_flops = 2.0 * problem.source * problem.batch * problem.value_size * problem.units
    # A step has a product for each layer and one more for the query and the attentional output.
    launches = problem.time * (layers + 1 + layers * cell + attended)
    forward = Work(
        matmul_flops=problem.time * problem.step_flops + source_flops,
        bytes_moved=problem.time * problem.step_weights * element + 12.0 * layers * rows * problem.units * element,
        launches=launches,
        operators=launches,
    )
    if not problem.needs_grad:
        return forward
    # The steps of the backward pass have the same products; the gradients of weights are products over all steps.
    launches = problem.time * (layers + 1 + layers * cell_gradient + attended_gradient) + 3 * layers + 5
    recomputed = problem.time * problem.step_flops if problem.recompute else 0.0
    return forward + Work(
        matmul_flops=2 * (problem.time * problem.step_flops + source_flops) + recomputed,
        bytes_moved=problem.time * problem.step_weights * element + 24.0 * layers * rows * problem.units * element,
        launches=launches,
        operators=launches,
    )
