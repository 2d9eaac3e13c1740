"""The float64 oracle: PyTorch's own layer of a cell, one at a time, with ragged batches as `PackedSequence`.

It uses none of gatewise's own mathematics. For cells that PyTorch does not have it is a loop over the cell's statement.
With resets, every episode is a sequence of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.cells import GRU, LSTM, RNN, Cell, Regularised
from gatewise.contract.masks import masks_of_cell
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.testing.loop import LoopLayer


def oracle(
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Result, InputGradients | None]:
    """Return outputs and input gradients in float64.

    Args:
        problem: The description of the call; its dtype is ignored.
        inputs: The inputs in any dtype, on any device.
        gradients: The gradients of the outputs; None computes no input gradients.
        device: The device of the computation; on a GPU it is done by cuDNN.
    """
    return reference(problem, inputs, gradients, dtype=torch.float64, device=device)


def reference(
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Result, InputGradients | None]:
    """Return PyTorch's result for a problem, in a given dtype on a given device.

    Args:
        problem: The description of the call; its dtype is ignored.
        inputs: The inputs in any dtype, on any device; they are converted first.
        gradients: The gradients of the outputs; None computes no input gradients.
        dtype: The dtype of the computation.
        device: The device of the computation.
    """
    with torch.enable_grad():

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype).contiguous().clone().requires_grad_(gradients is not None)

        x, h0, c0 = leaf(inputs.x), leaf(inputs.h0), leaf(inputs.c0)
        modules = _modules(problem, inputs, dtype, device, learned=gradients is not None)
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
    problem: Problem, inputs: Inputs, dtype: torch.dtype, device: torch.device | str, *, learned: bool
) -> list[_Module]:
    modules: list[_Module] = []
    row_of_token = _row_of_token(inputs).to(device) if isinstance(problem.cell, Regularised) else None
    each = problem.num_directions * problem.weights_per_direction
    for layer in range(problem.num_layers):
        values = inputs.weights[layer * each : (layer + 1) * each]
        sizes = problem.layer_input_size(layer), problem.hidden_size
        options = {"bias": problem.bias, "bidirectional": problem.bidirectional, "dtype": dtype, "device": device}
        match problem.cell:
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
    rows = None if problem.layout is Layout.DENSE and inputs.resets is None else _rows(inputs)
    finals = []
    for index, module in enumerate(modules):
        there = slice(index * problem.num_directions, (index + 1) * problem.num_directions)
        if index and problem.dropout and inputs.masks:
            scale = 1 / (1 - problem.dropout) if problem.dropout < 1 else 0.0
            x = x * inputs.masks[index - 1].to(x.device) * scale
        if rows is None or inputs.resets is None:
            x, final = _layer(module, x, h0[there], c0[there], rows)
        else:
            x, final = _by_episode(problem.cell, module, x, h0[there], c0[there], rows, inputs.resets)
        finals.append(final)
    return x, torch.cat([h for h, _ in finals]), torch.cat([c for _, c in finals])


def _called(
    module: _OfPyTorch, x: Tensor | PackedSequence, h0: Tensor, c0: Tensor
) -> tuple[Any, tuple[Tensor, Tensor]]:
    if isinstance(module, torch.nn.LSTM):
        return module(x, (h0, c0))
    y, h_n = module(x, h0)
    return y, (h_n, c0)


def _layer(
    module: _Module, x: Tensor, h0: Tensor, c0: Tensor, rows: list[list[int]] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    if isinstance(module, LoopLayer):
        return module(x, h0, c0, rows)
    output_size = (module.proj_size or module.hidden_size) * h0.shape[0]
    if rows is None:
        if x.shape[0] == 0 or x.shape[1] == 0:
            return x.new_zeros(*x.shape[:2], output_size), (h0, c0)
        return _called(module, x, h0.contiguous(), c0.contiguous())
    longest_first = sorted((row for row, tokens in enumerate(rows) if tokens), key=lambda row: -len(rows[row]))
    if not longest_first:
        return x.new_zeros(*x.shape[:-1], output_size), (h0, c0)
    steps = range(len(rows[longest_first[0]]))
    alive = [[row for row in longest_first if len(rows[row]) > step] for step in steps]
    index = torch.tensor([rows[row][step] for step in steps for row in alive[step]], device=x.device)
    there = torch.tensor(longest_first, device=x.device)
    flat = x.reshape(-1, x.shape[-1])
    packed = PackedSequence(flat.index_select(0, index), torch.tensor([len(some) for some in alive], device="cpu"))
    out, (h, c) = _called(module, packed, h0.index_select(1, there), c0.index_select(1, there))
    y = flat.new_zeros(flat.shape[0], output_size).index_copy(0, index, out.data)
    return y.view(*x.shape[:-1], output_size), (h0.index_copy(1, there, h), c0.index_copy(1, there, c))


def _by_episode(
    cell: Cell, module: _Module, x: Tensor, h0: Tensor, c0: Tensor, rows: list[list[int]], resets: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    begins = resets.flatten().tolist()
    episodes: list[list[int]] = []
    ends: list[tuple[int, int] | None] = []  # each row's first and last episode; None for a row without steps
    for own in rows:
        starts = [place for place, token in enumerate(own) if place == 0 or begins[token]]
        ends.append((len(episodes), len(episodes) + len(starts) - 1) if own else None)
        episodes += [own[start:stop] for start, stop in itertools.pairwise([*starts, len(own)])]
    if not episodes:
        return _layer(module, x, h0, c0, rows)

    def initial(states: Tensor, names: Sequence[str]) -> Tensor:
        # The forward direction enters a row at its first episode, unless that is a reset, the reverse one at its last.
        parts = states[0, 0].chunk(len(names)) if names else ()
        values = [torch.full_like(part, cell.initial_value(name)) for name, part in zip(names, parts, strict=True)]
        fresh = torch.cat(values) if values else states.new_zeros(states.shape[2])
        found = [[fresh] * len(episodes) for _ in states]
        for row, of_row in enumerate(ends):
            for direction, own in enumerate(found):
                if of_row is not None and (direction == 1 or not begins[rows[row][0]]):
                    own[of_row[direction]] = states[direction, row]
        return torch.stack([torch.stack(own) for own in found])

    def final(after: Tensor, before: Tensor, direction: int, row: int) -> Tensor:
        of_row = ends[row]
        return before[direction, row] if of_row is None else after[direction, of_row[1 - direction]]

    def finals(after: Tensor, before: Tensor) -> Tensor:
        directions, batch = range(before.shape[0]), range(before.shape[1])
        return torch.stack(
            [torch.stack([final(after, before, direction, row) for row in batch]) for direction in directions]
        )

    y, (h_n, c_n) = _layer(module, x, initial(h0, ["h"]), initial(c0, cell.states), episodes)
    return y, (finals(h_n, h0), finals(c_n, c0))


def _row_of_token(inputs: Inputs) -> Tensor:
    # For each step in the flattened input, the index of its sequence; 0 in the padding.
    found = torch.zeros(inputs.x.shape[:-1].numel(), dtype=torch.int64, device="cpu")
    for row, tokens in enumerate(_rows(inputs)):
        found[tokens] = row
    return found


def _rows(inputs: Inputs) -> list[list[int]]:
    # For each sequence, the indices of its steps in the flattened input.
    if inputs.batch_sizes is not None:
        rows: list[list[int]] = [[] for _ in range(inputs.h0.shape[1])]
        token = 0
        for alive in inputs.batch_sizes.tolist():
            for row in range(alive):
                rows[row].append(token)
                token += 1
        return rows
    time, batch = inputs.x.shape[:2]
    lengths = [time] * batch if inputs.lengths is None else inputs.lengths.tolist()
    return [[step * batch + row for step in range(length)] for row, length in enumerate(lengths)]
