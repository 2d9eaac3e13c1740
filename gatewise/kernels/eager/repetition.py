"""The backward pass of a layer that repeats its forward pass under autograd.

Cells that cannot be traced, or that normalize a value twice at once, have no adjoint in `adjoint.py`. A layer that
autograd records as it runs does not come here; the explicit backward pass and `memory="lean"` do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients
from gatewise.kernels.stack import Layer, LayerForward, LayerGradients


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside the block, even in an operator of `torch.library`, where PyTorch disables it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def backward(
    problem: Problem, layer: Layer, above: OutputGradients, needs: Needs, layer_forward: LayerForward
) -> LayerGradients:
    """Return the gradients of the inputs of one layer.

    Args:
        problem: The problem.
        layer: The inputs of the layer.
        above: The gradients of the outputs of the layer.
        needs: The gradients to compute; others are None.
        layer_forward: The function that runs the forward pass of the layer with differentiable operators.
    """

    def leaf(tensor: Tensor, *, needed: bool) -> Tensor:
        return tensor.detach().requires_grad_(needed)

    with _recording():
        x, h0, c0 = (
            leaf(tensor, needed=needed)
            for tensor, needed in ((layer.x, needs.x), (layer.h0, needs.state), (layer.c0, needs.state))
        )
        weights = [
            type(own).from_tensors(
                [leaf(tensor, needed=needs.weights) for tensor in own.tensors()], len(problem.cell.parameters)
            )
            for own in layer.weights
        ]
        result = layer_forward(problem.replace(needs_grad=False), layer._replace(x=x, h0=h0, c0=c0, weights=weights))
    pairs = [
        (output, gradient)
        for output, gradient in zip(result[:3], above, strict=True)
        if gradient is not None and output.requires_grad
    ]
    sources = [x, h0, c0, *[tensor for own in weights for tensor in own.tensors()]]
    wanted = [source for source in sources if source.requires_grad]
    if pairs and wanted:
        outputs, gradients = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True))
    else:
        found = map(torch.zeros_like, wanted)
    every = [next(found) if source.requires_grad else None for source in sources]
    return LayerGradients(every[0], every[1], every[2], tuple(every[3:]))
