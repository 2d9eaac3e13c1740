"""The methods of the layers that have a single state: the drop-ins for `torch.nn.GRU` and `torch.nn.RNN`.

The classes derive from `torch.nn.RNNBase` and have these functions as methods. They cannot derive from the classes of
PyTorch that they replace, because `torch.compile` refuses to trace instances of those. Each has a `forward` of its own,
because `torch.compile` limits the number of graphs for one function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.pytorch import MODES
from gatewise.functional.differentiable import recurrent
from gatewise.nn.arguments import (
    check_layer_options,
    check_rate,
    check_sizes,
    check_state,
    check_step,
    refuse_input,
    refuse_script,
    warn_of_idle_dropout,
)
from gatewise.nn.flat_weights import flatten
from gatewise.nn.sequences import run_one, run_packed, time_first
from gatewise.nn.weight_dropout import with_dropped_weights


def initialise(
    layer: Any,
    mode: str,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool,
    batch_first: bool,
    dropout: float,
    bidirectional: bool,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
    kernel: str,
    memory: str,
    weight_dropout: float,
) -> None:
    """Check the arguments of a layer's constructor, and create its attributes and parameters.

    Args:
        layer: The layer.
        mode: The `mode` of PyTorch's layer.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers.
        bias: Whether the two bias vectors exist.
        batch_first: Whether input and output are [B, T, features].
        dropout: The probability of dropping an output between layers in training mode.
        bidirectional: Whether there is a second direction.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run.
        memory: "normal" or "lean".
        weight_dropout: The probability of dropping an element of a recurrent matrix in training mode.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        KernelRefused: No kernel is named `kernel`.
    """
    check_sizes(input_size, hidden_size, num_layers)
    check_layer_options(bias, batch_first, bidirectional, dropout, kernel, memory)
    rate = check_rate("weight_dropout", weight_dropout)
    warn_of_idle_dropout(dropout, num_layers, stacklevel=4)
    nn.RNNBase.__init__(
        layer,
        mode,
        input_size,
        hidden_size,
        num_layers=num_layers,
        bias=bias,
        batch_first=batch_first,
        bidirectional=bool(bidirectional),
        device=device,
        dtype=dtype,
    )
    layer.dropout = float(dropout)  # afterwards, because PyTorch would warn of idle dropout too
    layer.kernel, layer.memory, layer.weight_dropout = kernel, memory, rate


def run(
    layer: Any,
    input: Tensor | PackedSequence,
    hx: Tensor | None,
    lengths: Tensor | Sequence[int] | None,
    resets: Tensor | None,
) -> tuple[Tensor | PackedSequence, Tensor]:
    """Run the layers over a batch of sequences; the arguments and results are those of `forward`."""
    run_layers, states = functools.partial(_run, layer), None
    if hx is not None:
        check_state(hx)
        states = (hx,)
    if isinstance(input, PackedSequence):
        packed, (h_n,) = run_packed(run_layers, input, states, lengths, "[L*D, B, H]", resets)
        return packed, h_n
    if not isinstance(input, Tensor):
        refuse_input(input)
    if input.dim() == 2:
        y, (h_n,) = run_one(run_layers, input, states, lengths, "[L*D, H]", resets)
        return y, h_n
    if input.dim() != 3:
        arrangement = "[B, T, I]" if layer.batch_first else "[T, B, I]"
        expectation = f"{arrangement}, or [T, I] for one sequence"
        raise ShapeError(sentence("input", expectation, f"rank {input.dim()} with shape {list(input.shape)}"))
    if resets is not None and layer.batch_first:
        resets = time_first(resets, input.shape[:2])
    x = input.transpose(0, 1) if layer.batch_first else input
    y, (h_n,) = run_layers(x, states, lengths=lengths, resets=resets)
    return (y.transpose(0, 1) if layer.batch_first else y), h_n


def _run(
    layer: Any,
    x: Tensor,
    states: tuple[Tensor, ...] | None,
    batch_sizes: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]]:
    state = None
    if states is not None:
        (h0,) = states
        if h0.dim() != 3:
            raise ShapeError(sentence("hx", "a state of [L*D, B, H]", list(h0.shape)))
        state = h0, h0.new_zeros(h0.shape[0], h0.shape[1], 0)
    # Weights are looked up in every call, because parametrizations compute them and functional_call replaces them.
    weights = tuple([getattr(layer, name) for name in layer._flat_weights_names])
    if layer.weight_dropout and layer.training:
        weights = with_dropped_weights(weights, len(layer._all_weights[0]), layer.weight_dropout)
    y, h_n, _ = recurrent(
        x,
        state,
        weights,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=layer.bidirectional,
        dropout=layer.dropout if layer.training else 0.0,
        kernel=layer.kernel,
        memory=layer.memory,
        resets=resets,
        cell=MODES[layer.mode].cell,
    )
    return y, (h_n,)


def extra_repr(self: Any) -> str:
    """Return the sizes and every option that differs from its default."""
    defaults = {"nonlinearity": "tanh", "kernel": "auto", "memory": NORMAL, "weight_dropout": 0.0}
    given = [(name, getattr(self, name, default), default) for name, default in defaults.items()]
    own = [f"{name}={value}" for name, value, default in given if value != default]
    return ", ".join([nn.RNNBase.extra_repr(self), *own])


def flatten_parameters(self: Any) -> None:
    """Move the parameters into one buffer in cuDNN's order, so that cuDNN need not copy them in every call.

    This is done automatically when the layer is created, moved, converted, copied or unpickled. Call it after replacing
    parameters, as `load_state_dict(assign=True)` does. The Parameter objects and their values do not change. Nothing
    happens on other devices than CUDA, without cuDNN, or if weights are parametrised, tied to each other, of a tensor
    subclass or of several dtypes.
    """
    flatten(self, self.mode, self._flat_weights_names, len(self._all_weights[0]))


def restore(self: Any, d: dict[str, Any]) -> None:
    """Set the attributes of a layer that is copied or unpickled."""
    nn.RNNBase.__setstate__(self, {"kernel": "auto", "memory": NORMAL, "weight_dropout": 0.0, **d})
    self.flatten_parameters()


def refuse_scripting(self: nn.RNNBase) -> NoReturn:
    """Raise the error for `torch.jit.script`."""
    refuse_script(MODES[self.mode].name)


def refuse_tracing(self: nn.RNNBase, *given: object, **options: object) -> Any:
    """Raise the error for `torch.jit.trace`, which calls `_slow_forward` instead of `forward`, except for ONNX."""
    if torch.onnx.is_in_onnx_export():
        return nn.Module._slow_forward(self, *given, **options)
    return refuse_script(MODES[self.mode].name, "trace")


def check_one_step(cell: nn.RNNCellBase, input: object, hx: object) -> None:
    """Check the input and the hidden state of a single time step, for the layers that compute one.

    Args:
        cell: The layer.
        input: The input [B, I], or [I] without a batch.
        hx: The hidden state [B, H] or [H]; None for zeros.

    Raises:
        ShapeError: A rank or size does not fit.
        DtypeError: The dtype of the input differs from that of the parameters, and autocast is off.
        ArgumentError: `input` or `hx` is not a tensor.
    """
    states = None
    if hx is not None:
        check_state(hx)
        states = (hx,)
    check_step(input, states, cell.input_size, cell.hidden_size, cell.weight_ih.dtype)  # type: ignore[arg-type]
