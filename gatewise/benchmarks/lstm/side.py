"""The two sides of a comparison: gatewise.LSTM and torch.nn.LSTM with the same values."""

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
    """A layer with its arguments; the same calls are checked and timed.

    Attributes:
        module: The layer.
        x: The input in the form of this side: padded, or the data of a packed batch.
        h0: The initial hidden state.
        c0: The initial cell state.
        given: The gradients of the output (in the form of x), final hidden state and final cell state.
        call: A function that computes (y in the form of x, h_n, c_n).
        padded: A function that converts a tensor in the form of x to [T, B, features], with zeros as padding.
        leaves: All tensors that get a gradient: x, h0, c0 and the weights.
        held_bytes: The memory that calls leave allocated for later calls, as the kernel states it.
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
        """Set the mode of the layer, and whether the inputs require gradients."""
        self.module.train(training)
        for tensor in (self.x, self.h0, self.c0):
            tensor.requires_grad_(training)

    def infer(self) -> None:
        """Compute the outputs; autograd must be off."""
        self.call()

    def train(self) -> None:
        """Compute the outputs and all gradients: of input, initial states and weights."""
        self.forget()
        torch.autograd.backward(self.call(), self.given)

    def forget(self) -> None:
        """Delete the gradients of an earlier step."""
        for tensor in self.leaves:
            tensor.grad = None

    def evidence(self, training: bool) -> dict[str, Tensor]:
        """Return the results of one call by name: y, h_n, c_n; in training also dx, dh0, dc0 and dweight_ih_l0..."""
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
        """Return the size of the outputs, and in training of all gradients: memory that every implementation needs."""
        y_elements = self.given[0].numel()
        count = y_elements + self.h0.numel() + self.c0.numel()
        if training:
            count += sum(tensor.numel() for tensor in self.leaves)
        return count * self.x.element_size()


def gatewise_side(call: Call, dtype: torch.dtype, kernel: str) -> Side:
    """Create gatewise's side with a kernel, "auto" or `LEAN`; a ragged batch is padded, with lengths on the device."""
    options = {"memory": LEAN} if kernel == LEAN else {"kernel": kernel}
    module = _module(LSTM, call, dtype, **options)
    x, h0, c0, dy, dh, dc = _tensors(call, dtype)
    lengths = None if call.lengths is None else call.lengths.to(x.device)

    def run() -> Outputs:
        y, (h_n, c_n) = module(x, (h0, c0), lengths)
        return y, h_n, c_n

    return Side(module, x, h0, c0, (dy, dh, dc), run, lambda tensor: tensor, (x, h0, c0, *module.parameters()))


def rival_side(call: Call, dtype: torch.dtype) -> Side:
    """Create nn.LSTM's side; a ragged batch is a `PackedSequence`, which is packed before the timing."""
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
    # Copies, because each side has its own flags and gradients.
    return [tensor.to(dtype, copy=True) for tensor in (call.x, call.h0, call.c0, call.dy, call.dh, call.dc)]


def _gradient(tensor: Tensor) -> Tensor:
    # A missing gradient is an error, like one that is NaN.
    return torch.full_like(tensor, torch.nan, requires_grad=False) if tensor.grad is None else tensor.grad
