"""The two sides of a comparison: gatewise.LSTM and torch.nn.LSTM on the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gatewise.benchmarks.lstm.call import Call, module_of
from gatewise.contract.problem import LEAN
from gatewise.nn import LSTM

Outputs = tuple[Tensor, Tensor, Tensor]

RIVAL = "nn.LSTM"


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A layer and what it is called with; what is checked and what is timed are the same two calls.

    Attributes:
        module: The layer.
        x: Input, as this side takes it: padded, or the data of a packed batch.
        h0: Initial hidden state.
        c0: Initial cell state.
        given: Gradients of output (arranged as x), final hidden and final cell state.
        call: Computes (y arranged as x, h_n, c_n).
        padded: Brings a tensor arranged as x to [T, B, features], zero after the ends.
        leaves: Everything that gets a gradient: x, h0, c0 and the weights.
        held_bytes: What its calls leave allocated for the next ones, by the kernel's statement.
    """

    module: nn.Module
    x: Tensor
    h0: Tensor
    c0: Tensor
    given: Outputs
    call: Callable[[], Outputs]
    padded: Callable[[Tensor], Tensor]
    leaves: tuple[Tensor, ...]
    held_bytes: int = 0

    def prepare(self, training: bool) -> None:
        """Set the layer's mode and say of the inputs whether they need a gradient."""
        self.module.train(training)
        for tensor in (self.x, self.h0, self.c0):
            tensor.requires_grad_(training)

    def infer(self) -> None:
        """Compute the outputs; to be called without autograd."""
        self.call()

    def train(self) -> None:
        """Compute the outputs and every gradient there is: of input, initial states and weights."""
        self.forget()
        torch.autograd.backward(self.call(), self.given)

    def forget(self) -> None:
        """Drop the gradients of an earlier step."""
        for tensor in self.leaves:
            tensor.grad = None

    def evidence(self, training: bool) -> dict[str, Tensor]:
        """Return what one call computes, by name: y, h_n, c_n; in training also dx, dh0, dc0 and dweight_ih_l0..."""
        self.prepare(training)
        self.forget()
        with torch.set_grad_enabled(training):
            outputs = self.call()
            if training:
                torch.autograd.backward(outputs, self.given)
        y, h_n, c_n = (output.detach() for output in outputs)
        found = {"y": self.padded(y), "h_n": h_n, "c_n": c_n}
        if training:
            found |= {"dx": self.padded(_gradient(self.x)), "dh0": _gradient(self.h0), "dc0": _gradient(self.c0)}
            found |= {f"d{name}": _gradient(weight) for name, weight in self.module.named_parameters()}
        self.forget()
        return found

    def owned_bytes(self, training: bool) -> int:
        """Return the bytes of the outputs, and in training of every gradient: what no way can do without."""
        y_elements = self.given[0].numel()
        count = y_elements + self.h0.numel() + self.c0.numel()
        if training:
            count += sum(tensor.numel() for tensor in self.leaves)
        return count * self.x.element_size()


def gatewise_side(call: Call, dtype: torch.dtype, kernel: str) -> Side:
    """Make gatewise's side, on a kernel, "auto" or `LEAN`; a ragged batch stays padded, its lengths on the device."""
    options = {"memory": LEAN} if kernel == LEAN else {"kernel": kernel}
    module = _module(LSTM, call, dtype, **options)
    x, h0, c0, dy, dh, dc = _tensors(call, dtype)
    lengths = None if call.lengths is None else call.lengths.to(x.device)

    def run() -> Outputs:
        y, (h_n, c_n) = module(x, (h0, c0), lengths)
        return y, h_n, c_n

    return Side(module, x, h0, c0, (dy, dh, dc), run, lambda tensor: tensor, (x, h0, c0, *module.parameters()))


def rival_side(call: Call, dtype: torch.dtype) -> Side:
    """Make nn.LSTM's side; a ragged batch is a `PackedSequence`, packed before anything is timed."""
    module = _module(nn.LSTM, call, dtype)
    x, h0, c0, dy, dh, dc = _tensors(call, dtype)
    lengths, time = call.lengths, call.case.time
    if lengths is None:

        def run() -> Outputs:
            y, (h_n, c_n) = module(x, (h0, c0))
            return y, h_n, c_n

        return Side(module, x, h0, c0, (dy, dh, dc), run, lambda tensor: tensor, (x, h0, c0, *module.parameters()))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    data, *arrangement = packed

    def run_packed() -> Outputs:
        y, (h_n, c_n) = module(packed, (h0, c0))
        return y.data, h_n, c_n

    def padded(tensor: Tensor) -> Tensor:
        return pad_packed_sequence(PackedSequence(tensor, *arrangement), total_length=time)[0]

    packed_dy = pack_padded_sequence(dy, lengths, enforce_sorted=False).data
    return Side(module, data, h0, c0, (packed_dy, dh, dc), run_packed, padded, (data, h0, c0, *module.parameters()))


def _module(kind: type[nn.Module], call: Call, dtype: torch.dtype, **options: object) -> nn.Module:
    with torch.device(call.x.device):
        module = module_of(kind, call.case, dtype=dtype, **options)
    module.load_state_dict(call.weights)
    return module


def _tensors(call: Call, dtype: torch.dtype) -> list[Tensor]:
    # Copies: one side's flags and gradients are not the other's.
    return [tensor.to(dtype, copy=True) for tensor in (call.x, call.h0, call.c0, call.dy, call.dh, call.dc)]


def _gradient(tensor: Tensor) -> Tensor:
    # A gradient that was forgotten is wrong, as one that is not a number.
    return torch.full_like(tensor, torch.nan, requires_grad=False) if tensor.grad is None else tensor.grad
