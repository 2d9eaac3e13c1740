"""PyTorch's operators of whole layers without cuDNN, with an autograd graph for the backward pass.

In inference on a CPU, PyTorch may run `torch.lstm` on oneDNN. Otherwise they are its native loop: on a GPU, one matrix
product and one fused cell for every step of an LSTM or a GRU. `runs` computes some packed batches on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.cells import RNN
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import operators, stack
from gatewise.kernels.aten import onednn, runs


def kept(problem: Problem) -> tuple[TensorSpec, ...]:
    """Return an estimate of the tensors in the graph: gates and states of every step; of an RNN, the hidden states."""
    tokens = problem.time * problem.batch * problem.num_layers * problem.num_directions
    values = 1 if type(problem.cell) is RNN else 7
    return (TensorSpec((tokens, values * problem.hidden_size), problem.dtype, exact=False),)


def forward(problem: Problem, inputs: Inputs) -> Result:
    """Run the loop. The kept tensors are the outputs with their graph, then the leaves of the graph."""
    if not problem.needs_grad:
        return _run(problem, inputs)
    # Autograd records nothing in inference mode, nor operators on inference tensors.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            (tensor.clone() if tensor.is_inference() else tensor).detach().requires_grad_()
            for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)
        ]
        shadow = inputs._replace(x=leaves[0], h0=leaves[1], c0=leaves[2], weights=tuple(leaves[3:]))
        outputs = _run(problem, shadow)[:3]
    y, h_n, c_n = (output.detach() for output in outputs)
    return Result(y, h_n, c_n, (*outputs, *leaves))


def recorded(problem: Problem, inputs: Inputs) -> Result | None:
    """Run PyTorch's operator, with oneDNN by PyTorch's own rules, so that autograd can record it.

    On a GPU this function returns None if some outputs do not depend on all weights, such as the states of the first of
    two layers. Autograd would compute no gradients of the other weights, where cuDNN, on which `torch.nn.LSTM` runs,
    returns zeros; `torch.nn.parallel.DistributedDataParallel` needs a gradient of every weight.
    """
    apart = problem.num_layers > 1 or problem.num_directions > 1 or problem.proj_size > 0
    in_forward_mode = forward_ad._current_level >= 0  # there the operators are differentiated themselves
    if inputs.x.is_cuda and problem.needs_grad and apart and not in_forward_mode:
        return None
    return _called(problem, inputs)


def backward(
    problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
) -> InputGradients:
    """Run autograd's backward pass for the requested gradients."""
    outputs, leaves = result.kept[:3], result.kept[3:]
    wanted = [needs.x, needs.state, needs.state, *[needs.weights] * (len(leaves) - 3)]
    given = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    found: Iterator[Tensor | None] = iter(())
    if given and any(wanted):
        found = iter(
            torch.autograd.grad(
                [output for output, _ in given],
                [leaf for leaf, want in zip(leaves, wanted, strict=True) if want],
                [gradient for _, gradient in given],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )
    gradients_in_order = [
        next(found, torch.zeros_like(leaf)) if want else None for leaf, want in zip(leaves, wanted, strict=True)
    ]
    dx, dh0, dc0, *dweights = gradients_in_order
    if problem.bias:
        # Both biases of a direction may share one gradient tensor. A copy makes in-place changes of one of them safe.
        for index in range(3, len(dweights), problem.weights_per_direction):
            gradient = dweights[index]
            dweights[index] = None if gradient is None else gradient.clone()
    return InputGradients(dx, dh0, dc0, tuple(dweights))


def _run(problem: Problem, inputs: Inputs) -> Result:
    return stack.layer_after_layer(problem, inputs, _called) if problem.dropout else _called(problem, inputs)


def _called(problem: Problem, inputs: Inputs) -> Result:
    if inputs.x.is_cuda:
        switched_off = torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled
        return Result(*_without(*switched_off, operators.call, problem, inputs))
    x, h0, c0, weights, _, batch_sizes, *_ = inputs
    return Result(*operator_on_cpu(problem)(x, h0, c0, weights, batch_sizes))


# What is kept follows from the problem alone. Whether runs are faster is asked in every call, for its own batch sizes.
@functools.lru_cache(maxsize=1024)
def operator_on_cpu(problem: Problem) -> Operator:
    """Return PyTorch's operator of a problem on a CPU.

    It uses oneDNN by PyTorch's rules, but not for a few steps, which the native loop computes faster. Packed batches
    are computed as runs of steps where that is faster.

    Args:
        problem: The problem, dense or packed.
    """
    device = Device.probe("cpu")
    operator = native_loop(problem) if onednn.is_slower(problem, device) else operators.operator_of(problem)
    if problem.layout is not Layout.PACKED or not runs.may_take(problem):
        return operator
    equal, costs, zeros = problem.time * problem.batch, runs.costs_of(problem, device), operators.zeros_of(problem)

    def packed(
        x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert batch_sizes is not None  # for the type checker
        # PyTorch's operator computes sequences of equal lengths as an ordinary batch.
        if x.shape[0] < equal and runs.are_chosen(problem, costs, batch_sizes):
            states = zeros(x) if h0 is None or c0 is None else (h0, c0)
            return runs.call(problem, Inputs(x, *states, tuple(weights), None, batch_sizes))[:3]
        return operator(x, h0, c0, weights, batch_sizes)

    return packed


def native_loop(problem: Problem) -> Operator:
    """Return PyTorch's operator of a problem on a CPU, without oneDNN.

    PyTorch switches oneDNN off for the whole process. Operators that another thread calls meanwhile use PyTorch's own
    code, too.
    """
    switched_off = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled
    return functools.partial(_without, *switched_off, operators.operator_of(problem))


def _without(is_on: Callable[[], bool], switch: Callable[[bool], None], call: Callable, *arguments: Any) -> Any:
    # PyTorch has no argument for this, only a process-wide setting, which is restored immediately.
    if not is_on():
        return call(*arguments)
    switch(False)
    try:
        return call(*arguments)
    finally:
        switch(True)
