"""The kernel `fused`: its criteria, its statement of work, and its passes, which launch the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gatewise.attention.call import ALL, Gradients, Inputs, Needs, Result
from gatewise.attention.fused import launch
from gatewise.attention.fused.tiles import input_tile, short_gradient_tile, step_tile
from gatewise.attention.kernel import Work
from gatewise.attention.problem import Problem
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STATISTICS = 4  # mean, 1 / standard deviation, and the two means that the gradient of a layer norm subtracts

_TRITON = Criterion(
    "triton",
    allowed="installed; on a CPU its interpreter must be enabled (TRITON_INTERPRET=1)",
    actual=lambda problem, device: "not available",
    holds=lambda problem, device: device.triton,
    violation=lambda problem, device: (problem, device.replace(triton=False)),
    advice="pip install triton (Linux)",
)
_CAPABILITY = Criterion(
    "compute capability",
    allowed="7.5 or later",
    actual=lambda problem, device: f"{device.capability[0]}.{device.capability[1]}",
    holds=lambda problem, device: device.kind != "cuda" or device.capability >= (7, 5),
    violation=lambda problem, device: (problem, device.replace(kind="cuda", capability=(7, 0))),
)
_DTYPE = Criterion(
    "dtype",
    allowed="float32, float16, bfloat16",
    actual=lambda problem, device: str(problem.dtype).removeprefix("torch."),
    holds=lambda problem, device: problem.dtype in _DTYPES,
    violation=lambda problem, device: (problem.replace(dtype=torch.float64), device),
)


class _Fused:
    """The attention kernel that stores the scores and not the feature map."""

    name = "fused"
    summary = "Triton kernels that hold the feature map in registers only"

    def criteria(self) -> Sequence[Criterion]:
        """Return the criteria: Triton, a GPU with a tanh instruction, and a supported dtype."""
        return (_TRITON, _CAPABILITY, _DTYPE)

    def work(self, problem: Problem, device: Device) -> Work:
        """Count one special function result per element of the feature map and pass in 16 bits, more in float32."""
        size, element = problem.hidden_size, problem.dtype.itemsize
        few = step_tile(problem) is not None
        # float32 needs an exponential and a reciprocal per element; steps computed together share the exponentials.
        each = 1.0 if problem.dtype != torch.float32 else 2.0 if few or problem.layer_norm else 1.25
        tanhs = problem.pairs * size * problem.additive * each
        rows = problem.steps * problem.batch
        source = problem.source * problem.batch * (size + problem.value_size) * element
        steps = rows * (size + problem.value_size) * element
        work = Work(
            matmul_flops=2.0 * problem.pairs * (problem.value_size + (0 if problem.additive else size)),
            tanhs=tanhs,
            bytes_moved=source * -(-problem.steps // 16) + steps + 8.0 * problem.pairs,
            launches=1 if few else 2,
            operators=4,
            workspace_bytes=4 * problem.pairs,
        )
        if device.kind == "cpu":
            # Triton's interpreter runs about a hundred NumPy operations per tile; it is never chosen for its speed.
            work += Work(operators=max(1, problem.pairs * size // 10))
        if not problem.needs_grad:
            return work
        # The partial sums for the query are written after each block of positions and read for the next.
        again = 8.0 * rows * size * (-(-problem.source // input_tile(problem).positions))
        return work + Work(
            matmul_flops=4.0 * problem.pairs * (problem.value_size + (0 if problem.additive else size)),
            tanhs=tanhs,
            bytes_moved=2 * source + 2 * steps + again + 16.0 * problem.pairs,
            launches=2 if problem.steps == 1 else 3 if short_gradient_tile(problem) is not None else 4,
            operators=14,
            workspace_bytes=4 * problem.pairs + 4 * rows * size + 4 * 3 * problem.batch * size,
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the scores and their log-sum-exp; with layer norm also four statistics per score."""
        if not problem.needs_grad:
            return ()
        pairs = (problem.steps, problem.batch, problem.source)
        kept = [TensorSpec(pairs, torch.float32), TensorSpec(pairs[:2], torch.float32)]
        statistics = (problem.steps, _STATISTICS, *pairs[1:])
        return tuple(kept + [TensorSpec(statistics, torch.float32)] * problem.layer_norm)

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Launch the kernels of scores and context, or one kernel for both when there are few steps."""
        inputs = _with_contiguous_rows(inputs)
        made = _new_result(problem, inputs, need_weights=need_weights) if out is None else out
        tile = step_tile(problem)
        with _device_guard(inputs.keys):
            if tile is not None:
                launch.step(problem, inputs, made, tile)
            else:
                launch.scores(problem, inputs, made)
                launch.context(problem, inputs, made)
        return made if problem.needs_grad else made._replace(kept=())

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
        """Launch the kernels of the gradients of scores, values and inputs, or one kernel for all at a single step."""
        inputs, add = _with_contiguous_rows(inputs), into is not None
        above = _contiguous_rows(dcontext), None if dweights is None else _contiguous_rows(dweights)
        parameters = None
        if problem.additive and needs.source:
            sums = 3 if problem.layer_norm else 1, problem.batch, problem.hidden_size
            parameters = inputs.keys.new_empty(sums, dtype=torch.float32)
        found = into or Gradients()
        if needs.source and not add:
            found = _new_source_gradients(inputs)
        if needs.query:
            found = found._replace(query=inputs.query.new_empty(inputs.query.shape) if dquery is None else dquery)
        tile = step_tile(problem, source=needs.source) if problem.steps == 1 else None
        short = short_gradient_tile(problem) if needs.source else None
        dscores = result.kept[0].new_empty(result.kept[0].shape)
        with _device_guard(inputs.keys):
            if tile is not None:
                launch.step_gradient(problem, inputs, result, above, dscores, found, parameters, needs, tile, add=add)
            else:
                if short is not None:
                    assert found.values is not None
                    launch.short_gradient(problem, inputs, result, above, dscores, found.values, short, add=add)
                else:
                    launch.score_gradient(problem, inputs, result, above, dscores)
                launch.input_gradient(problem, inputs, result, dscores, found, parameters, needs, add=add)
                if short is None and needs.source:
                    assert found.values is not None
                    launch.value_gradient(problem, inputs, result, above[0], found.values, add=add)
            if parameters is not None:
                launch.parameter_gradient(problem, parameters, found, add=add)
        return found


fused = _Fused()


def _new_result(problem: Problem, inputs: Inputs, *, need_weights: bool) -> Result:
    steps, batch, values = problem.steps, problem.batch, inputs.values
    pairs = (steps, batch, problem.source)
    kept = ()
    if problem.needs_grad or need_weights or step_tile(problem) is None:
        kept = (values.new_empty(pairs, dtype=torch.float32), values.new_empty(pairs[:2], dtype=torch.float32))
    if problem.needs_grad and problem.layer_norm:
        kept += (values.new_empty((steps, _STATISTICS, *pairs[1:]), dtype=torch.float32),)
    context = values.new_empty(steps, batch, problem.value_size)
    return Result(context, values.new_empty(pairs) if need_weights else None, kept)


def _new_source_gradients(inputs: Inputs) -> Gradients:
    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty(tensor.shape)

    names = ("keys", "values", "v", "norm_weight", "norm_bias")
    return Gradients(**{name: like(getattr(inputs, name)) for name in names})


def _with_contiguous_rows(inputs: Inputs) -> Inputs:
    return inputs._replace(
        query=_contiguous_rows(inputs.query), keys=_contiguous_rows(inputs.keys), values=_contiguous_rows(inputs.values)
    )


def _contiguous_rows(tensor: Tensor) -> Tensor:
    # The Triton kernels accept any strides except for the last dimension, which must be contiguous.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _device_guard(tensor: Tensor) -> AbstractContextManager:
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
