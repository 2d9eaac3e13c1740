"""The kernel `reference`: PyTorch operators that store the whole feature map, as attention is usually written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gatewise.attention import plain, sums
from gatewise.attention.call import ALL, Gradients, Inputs, Needs, Result
from gatewise.attention.kernel import Work
from gatewise.attention.problem import Problem
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec

# The number of times that PyTorch operators read or write a feature map. Forward: write the sum, read and write for the
# tanh, read for the product with v; with layer norm read and write for the normalisation, the weight and the bias.
# Backward: read and write for the gradient of tanh; read for the sums over steps, over positions and for v; with layer
# norm four read-modify-writes, two products and four sums.
FORWARD_PASSES, FORWARD_NORM_PASSES = 4, 6
BACKWARD_PASSES, BACKWARD_NORM_PASSES = 5, 20
FORWARD_OPERATORS, BACKWARD_OPERATORS = 14, 22


def forward_work(problem: Problem) -> Work:
    """Return the work of one forward pass in PyTorch operators over all steps at once."""
    passes = (FORWARD_PASSES + FORWARD_NORM_PASSES * problem.layer_norm) * problem.additive
    outputs = (problem.steps * problem.batch + 2 * problem.source * problem.batch) * problem.value_size
    return Work(
        matmul_flops=2.0 * problem.pairs * (problem.value_size + problem.hidden_size),
        tanhs=float(problem.pairs * problem.hidden_size * problem.additive),
        bytes_moved=passes * problem.map_bytes + (8 * problem.pairs + outputs) * problem.dtype.itemsize,
        launches=FORWARD_OPERATORS,
        operators=FORWARD_OPERATORS,
        workspace_bytes=problem.map_bytes * (1 + problem.layer_norm) + _masked_bytes(problem),
    )


def backward_work(problem: Problem) -> Work:
    """Return the work of one backward pass in PyTorch operators over all steps at once, with a stored feature map."""
    passes = (BACKWARD_PASSES + BACKWARD_NORM_PASSES * problem.layer_norm) * problem.additive
    sources = 6 * problem.source * problem.batch * (problem.value_size + problem.hidden_size)
    return Work(
        matmul_flops=4.0 * problem.pairs * (problem.value_size + problem.hidden_size),
        bytes_moved=passes * problem.map_bytes + (12 * problem.pairs + sources) * problem.dtype.itemsize,
        launches=BACKWARD_OPERATORS,
        operators=BACKWARD_OPERATORS,
        workspace_bytes=problem.map_bytes * (1 + problem.layer_norm)
        + _masked_bytes(problem)
        + 4 * problem.pairs * plain.accumulation_dtype(problem.dtype).itemsize,
    )


def _masked_bytes(problem: Problem) -> int:
    """Return the size in bytes of the masked copies of keys and values."""
    source = problem.source * problem.batch * (problem.hidden_size + problem.value_size)
    return source * problem.dtype.itemsize * problem.ragged


class _Reference:
    """The attention kernel that computes all decoder steps as one chunk and stores the feature map."""

    name = "reference"
    summary = "PyTorch operators that store the feature map, any floating-point dtype"

    def criteria(self) -> Sequence[Criterion]:
        """Return no criteria: this kernel runs every problem."""
        return ()

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work of about a dozen operators per pass, each over the whole feature map."""
        return forward_work(problem) + backward_work(problem) if problem.needs_grad else forward_work(problem)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the softmax and the feature map; with layer norm also its normalised input and statistics."""
        if not problem.needs_grad:
            return ()
        positions = (problem.steps, problem.source, problem.batch)
        kept = [TensorSpec((problem.steps, problem.batch, problem.source), problem.dtype)]
        if problem.additive:
            kept.append(TensorSpec((*positions, problem.hidden_size), problem.dtype))
        if problem.layer_norm:
            kept.append(TensorSpec((*positions, problem.hidden_size), problem.dtype))
            kept.append(TensorSpec((*positions, 1), plain.accumulation_dtype(problem.dtype)))
        return tuple(kept)

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Run all steps as one chunk."""
        source = plain.Source.of(inputs)
        scores, made = plain.score(problem, inputs, source, inputs.query)
        context, weights = plain.softmax_context(problem, source, scores)
        found = plain.Map(weights, *made)
        kept = tuple(tensor for tensor in found if tensor is not None) if problem.needs_grad else ()
        return plain.copied_into(Result(context, found.weights if need_weights else None, kept), out)

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
        """Run the backward pass of that chunk."""
        totals = sums.accumulators(problem, inputs, into, needs)
        source, found = plain.Source.of(inputs), plain.Map(*result.kept)
        dscores = plain.softmax_context_backward(problem, source, found.weights, dcontext, dweights)
        made, of_keys = plain.score_backward(problem, inputs, source, inputs.query, found, dscores, totals, needs)
        if of_keys is not None:
            plain.add_values(found.weights, dcontext, totals)
            plain.add_keys(problem, inputs, source, of_keys, totals)
        return sums.finished(problem, totals, into, made, dquery)


reference = _Reference()
