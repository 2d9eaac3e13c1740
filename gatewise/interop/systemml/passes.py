"""The forward and the backward pass for one or two directions, on the explicit passes of `gatewise.functional`."""

from __future__ import annotations

import logging
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise import functional
from gatewise.contract.device import Device
from gatewise.contract.errors import (
    ArgumentError,
    DtypeError,
    KernelRefused,
    OutOfMemoryPredicted,
    ShapeError,
    callers_level,
    sentence,
)
from gatewise.functional import RepeatedForwardWarning
from gatewise.interop.systemml import sparse
from gatewise.interop.systemml.arguments import Arguments, fingerprints, require_rows
from gatewise.interop.systemml.layout import flat_weights, gates_exchanged, matrix_of, sequences_of, steps_of
from gatewise.interop.systemml.state import State

_log = logging.getLogger(__name__)


class Above(NamedTuple):
    """The gradients of the forward pass's results; None for zero.

    Attributes:
        steps: The gradient of the outputs of every step [T, N, directions * M].
        last: The gradient of the final outputs [directions, N, M].
        c: The gradient of the final cell states [directions, N, M].
    """

    steps: Tensor | None
    last: Tensor | None
    c: Tensor | None


class Gradients(NamedTuple):
    """The gradients in SystemML's layout, all dense.

    Attributes:
        X: The gradient of X [N, T*D].
        W: The gradient of W [D+M, 4M] for each direction.
        b: The gradient of b [1, 4M] for each direction.
        out0: The gradient of out0 [directions * N, M].
        c0: The gradient of c0 [directions * N, M].
    """

    X: Tensor
    W: list[Tensor]
    b: list[Tensor]
    out0: Tensor
    c0: Tensor


def forward(
    arguments: Arguments,
    return_sequences: bool,
    kernel: str,
    device: torch.device | str | None,
    memory_budget: float | None,
) -> tuple[Tensor, Tensor, State]:
    """Run the forward pass; return out [N, T*F] or [N, F], c [N, F] with F = directions * M, and the state."""
    output, state = _run(arguments, _place(device) or arguments.home, kernel, memory_budget)
    out = output.y if return_sequences else output.state.h
    # The last outputs [directions, N, M] are laid out like T steps of M features.
    return sequences_of(out), sequences_of(output.state.c), state


def backward(
    arguments: Arguments,
    above: Above,
    state: State | None,
    kernel: str,
    device: torch.device | str | None,
    memory_budget: float | None,
) -> Gradients:
    """Run the backward pass from the state if it can be used, otherwise after repeating the forward pass."""
    require_rows(arguments)
    if state is not None:
        _check_state(state, arguments)
    where = _place(device) or (state.device if state is not None and state.home == arguments.home else arguments.home)
    above = Above(*(None if tensor is None else tensor.to(where) for tensor in above))
    if state is not None and state.device == where and not state.saved.spent:
        try:
            return _in_systemml_layout(arguments, _explicit(state, above, kernel), state.projected)
        except KernelRefused:
            # A kernel can refuse only the sparse products here; the dense computation below may still be possible.
            if not state.projected:
                raise
    _, repeated = _run(arguments, where, kernel, memory_budget)
    message = f"{_reason(state, where)}; backward on {repeated.kernel!r} ({where}) repeats it there"
    warnings.warn(message, RepeatedForwardWarning, stacklevel=callers_level())
    return _in_systemml_layout(arguments, _explicit(repeated, above, repeated.kernel), repeated.projected)


def _explicit(state: State, above: Above, kernel: str) -> functional.Gradients:
    return functional.backward(state.saved, above.steps, (above.last, above.c), kernel=kernel)


def _run(
    arguments: Arguments, where: torch.device, kernel: str, memory_budget: float | None
) -> tuple[functional.Output, State]:
    sizes, D = arguments.sizes, arguments.sizes.D
    X, W = arguments.X.to(where), [matrix.to(where) for matrix in arguments.W]
    b = [bias.to(where) for bias in arguments.b]
    # Copies, because modifications of NumPy arrays before the backward pass cannot be detected as those of tensors can.
    initial = arguments.out0.to(where, copy=True), arguments.c0.to(where, copy=True)
    budget = memory_budget if memory_budget is not None else _free_memory(where)
    options = {"bidirectional": sizes.directions == 2, "kernel": kernel, "memory_budget": budget}
    if any(sparse.worth_it(matrix) for matrix in (X, *W)):
        recurrent = [sparse.dense(sparse.some_rows(matrix, D, D + sizes.M)) for matrix in W]
        products = sparse.products(X, [sparse.some_rows(matrix, 0, D) for matrix in W])
        weights = flat_weights(list(zip(recurrent, b, strict=True)), sizes.M)
        try:
            output, saved = functional.forward(products, initial, weights, **options, projected=True)
            return output, State(saved, sizes, arguments.home, fingerprints(arguments))
        except (KernelRefused, OutOfMemoryPredicted) as refused:
            _log.info("sparse matrices are converted to dense ones: %s", str(refused).partition("\n")[0])
    x = steps_of(sparse.dense(X), D).clone(memory_format=torch.contiguous_format)
    weights = flat_weights([(sparse.dense(matrix), bias) for matrix, bias in zip(W, b, strict=True)], sizes.M)
    output, saved = functional.forward(x, initial, weights, **options)
    return output, State(saved, sizes, arguments.home, fingerprints(arguments))


def _in_systemml_layout(arguments: Arguments, found: functional.Gradients, projected: bool) -> Gradients:
    sizes = arguments.sizes
    assert found.x is not None  # for the type checker: every gradient was requested
    assert found.state is not None
    directions = [found.weights[start : start + 4] for start in range(0, 4 * sizes.directions, 4)]
    dW = [matrix_of(w_ih, w_hh) for w_ih, w_hh, _, _ in directions]
    if projected:
        where = found.x.device
        inputs = [sparse.some_rows(matrix.to(where), 0, sizes.D) for matrix in arguments.W]
        dX, dinputs = sparse.gradients(arguments.X.to(where), inputs, found.x)
        dW = [torch.cat(parts) for parts in zip(dinputs, dW, strict=True)]
    else:
        dX = sequences_of(found.x)
    db = [gates_exchanged(b_ih).unsqueeze(0) for _, _, b_ih, _ in directions]
    return Gradients(dX, dW, db, found.state.h.flatten(0, 1), found.state.c.flatten(0, 1))


def _check_state(state: Any, arguments: Arguments) -> None:
    if not isinstance(state, State):
        advice = "Give None to repeat the forward pass."
        raise ArgumentError(sentence("state", "the third result of lstm", type(state).__name__, advice))
    if state.sizes != arguments.sizes:
        advice = "Give the state that the forward pass of the same arguments returned."
        raise ShapeError(sentence("state", f"of a problem of {arguments.sizes}", f"one of {state.sizes}", advice))
    if state.dtype != arguments.X.dtype:
        raise DtypeError(sentence("state", f"of {arguments.X.dtype} like X", state.dtype))
    for name, found in fingerprints(arguments).items():
        if not torch.equal(found.cpu(), state.fingerprints[name].cpu()):
            advice = "Give the state that the forward pass of the same arguments returned, or None to repeat it."
            raise ArgumentError(sentence("state", f"that of a forward pass with this {name}", "one of another", advice))


def _reason(state: State | None, where: torch.device) -> str:
    if state is None:
        return "no state of the forward pass was given"
    if state.device == where and state.saved.spent:
        return f"the state of {state.kernel!r} ({state.device}) is used up, or cannot be read by these versions"
    return f"the forward pass ran on {state.kernel!r} ({state.device})"


def _place(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    Device.probe(device)  # raises if it is not there
    place = torch.device(device)
    # Tensors name their GPU by number, and the device of a state is compared with them.
    return torch.device("cuda", torch.cuda.current_device()) if place.type == "cuda" and place.index is None else place


def _free_memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
