"""The kernel `recompute`: gradient checkpointing of the feature map in PyTorch operators, on any device.

It keeps the inputs and the attention weights, which are 1/H of the feature map. Scores and their gradients are computed
in chunks of decoder steps whose feature map fits into a workspace; the backward pass recomputes the map of each chunk.
The rest, from the scores to the context and back, needs no feature map and is computed for all steps at once. Zheng et
al. call this partial forward propagation.

Source: Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training", ISCA 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.attention import plain, sums
from gatewise.attention.call import ALL, Gradients, Inputs, Needs, Result
from gatewise.attention.kernel import Work
from gatewise.attention.problem import Problem
from gatewise.attention.reference import backward_work, forward_work
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec

WORKSPACE_BYTES = 64 << 20  # for one feature map; a chunk has at least one step, however large its map


class _Recompute:
    """The attention kernel that recomputes the feature map chunk by chunk in the backward pass."""

    name = "recompute"
    summary = "PyTorch operators that keep only the weights and recompute the feature map in a workspace"

    def criteria(self) -> Sequence[Criterion]:
        """Return no criteria: this kernel runs every problem."""
        return ()

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work of the reference kernel by chunks, with the forward pass counted twice in training."""
        chunks = -(-problem.steps // steps_per_chunk(problem))
        one = problem.replace(steps=min(problem.steps, steps_per_chunk(problem)))
        forward = forward_work(one)
        work = forward + forward + backward_work(one) if problem.needs_grad else forward
        count = problem.steps / one.steps
        return dataclasses.replace(
            work,
            matmul_flops=work.matmul_flops * count,
            tanhs=work.tanhs * count,
            bytes_moved=work.bytes_moved * count,
            launches=work.launches * chunks,
            operators=work.operators * chunks,
            # The recomputed map and the gradient of a map are in memory together; scores are those of all steps.
            workspace_bytes=work.workspace_bytes
            + one.map_bytes * (1 + one.layer_norm) * problem.needs_grad
            + 4 * (problem.pairs - one.pairs) * plain.accumulation_dtype(problem.dtype).itemsize,
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the softmax."""
        if not problem.needs_grad:
            return ()
        return (TensorSpec((problem.steps, problem.batch, problem.source), problem.dtype),)

    def forward(
        self, problem: Problem, inputs: Inputs, *, need_weights: bool = False, out: Result | None = None
    ) -> Result:
        """Run chunk after chunk and keep only the outputs."""
        source = plain.Source.of(inputs)
        scores = [
            plain.score(problem, inputs, source, each)[0] for each in inputs.query.split(steps_per_chunk(problem))
        ]
        context, weights = plain.softmax_context(problem, source, torch.cat(scores))
        kept = (weights,) if problem.needs_grad else ()
        return plain.copied_into(Result(context, weights if need_weights else None, kept), out)

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
        """Recompute the feature map of each chunk and run its backward pass."""
        totals = sums.accumulators(problem, inputs, into, needs)
        source = plain.Source.of(inputs)
        (weights,) = result.kept
        dscores = plain.softmax_context_backward(problem, source, weights, dcontext, dweights)
        steps = steps_per_chunk(problem)
        made, of_keys = [], None
        for first in range(0, problem.steps, steps):
            these = slice(first, first + steps)
            query = inputs.query[these]
            found = plain.Map(weights[these], *plain.replay(problem, inputs, source, query))
            of_query, more = plain.score_backward(problem, inputs, source, query, found, dscores[these], totals, needs)
            del found  # frees this map before the next chunk allocates its own
            made.append(of_query)
            if more is not None:
                of_keys = more.to(plain.accumulation_dtype(problem.dtype)) if of_keys is None else of_keys.add_(more)
        if of_keys is not None:
            plain.add_values(weights, dcontext, totals)
            plain.add_keys(problem, inputs, source, of_keys, totals)
        return sums.finished(problem, totals, into, torch.cat(made) if needs.query else None, dquery)

    def gathers(self, problem: Problem) -> bool:
        """Return whether a step recomputes a feature map, which only the additive score has."""
        return problem.additive

    def gather_step(
        self,
        problem: Problem,
        inputs: Inputs,
        result: Result,
        dcontext: Tensor,
        gathered: Gradients,
        dquery: Tensor,
    ) -> None:
        """Recompute the step's feature map and use it for the gradients of query and source."""
        source, (weights,) = plain.Source.of(inputs), result.kept
        dscores = plain.softmax_context_backward(problem, source, weights, dcontext, None)
        found = plain.Map(weights, *plain.replay(problem, inputs, source, inputs.query))
        of_query, of_keys = plain.score_backward(problem, inputs, source, inputs.query, found, dscores, gathered, ALL)
        assert of_query is not None
        assert of_keys is not None
        assert gathered.keys is not None
        gathered.keys.add_(of_keys)
        dquery.copy_(of_query)

    def gather_source(
        self,
        problem: Problem,
        inputs: Inputs,
        result: Result,
        dcontexts: Tensor,
        gathered: Gradients,
        into: Gradients | None,
    ) -> Gradients:
        """Add the gradient of the values, which needs no feature map, to the accumulated gradients."""
        totals = sums.accumulators(problem, inputs, into, Needs(query=False, source=True))
        source, (weights,) = plain.Source.of(inputs), result.kept
        assert gathered.keys is not None
        plain.add_values(weights, dcontexts, totals)
        plain.add_keys(problem, inputs, source, gathered.keys, totals)
        for name in ("v", "norm_weight", "norm_bias"):
            total, more = getattr(totals, name), getattr(gathered, name)
            if more is not None:
                total.add_(more)
        return sums.finished(problem, totals, into, None, None)


recompute = _Recompute()


def steps_per_chunk(problem: Problem) -> int:
    """Return the number of decoder steps in a chunk: as many as fit into the workspace, and at least one."""
    one = max(problem.replace(steps=1).map_bytes, 1)
    return max(1, min(problem.steps, WORKSPACE_BYTES // one))
