"""The `fused` kernel: criteria, stated work, and the two passes around the Triton programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.attention import plain
from gatewise.attention.call import ALL, EPSILON, Gradients, Inputs, Needs, Result
from gatewise.attention.fused.tiles import Tile, backward_tile, forward_tile, product_tile, value_tile
from gatewise.attention.kernel import Work
from gatewise.attention.problem import Problem
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STATISTICS = 4  # mean, 1 / deviation, and the two means that the adjoint of a layer norm subtracts

_TRITON = Criterion(
    "triton",
    allowed="installed; on a CPU, its interpreter asked for (TRITON_INTERPRET=1)",
    actual=lambda problem, device: "not there",
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
# Triton 3.6 made sums over so short an axis several times too large on an H200. What replaced them agrees in the
# interpreter, and is still to be shown on a GPU.
_STEPS = Criterion(
    "steps",
    allowed="at least 5 in training on a GPU",
    actual=lambda problem, device: str(problem.steps),
    holds=lambda problem, device: problem.steps >= 5 or not problem.needs_grad or device.kind != "cuda",
    violation=lambda problem, device: (
        problem.replace(steps=1, needs_grad=True),
        device.replace(kind="cuda", capability=(9, 0), triton=True),
    ),
)


class _Fused:
    """Three programs; what is kept is the scores, not their map."""

    name = "fused"
    summary = "Triton programs in which the feature map lives in registers alone"

    def criteria(self) -> Sequence[Criterion]:
        """Triton, a GPU that has a tanh instruction, and what it can be trusted with."""
        return (_TRITON, _CAPABILITY, _DTYPE, _STEPS)

    def work(self, problem: Problem, device: Device) -> Work:
        """A tanh for each element of the map in each pass; a float32 one takes an exponential and a reciprocal."""
        size, element = problem.hidden_size, problem.dtype.itemsize
        tanhs = problem.pairs * size * problem.additive * (2.0 if problem.dtype == torch.float32 else 1.0)
        rows = problem.steps * problem.batch
        source = problem.source * problem.batch * (size + problem.value_size) * element
        steps = rows * (size + problem.value_size) * element
        work = Work(
            matmul_flops=2.0 * problem.pairs * (problem.value_size + (0 if problem.additive else size)),
            tanhs=tanhs,
            bytes_moved=source * -(-problem.steps // 16) + steps + 8.0 * problem.pairs,
            launches=1,
            operators=4,
            workspace_bytes=4 * problem.pairs,
        )
        if device.kind == "cpu":
            # Triton's interpreter: a hundred numpy operations for each tile, never chosen for its speed.
            work += Work(operators=max(1, problem.pairs * size // 10))
        if not problem.needs_grad:
            return work
        # The query's sums of a block of positions are read and written again for the next block.
        again = 8.0 * rows * size * (-(-problem.source // backward_tile(problem).positions))
        return work + Work(
            matmul_flops=4.0 * problem.pairs * (problem.value_size + (0 if problem.additive else size)),
            tanhs=tanhs,
            bytes_moved=2 * source + 2 * steps + again + 16.0 * problem.pairs,
            launches=5,
            operators=16,
            workspace_bytes=4 * problem.pairs + 4 * rows * size + 4 * 3 * problem.batch * size,
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """The scores and what normalises them; with layer norm four more numbers for each score."""
        if not problem.needs_grad:
            return ()
        pairs = (problem.steps, problem.batch, problem.source)
        kept = [TensorSpec(pairs, torch.float32), TensorSpec(pairs[:2], torch.float32)]
        statistics = (problem.steps, _STATISTICS, *pairs[1:])
        return tuple(kept + [TensorSpec(statistics, torch.float32)] * problem.layer_norm)

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Launch one program for each block of steps and each sequence."""
        programs = _programs()
        query, keys, values = map(_rows, inputs[:3])
        pairs = (problem.steps, problem.batch, problem.source)
        context = values.new_empty(problem.steps, problem.batch, problem.value_size)
        weights = values.new_empty(pairs) if need_weights else None
        scores = values.new_empty(pairs, dtype=torch.float32)
        keep = problem.needs_grad
        products = product_tile(problem)
        alone = products is None  # one program does it all
        lse = values.new_empty(pairs[:2], dtype=torch.float32) if keep or not alone else None
        statistics = None
        if keep and problem.layer_norm:
            statistics = values.new_empty((problem.steps, _STATISTICS, *pairs[1:]), dtype=torch.float32)
        tile = forward_tile(problem)
        with _on(values):
            programs.attend_program[(-(-problem.steps // tile.steps), problem.batch)](
                query, keys, values, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias,
                context, weights, scores, lse, statistics,
                problem.steps, problem.batch, problem.source, problem.hidden_size, problem.value_size,
                problem.batch * problem.source, EPSILON,
                *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
                ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, KEEP=keep,
                WEIGHTS=need_weights, CONTEXT=alone, TANH=_tanh(problem, values),
                **_launch(tile),
            )  # fmt: skip
            if products is not None:
                blocks = -(-problem.steps // products.steps), -(-problem.value_size // products.features)
                programs.context_program[(*blocks, problem.batch)](
                    values, inputs.lengths, scores, lse, context,
                    problem.steps, problem.batch, problem.source, problem.value_size, *values.stride()[:2],
                    RAGGED=problem.ragged, PRECISION=_precision(problem, values),
                    **_launch(products, "BV"),
                )  # fmt: skip
        kept = tuple(tensor for tensor in (scores, lse, statistics) if tensor is not None) if keep else ()
        return plain.written(Result(context, weights, kept), out)

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
        """Launch the gradient of the scores, then that of everything they are made of."""
        programs = _programs()
        query, keys, values = map(_rows, inputs[:3])
        dcontext = _rows(dcontext)
        dweights = None if dweights is None else _rows(dweights)
        scores, lse, *rest = result.kept
        statistics = rest[0] if rest else None
        dscores = torch.empty_like(scores)
        made = query.new_empty(query.shape)
        dquery_sums = query.new_empty(query.shape, dtype=torch.float32)
        dkeys = keys.new_empty(keys.shape) if into is None else into.keys
        dvalues = values.new_empty(values.shape) if into is None else into.values
        parameters = None
        if problem.additive:
            count = 3 if problem.layer_norm else 1
            parameters = query.new_empty((count, problem.batch, problem.hidden_size), dtype=torch.float32)
        products, tile, columns = product_tile(problem), backward_tile(problem), value_tile(problem)
        rows = products or forward_tile(problem)
        blocks = -(-problem.source // columns.positions), -(-problem.value_size // columns.features)
        # Few steps would not fill the tensor cores.
        dot = {"DOT": products is not None, "PRECISION": _precision(problem, values)}
        with _on(values):
            programs.score_gradient_program[(-(-problem.steps // rows.steps), problem.batch)](
                values, inputs.lengths, scores, lse, dcontext, dweights, dscores,
                problem.steps, problem.batch, problem.source, problem.value_size,
                *values.stride()[:2], *dcontext.stride()[:2], *((0, 0) if dweights is None else dweights.stride()[:2]),
                RAGGED=problem.ragged, WEIGHTS=dweights is not None, **dot, **_launch(rows),
            )  # fmt: skip
            programs.value_gradient_program[(*blocks, problem.batch)](
                inputs.lengths, scores, lse, dcontext, dvalues,
                problem.steps, problem.batch, problem.source, problem.value_size, *dcontext.stride()[:2],
                RAGGED=problem.ragged, ADD=into is not None, **dot, **_launch(columns, "BV"),
            )  # fmt: skip
            programs.input_gradient_program[(-(-problem.hidden_size // tile.features), problem.batch)](
                query, keys, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias, statistics, dscores,
                made, dquery_sums, dkeys, parameters,
                problem.steps, problem.batch, problem.source, problem.hidden_size,
                problem.batch * problem.source,
                *query.stride()[:2], *keys.stride()[:2],
                ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, ADD=into is not None,
                TANH=_tanh(problem, values), **_launch(tile),
            )  # fmt: skip
        if needs.query and dquery is not None:
            made = dquery.copy_(made)
        if not needs.source:
            return Gradients(made)
        found = () if parameters is None else parameters.sum(1).unbind()
        if into is None:
            found = tuple(each.to(problem.dtype) for each in found)
        else:
            targets = (into.v, into.norm_weight, into.norm_bias)
            found = tuple(total.add_(each) for each, total in zip(found, targets, strict=False) if total is not None)
        v, gain, shift = (*found, None, None, None)[:3]
        return Gradients(
            made if needs.query else None, dkeys, dvalues, v, None if into is None else into.weight, gain, shift
        )


fused = _Fused()


def _programs() -> Any:
    # Imported by the first call: Triton takes a second to load.
    from gatewise.attention.fused import programs

    return programs


def _rows(tensor: Tensor) -> Tensor:
    # The programs take any strides but that of a row's elements.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tanh(problem: Problem, tensor: Tensor) -> str:
    # The hardware's tanh is off by 2^-11 of its value: an eighth of bfloat16's rounding unit, half of float16's.
    if not tensor.is_cuda:
        return "portable"
    return "float32" if problem.dtype == torch.float32 else "hardware"


def _precision(problem: Problem, tensor: Tensor) -> str:
    if not tensor.is_cuda:
        return "portable"
    return "tf32" if problem.allow_tf32 else "ieee"


def _launch(tile: Tile, features: str = "BH") -> dict[str, Any]:
    sizes = {"BT": tile.steps, "BS": tile.positions, features: tile.features}
    return sizes | {"num_warps": tile.warps, "enable_fp_fusion": True}


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device_of(tensor)
