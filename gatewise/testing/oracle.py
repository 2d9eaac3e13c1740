"""The float64 oracle: the layers of a call one after another, computed by PyTorch's operators without cuDNN.

What computes a layer depends on the call:

- cells that PyTorch has, all sequences of one length, no resets: `torch.nn.LSTM`, `GRU` or `RNN`;
- the same cells with lengths or resets: gatewise's loop over steps (`loop.py`), of `torch.lstm_cell`, `torch.gru_cell`,
  `torch.rnn_tanh_cell` and `torch.rnn_relu_cell`. `torch.lstm_cell` has no projection; a step with one is the formula
  of an LSTM that is written in `loop.py`;
- all other cells, and those with masks: the same loop, of gatewise's own statement of the cell.

With resets, every episode is a sequence of its own. Dropout between layers multiplies by the masks of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.cells import GRU, LSTM, RNN, Cell, Regularised
from gatewise.contract.masks import masks_of_cell
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.testing.loop import LoopLayer
from gatewise.testing.sequences import Batch, Episodes, Sequences


def oracle(
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None = None,
    device: torch.device | str = "cpu",
    *,
    stated: bool = False,
) -> tuple[Result, InputGradients | None]:
    """Return outputs and input gradients in float64.

    Args:
        problem: The description of the call; its dtype is ignored.
        inputs: The inputs in any dtype, on any device.
        gradients: The gradients of the outputs; None computes no input gradients.
        device: The device of the computation.
        stated: Whether steps are gatewise's statement of the cell even if PyTorch has the cell; not for projections.
    """
    with _without_cudnn():
        return reference(problem, inputs, gradients, dtype=torch.float64, device=device, stated=stated)


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def reference(
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    stated: bool = False,
) -> tuple[Result, InputGradients | None]:
    """Return PyTorch's result for a problem, in a given dtype on a given device.

    Layers are computed as by the oracle, except that on a GPU with cuDNN, PyTorch's layers get calls with lengths or
    resets as a `PackedSequence`, also with projections. The other layers are loops of PyTorch's operators that are
    written in gatewise.

    Args:
        problem: The description of the call; its dtype is ignored.
        inputs: The inputs in any dtype, on any device; they are converted first.
        gradients: The gradients of the outputs; None computes no input gradients.
        dtype: The dtype of the computation.
        device: The device of the computation.
        stated: Whether steps are gatewise's statement of the cell even if PyTorch has the cell; not for projections.
    """
    with torch.enable_grad():

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype).contiguous().clone().requires_grad_(gradients is not None)

        x, h0, c0 = leaf(inputs.x), leaf(inputs.h0), leaf(inputs.c0)
        modules = _modules(problem, inputs, dtype, device, learned=gradients is not None, stated=stated)
        y, h_n, c_n = _stack(problem, inputs, x, h0, c0, modules)
        result = Result(y.detach(), h_n.detach(), c_n.detach())
        if gradients is None:
            return result, None
        weights = [weight for module in modules for weights in module.all_weights for weight in weights]
        leaves = [x, h0, c0, *weights]
        given = [
            (output, gradient.detach().to(device, dtype))
            for output, gradient in zip((y, h_n, c_n), gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not given:
            found = [torch.zeros_like(tensor) for tensor in leaves]
        else:
            outputs, above = zip(*given, strict=True)
            found = torch.autograd.grad(outputs, leaves, above, materialize_grads=True)
    return result, InputGradients(found[0], found[1], found[2], tuple(found[3:]))


_OfPyTorch = torch.nn.LSTM | torch.nn.GRU | torch.nn.RNN
_Module = _OfPyTorch | LoopLayer


def _modules(
    problem: Problem, inputs: Inputs, dtype: torch.dtype, device: torch.device | str, *, learned: bool, stated: bool
) -> list[_Module]:
    modules: list[_Module] = []
    row_of_token = None
    if isinstance(problem.cell, Regularised):
        row_of_token = Batch.of(inputs).row_of_token(inputs.x.shape[:-1].numel()).to(device)
    each = problem.num_directions * problem.weights_per_direction
    for layer in range(problem.num_layers):
        values = inputs.weights[layer * each : (layer + 1) * each]
        sizes = problem.layer_input_size(layer), problem.hidden_size
        options = {"bias": problem.bias, "bidirectional": problem.bidirectional, "dtype": dtype, "device": device}
        match None if stated else problem.cell:
            case GRU():
                module = torch.nn.GRU(*sizes, **options)
            case RNN(nonlinearity=nonlinearity):
                module = torch.nn.RNN(*sizes, nonlinearity=nonlinearity, **options)
            case LSTM():
                module = torch.nn.LSTM(*sizes, **options, proj_size=problem.proj_size)
            case _:
                leaves = [value.detach().to(device, dtype).clone().requires_grad_(learned) for value in values]
                masks = masks_of_cell(problem, [mask.to(device) for mask in inputs.masks], layer, layer)
                modules.append(LoopLayer(problem, leaves, masks, row_of_token))
                continue
        with torch.no_grad():
            own = [weight for direction in module.all_weights for weight in direction]
            for weight, value in zip(own, values, strict=True):
                weight.copy_(value)
        modules.append(module)
    return modules


def _stack(
    problem: Problem, inputs: Inputs, x: Tensor, h0: Tensor, c0: Tensor, modules: Sequence[_Module]
) -> tuple[Tensor, Tensor, Tensor]:
    batch = Batch.of(inputs)
    dense_rows = problem.layout is Layout.DENSE and inputs.resets is None
    episodes = None if inputs.resets is None else Episodes.of(batch, inputs.resets)
    rows = batch.sequences().to(x.device) if episodes is None else episodes.sequences.to(x.device)
    finals = []
    for index, module in enumerate(modules):
        there = slice(index * problem.num_directions, (index + 1) * problem.num_directions)
        if index and problem.dropout and inputs.masks:
            scale = 1 / (1 - problem.dropout) if problem.dropout < 1 else 0.0
            x = x * inputs.masks[index - 1].to(x.device) * scale
        if not isinstance(module, LoopLayer) and not dense_rows and not _runs_cudnn(x):
            # PyTorch's layers take a time quadratic in T for a `PackedSequence` without cuDNN.
            weights = [weight for own in module.all_weights for weight in own]
            module = LoopLayer(problem, weights, of_pytorch=True)
        if episodes is not None and episodes.number:
            x, final = _by_episode(problem.cell, module, x, h0[there], c0[there], rows, episodes)
        elif dense_rows and not isinstance(module, LoopLayer):
            x, final = _dense_layer(module, x, h0[there], c0[there])
        else:
            x, final = _layer(module, x, h0[there], c0[there], rows)
        finals.append(final)
    return x, torch.cat([h for h, _ in finals]), torch.cat([c for _, c in finals])


def _runs_cudnn(x: Tensor) -> bool:
    return x.is_cuda and torch.backends.cudnn.enabled


def _called(
    module: _OfPyTorch, x: Tensor | PackedSequence, h0: Tensor, c0: Tensor
) -> tuple[Any, tuple[Tensor, Tensor]]:
    if isinstance(module, torch.nn.LSTM):
        return module(x, (h0, c0))
    y, h_n = module(x, h0)
    return y, (h_n, c0)


def _dense_layer(module: _OfPyTorch, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    if x.shape[0] == 0 or x.shape[1] == 0:
        return x.new_zeros(*x.shape[:2], _output_size(module, h0)), (h0, c0)
    return _called(module, x, h0.contiguous(), c0.contiguous())


def _layer(module: _Module, x: Tensor, h0: Tensor, c0: Tensor, rows: Sequences) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    if isinstance(module, LoopLayer):
        return module(x, h0, c0, rows)
    output_size = _output_size(module, h0)
    if not rows.sizes:
        return x.new_zeros(*x.shape[:-1], output_size), (h0, c0)
    flat = x.reshape(-1, x.shape[-1])
    packed = PackedSequence(flat.index_select(0, rows.tokens), torch.tensor(rows.sizes, device="cpu"))
    out, (h, c) = _called(module, packed, h0.index_select(1, rows.order), c0.index_select(1, rows.order))
    y = flat.new_zeros(flat.shape[0], output_size).index_copy(0, rows.tokens, out.data)
    return y.view(*x.shape[:-1], output_size), (h0.index_copy(1, rows.order, h), c0.index_copy(1, rows.order, c))


def _output_size(module: _OfPyTorch, h0: Tensor) -> int:
    return (module.proj_size or module.hidden_size) * h0.shape[0]


def _by_episode(
    cell: Cell, module: _Module, x: Tensor, h0: Tensor, c0: Tensor, sequences: Sequences, episodes: Episodes
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    # The forward direction enters a row at its first episode, unless that is a reset, the reverse one at its last.
    forward = episodes.first[episodes.continued], episodes.rows[episodes.continued]
    entered = [tuple(index.to(x.device) for index in own) for own in (forward, (episodes.last, episodes.rows))]
    left = episodes.last.to(x.device), episodes.first.to(x.device)
    there = episodes.rows.to(x.device)

    def initial(states: Tensor, names: Sequence[str]) -> Tensor:
        parts = states[0, :1].chunk(len(names), -1) if names else ()
        values = [torch.full_like(part, cell.initial_value(name)) for name, part in zip(names, parts, strict=True)]
        fresh = torch.cat(values, -1) if values else states.new_zeros(1, states.shape[2])
        fresh = fresh.detach().expand(episodes.number, -1)
        each = zip(states, entered, strict=False)
        return torch.stack([fresh.index_copy(0, at, own.index_select(0, rows)) for own, (at, rows) in each])

    def finals(after: Tensor, before: Tensor) -> Tensor:
        each = zip(before, after, left, strict=False)
        return torch.stack([own.index_copy(0, there, end.index_select(0, at)) for own, end, at in each])

    y, (h_n, c_n) = _layer(module, x, initial(h0, ["h"]), initial(c0, cell.states), sequences)
    return y, (finals(h_n, h0), finals(c_n, c0))
