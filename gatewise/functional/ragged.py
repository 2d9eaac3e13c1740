"""From the layout a user gives sequences in to the layout a kernel reads, and back, for values and gradients.

Kernels state which layouts they read. A kernel that reads packed batches (cuDNN, PyTorch's native loop) serves lengths
on the CPU through `_Packing`; a kernel that reads lengths serves packed batches through `_Padding`. Each conversion is
linear, so one object has the four maps: inputs in, results out, output gradients in, input gradients out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result


class Conversion(Protocol):
    """The maps between a user's layout and a kernel's."""

    def problem(self, problem: Problem) -> Problem:
        """The problem as the kernel sees it."""
        ...

    def inputs(self, inputs: Inputs) -> Inputs:
        """The user's inputs in the kernel's layout."""
        ...

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        """The kernel's result in the user's layout."""
        ...

    def result_in(self, result: Result) -> Result:
        """The user's result in the kernel's layout again; the final states stay, no backward pass reads them."""
        ...

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        """The gradients of the outputs in the kernel's layout."""
        ...

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        """The gradients of the inputs in the user's layout."""
        ...


def conversion(problem: Problem, inputs: Inputs, layouts: frozenset[Layout]) -> Conversion | None:
    """Return the conversion to a layout that a kernel reads, or None when it reads the user's.

    Args:
        problem: The user's problem.
        inputs: The user's inputs.
        layouts: What the kernel reads.
    """
    if problem.layout in layouts:
        lengths = inputs.lengths
        return None if lengths is None or lengths.device == inputs.x.device else _LengthsToDevice(lengths, inputs.x)
    if inputs.lengths is not None and Layout.PACKED in layouts:
        return _Packing(inputs.lengths, problem.time, inputs.x.device)
    if inputs.batch_sizes is not None:
        return _Padding(inputs.batch_sizes, problem.time, problem.batch, inputs.x.device)
    message = f"no conversion from {problem.layout} to any of {sorted(layout.name for layout in layouts)}"
    raise NotImplementedError(message)


class _Tokens:
    """Where the tokens of a packed batch [N, F] stand in the padded one [T, B, F]."""

    def __init__(self, places: Tensor, time: int, batch: int) -> None:
        self._places = places
        self._shape = (time, batch)

    def packed(self, padded: Tensor) -> Tensor:
        return padded.reshape(-1, padded.shape[-1]).index_select(0, self._places)

    def padded(self, packed: Tensor) -> Tensor:
        time, batch = self._shape
        flat = packed.new_zeros(time * batch, packed.shape[-1])
        return flat.index_copy_(0, self._places, packed).view(time, batch, packed.shape[-1])


class _LengthsToDevice:
    """Lengths given on the CPU, copied beside x without waiting."""

    def __init__(self, lengths: Tensor, x: Tensor) -> None:
        self._lengths = lengths.to(x.device, non_blocking=True)

    def problem(self, problem: Problem) -> Problem:
        return problem

    def inputs(self, inputs: Inputs) -> Inputs:
        return inputs._replace(lengths=self._lengths)

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        return result

    def result_in(self, result: Result) -> Result:
        return result

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        return gradients

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        return gradients


class _Packing:
    """Padded sequences with lengths, read as a packed batch: longest first, rows of length 0 left out."""

    def __init__(self, lengths: Tensor, time: int, device: torch.device) -> None:
        self._batch = len(lengths)
        order = torch.argsort(lengths, descending=True, stable=True)
        alive = int((lengths > 0).sum())
        longest_first = lengths[order]
        steps = torch.arange(int(longest_first[0]) if alive else 0, device="cpu")
        self._batch_sizes = (longest_first[None, :] > steps[:, None]).sum(1)
        rows = order[None, :].expand(len(steps), -1) + steps[:, None] * len(lengths)
        token = longest_first[None, :] > steps[:, None]
        self._tokens = _Tokens(rows[token].to(device, non_blocking=True), time, len(lengths))
        self._rows = order[:alive].to(device, non_blocking=True)

    def problem(self, problem: Problem) -> Problem:
        return problem.replace(layout=Layout.PACKED, time=len(self._batch_sizes), batch=len(self._rows))

    def inputs(self, inputs: Inputs) -> Inputs:
        return Inputs(
            self._tokens.packed(inputs.x),
            inputs.h0.index_select(1, self._rows),
            inputs.c0.index_select(1, self._rows),
            inputs.weights,
            None,
            self._batch_sizes,
            tuple(self._tokens.packed(mask) for mask in inputs.masks),
        )

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        return Result(
            self._tokens.padded(result.y),
            inputs.h0.index_copy(1, self._rows, result.h_n),
            inputs.c0.index_copy(1, self._rows, result.c_n),
            result.kept,
        )

    def result_in(self, result: Result) -> Result:
        return result._replace(y=self._tokens.packed(result.y))

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        return OutputGradients(
            None if gradients.y is None else self._tokens.packed(gradients.y),
            None if gradients.h_n is None else gradients.h_n.index_select(1, self._rows),
            None if gradients.c_n is None else gradients.c_n.index_select(1, self._rows),
        )

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        return InputGradients(
            None if gradients.x is None else self._tokens.padded(gradients.x),
            self._state_gradient(gradients.h0, above.h_n),
            self._state_gradient(gradients.c0, above.c_n),
            gradients.weights,
        )

    def _state_gradient(self, inner: Tensor | None, passed_through: Tensor | None) -> Tensor | None:
        # A row of length 0 hands its state through unchanged, and so its gradient.
        if inner is None:
            return None
        if passed_through is None:
            passed_through = inner.new_zeros(inner.shape[0], self._batch, inner.shape[2])
        return passed_through.index_copy(1, self._rows, inner)


class _Padding:
    """A packed batch, read as padded sequences with lengths."""

    def __init__(self, batch_sizes: Tensor, time: int, batch: int, device: torch.device) -> None:
        alive = torch.arange(batch, device="cpu")[None, :] < batch_sizes[:, None]
        self._lengths = alive.sum(0).to(device, non_blocking=True)
        self._tokens = _Tokens(alive.flatten().nonzero().squeeze(1).to(device, non_blocking=True), time, batch)

    def problem(self, problem: Problem) -> Problem:
        return problem.replace(layout=Layout.HOST_LENGTHS)

    def inputs(self, inputs: Inputs) -> Inputs:
        return inputs._replace(
            x=self._tokens.padded(inputs.x),
            lengths=self._lengths,
            batch_sizes=None,
            masks=tuple(self._tokens.padded(mask) for mask in inputs.masks),
        )

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        return result._replace(y=self._tokens.packed(result.y))

    def result_in(self, result: Result) -> Result:
        return result._replace(y=self._tokens.padded(result.y))

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        return gradients._replace(y=None if gradients.y is None else self._tokens.padded(gradients.y))

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        return gradients._replace(x=None if gradients.x is None else self._tokens.packed(gradients.x))
