"""Calls in graphs that leave Python: those of `torch.export`, and with it of AOTInductor, and of `torch.onnx.export`.

Such a graph runs where gatewise may not be installed. It therefore consists of PyTorch's or ONNX's own operators of
whole layers. Where there is none for a call, plain operators compute it step by step; if the number of steps is
variable, PyTorch's operator `scan` repeats one step.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gatewise.cells import Cell, is_shipped
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.pytorch import in_pytorch, pytorch_layer
from gatewise.contract.saved import Inputs
from gatewise.functional import onnx_operators
from gatewise.functional.arguments import described_while_traced
from gatewise.functional.lengths import bounded
from gatewise.functional.passes import in_plain_pytorch, with_masks, without_autocast
from gatewise.functional.weights import Structure
from gatewise.selection import AUTO

# Whether PyTorch's operator `scan` can be exported and trained: 2.10 and 2.12 export it, but compute wrong gradients.
_SCANS = torch.__version__ >= "2.13"


def exported(
    found: Structure,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    flat: tuple[Tensor, ...],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    dropout: float,
    kernel: str,
    cell: Cell,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Put a call into an exported graph by operators that are not gatewise's.

    Args:
        found: The structure of the weights.
        x: The input [T, B, I], or [N, I] with `batch_sizes`.
        h0: The initial hidden state [L*D, B, R].
        c0: The other initial states side by side [L*D, B, S*H].
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None.
        batch_sizes: The batch size at each step [T] of a packed batch, or None.
        dropout: The probability of dropping an output between layers.
        kernel: The name of the preferred kernel, or "auto".
        cell: The cell.
        resets: The steps at which episodes begin [T, B], or None.

    Returns:
        y, h_n and c_n, as of `recurrent`; None where the graph shall have gatewise's operator: where a kernel is named,
        for a packed batch, and where no other operators can express the call.

    Raises:
        ArgumentError: The graph is one of ONNX, or the cell is not a shipped one, and the call cannot be expressed.
    """
    to_onnx, dynamo = _in_onnx_export(), torch.compiler.is_dynamo_compiling()
    if not to_onnx and kernel != AUTO:
        return None
    packed = batch_sizes is not None
    plain = not packed and resets is None
    if to_onnx and plain and not found.proj_size:
        operator = onnx_operators.onnx_operator(cell)
        if operator is not None:
            return onnx_operators.layers(operator, cell, found, x, h0, c0, flat, lengths, dropout)
    fixed = not packed and _is_fixed(x.shape[0])
    if fixed and not to_onnx and plain and lengths is None and in_pytorch(cell):
        return by_pytorch(found, x, h0, c0, flat, None, dropout, cell)
    if not packed and not dynamo and (fixed or _SCANS):
        return in_steps(found, x, h0, c0, flat, lengths, dropout, cell, resets)
    if to_onnx and packed:
        refuse_packed_batch()
    if to_onnx or not is_shipped(cell):
        expectation = (
            "one of a cell that the graph has an operator for, or of a fixed number of steps with strict=False"
        )
        got = f"the cell {cell.name} with {'strict=True' if dynamo else 'a variable number of steps'}"
        advice = "Leave dimension T of the input out of `dynamic_shapes`."
        raise ArgumentError(sentence("call", expectation, got, "Export with strict=False." if dynamo else advice))
    return None


def refuse_packed_batch() -> NoReturn:
    """Raise the error for a packed batch, whose sizes are values that a graph does not know.

    Raises:
        ArgumentError: Always.
    """
    advice = "Give the padded tensor with `lengths`."
    raise ArgumentError(sentence("input", "a padded batch in an exported graph", "a PackedSequence", advice))


def by_pytorch(
    found: Structure,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    flat: tuple[Tensor, ...],
    batch_sizes: Tensor | None,
    dropout: float,
    cell: Cell,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call PyTorch's operator of whole layers, as PyTorch's own layers do.

    Args:
        found: The structure of the weights.
        x: The input [T, B, I], or [N, I] with `batch_sizes`.
        h0: The initial hidden state [L*D, B, R].
        c0: The initial cell state [L*D, B, H]; [L*D, B, 0] for a cell without.
        flat: The weights in torch's flat order.
        batch_sizes: The batch size at each step [T] of a packed batch, or None.
        dropout: The probability of dropping an output between layers.
        cell: The cell, for which PyTorch must have an operator.

    Returns:
        y, h_n and c_n, as of `recurrent`.
    """
    operator = getattr(torch, pytorch_layer(cell).mode.lower())
    # cuDNN refuses a backward pass unless it was told that one follows.
    # `torch.jit.trace` compares a trace with one that it makes without gradients.
    follows = torch.is_grad_enabled() or torch._C._is_tracing()
    train = follows and any(tensor.requires_grad for tensor in (x, h0, c0, *flat))
    options = found.bias, found.num_layers, float(dropout), train, found.bidirectional
    state = (h0, c0) if cell.states else h0
    with without_autocast(x):
        if batch_sizes is None:
            y, h_n, *c_n = operator(x, state, flat, *options, False)
        else:
            y, h_n, *c_n = operator(x, batch_sizes, state, flat, *options)
    return y, h_n, c_n[0] if c_n else c0


def in_steps(
    found: Structure,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    flat: tuple[Tensor, ...],
    lengths: Tensor | None,
    dropout: float,
    cell: Cell,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a call by the reference's operators: every step, or one step in the operator `scan` if T is variable."""
    problem = described_while_traced(x, h0, found, lengths, None, dropout, NORMAL, cell, resets is not None)
    if lengths is not None:
        # Values are not known yet, so that a length out of range cannot raise an error. NaN is computed, because
        # PyTorch 2.7 and 2.8 save no program that contains it as a number.
        lengths, h0 = bounded(lengths.to(x.device), problem.time, h0, h0.new_zeros(()) / 0)
    inputs = Inputs(x, h0, c0, flat, lengths, resets=None if resets is None else resets.to(torch.bool))
    with without_autocast(x):
        result = in_plain_pytorch(problem, with_masks(problem, inputs))
    return result.y, result.h_n, result.c_n


def _is_fixed(size: int) -> bool:
    """Return whether a size is a number in the graph, instead of a symbol."""
    # The module is loaded wherever a graph is traced, and loading it takes longer than gatewise itself.
    from torch.fx.experimental import symbolic_shapes

    # PyTorch 2.7 and older have only the second function, which takes a symbol of a single possible value for variable.
    return getattr(symbolic_shapes, "has_static_value", symbolic_shapes.is_concrete_int)(size)


def _in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


# What `torch.compiler.assume_constant_result` does: to `torch.compile` the function of PyTorch is always false.
_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]
