"""The explicit passes as one autograd function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result, Saved
from gatewise.functional.explicit import forward_on, run_backward
from gatewise.functional.plan import Plan
from gatewise.functional.ragged import conversion
from gatewise.selection import REFERENCE, differentiable

_ALL = Needs()

# Whether another walk over the graph may follow the one in progress; older versions of PyTorch do not tell.
_graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd,  # type: ignore[attr-defined]
    "_get_current_graph_task_keep_graph",
    lambda: False,
)


class LSTMFunction(torch.autograd.Function):
    """Forward keeps what its kernel asks for; backward runs that kernel, or plain torch when it is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, inputs: Inputs, x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs as planned; the tensors of `inputs` come once more, for autograd to see them."""
        problem, kernel, straight, _, _ = plan
        run = forward_on(kernel, problem, inputs) if straight is None else straight.forward(problem, inputs)
        y, h_n, c_n = (output.data if output._is_view() else output for output in run[:3])
        # The outputs are the caller's, to change in place as those of torch.nn.LSTM: no backward pass reads the final
        # states again, and on a CPU y is read from a copy. On a GPU, changing y is an error, as it is with cuDNN.
        ctx.save_for_backward(x, h0, c0, *weights, y if y.is_cuda else y.clone(), *inputs.masks, *run.kept)
        ctx.call = (plan, inputs.lengths, inputs.batch_sizes, len(weights), len(inputs.masks))
        ctx.spent = False
        ctx.set_materialize_grads(False)
        return y, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Return the gradients of x, h0, c0 and the weights."""
        (problem, kernel, straight, single_use, _), lengths, batch_sizes, count, gaps = ctx.call
        x, h0, c0, *others = ctx.saved_tensors
        y, *rest = others[count:]
        masks, kept = tuple(rest[:gaps]), rest[gaps:]
        inputs = Inputs(x, h0, c0, tuple(others[:count]), lengths, batch_sizes, masks)
        wanted, above = ctx.needs_input_grad[2:], OutputGradients(*gradients)
        if torch.is_grad_enabled():
            return None, None, *_differentiable_backward(problem, inputs, above, wanted)
        # The initial states stand where the final ones stood, which nothing reads.
        again = single_use and not ctx.spent and _graph_is_kept()
        result = Result(y, h0, c0, tuple([tensor.clone() for tensor in kept] if again else kept))
        needs = _ALL if all(wanted) else Needs(wanted[0], wanted[1] or wanted[2], any(wanted[3:]))
        if straight is not None and not ctx.spent and not torch._C._is_any_autocast_enabled():
            ctx.spent = single_use and not again
            dx, dh0, dc0, dweights = straight.backward(problem, inputs, result, above, needs)
        else:
            saved = Saved(kernel, problem, inputs, result, spent=ctx.spent)
            dx, dh0, dc0, dweights = run_backward(saved, above, needs, kernel)
            ctx.spent = saved.spent and not again
        return None, None, dx, dh0, dc0, *dweights


# `LSTMFunction.apply` without a look at the transforms of `torch.func`, of which there are none where it is called.
apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = super(torch.autograd.Function, LSTMFunction).apply  # type: ignore[misc]


def in_plain_torch(problem: Problem, inputs: Inputs) -> Result:
    """Compute the outputs by operators that autograd and `torch.func` see one by one."""
    between = conversion(problem, inputs, REFERENCE.layouts)
    if between is None:
        return differentiable(problem, inputs)
    return between.result_out(differentiable(between.problem(problem), between.inputs(inputs)), inputs)


def _differentiable_backward(
    problem: Problem, inputs: Inputs, gradients: OutputGradients, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    # No kernel's backward can itself be differentiated; a replay in plain torch, from the same inputs and the same
    # dropout masks, can.
    result = in_plain_torch(problem, inputs)
    given = [(output, gradient) for output, gradient in zip(result[:3], gradients, strict=True) if gradient is not None]
    sources = [
        tensor for tensor, want in zip((inputs.x, inputs.h0, inputs.c0, *inputs.weights), wanted, strict=True) if want
    ]
    if not given:
        return [None] * len(wanted)
    found = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            sources,
            [gradient for _, gradient in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if want else None for want in wanted]
