"""Packing of padded sequences and padding of packed ones, for kernels that read the other layout.

Kernels state which layouts they read. Sequences with lengths on the CPU are packed for a kernel that reads packed
batches (cuDNN, PyTorch's native loop); packed batches are padded for a kernel that reads lengths. Each conversion is
linear, so one object converts inputs, results and the gradients of both.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result


class Conversion(Protocol):
    """A conversion between the caller's layout and a layout that the kernel reads."""

    def problem(self, problem: Problem) -> Problem:
        """Return the problem in the kernel's layout."""
        ...

    def inputs(self, inputs: Inputs) -> Inputs:
        """Return the caller's inputs in the kernel's layout."""
        ...

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        """Return the kernel's result in the caller's layout."""
        ...

    def result_in(self, result: Result) -> Result:
        """Return the caller's result in the kernel's layout, except the final states, which no backward pass reads."""
        ...

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        """Return the gradients of the outputs in the kernel's layout."""
        ...

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        """Return the gradients of the inputs in the caller's layout."""
        ...


def conversion(problem: Problem, inputs: Inputs, layouts: frozenset[Layout]) -> Conversion | None:
    """Return the conversion to a layout that the kernel reads; None when it reads the caller's.

    Args:
        problem: The problem in the caller's layout.
        inputs: The inputs in the caller's layout.
        layouts: The layouts that the kernel reads.
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
    """The places of the tokens of a packed batch [N, F] in the padded one [T, B, F]."""

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
    """The copy of lengths from the CPU to the device of x, which does not wait for the device."""

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
    """Padded sequences with lengths as a packed batch: the longest first, without the rows of length 0."""

    def __init__(self, lengths: Tensor, time: int, device: torch.device) -> None:
        # NumPy takes a third of the time of PyTorch's operators for the few numbers that a batch has lengths.
        each = lengths.numpy()
        self._batch = batch = len(each)
        order = (-each).argsort(kind="stable")
        alive = int(np.count_nonzero(each))
        if alive < batch:
            order = order[:alive]
        each = each[order]
        steps = np.arange(each[0] if alive else 0)[:, None]
        running = each > steps
        self._batch_sizes = torch.from_numpy(running.sum(1, dtype=np.int64))
        # The places of the packed tokens, the rows in their order, and the place of each of the caller's rows among
        # them, where every row has one.
        found = [(steps * batch + order)[running], order, *([order.argsort()] if alive == batch else [])]
        indices = [torch.from_numpy(places) for places in found]
        if device.type != "cpu":
            indices = [places.to(device, non_blocking=True) for places in indices]
        self._tokens, self._rows = _Tokens(indices[0], time, batch), indices[1]
        self._back = indices[2] if alive == batch else None

    def problem(self, problem: Problem) -> Problem:
        return _packed(problem, *self._batch_sizes.shape, *self._rows.shape)

    def inputs(self, inputs: Inputs) -> Inputs:
        return Inputs(
            self._tokens.packed(inputs.x),
            inputs.h0.index_select(1, self._rows),
            inputs.c0.index_select(1, self._rows),
            inputs.weights,
            None,
            self._batch_sizes,
            tuple([self._tokens.packed(mask) for mask in inputs.masks]),
        )

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        return Result(
            self._tokens.padded(result.y),
            self._state_out(result.h_n, inputs.h0),
            self._state_out(result.c_n, inputs.c0),
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

    def _state_out(self, found: Tensor, initial: Tensor) -> Tensor:
        # The state of a row of length 0 stays the initial one.
        return initial.index_copy(1, self._rows, found) if self._back is None else found.index_select(1, self._back)

    def _state_gradient(self, inner: Tensor | None, passed_through: Tensor | None) -> Tensor | None:
        # The state of a row of length 0 does not change, so its gradient is the one of the final state.
        if inner is None:
            return None
        if self._back is not None:
            return inner.index_select(1, self._back)
        if passed_through is None:
            passed_through = inner.new_zeros(inner.shape[0], self._batch, inner.shape[2])
        return passed_through.index_copy(1, self._rows, inner)


# Equal calls get one `Problem` object, which makes looking up what was found for it fast.
@functools.lru_cache(maxsize=1024)
def _packed(problem: Problem, time: int, batch: int) -> Problem:
    return problem.replace(layout=Layout.PACKED, time=time, batch=batch)


class _Padding:
    """A packed batch as padded sequences with lengths."""

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
            # Masks of outputs and steps are [N, F]; the mask of hidden states has the shape of a state [L*D, B, R].
            masks=tuple(self._tokens.padded(mask) if mask.dim() == 2 else mask for mask in inputs.masks),
        )

    def result_out(self, result: Result, inputs: Inputs) -> Result:
        return result._replace(y=self._tokens.packed(result.y))

    def result_in(self, result: Result) -> Result:
        return result._replace(y=self._tokens.padded(result.y))

    def gradients_in(self, gradients: OutputGradients) -> OutputGradients:
        return gradients._replace(y=None if gradients.y is None else self._tokens.padded(gradients.y))

    def gradients_out(self, gradients: InputGradients, above: OutputGradients) -> InputGradients:
        return gradients._replace(x=None if gradients.x is None else self._tokens.packed(gradients.x))
