"""The two sides of a comparison: gatewise's layer and PyTorch's with the same values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gatewise.benchmarks.cases import GRU
from gatewise.benchmarks.cases import LSTM as LSTM_CELL
from gatewise.benchmarks.lstm.call import Call, module_of, torch_layer
from gatewise.contract.problem import LEAN
from gatewise.nn import GRU as OUR_GRU
from gatewise.nn import LSTM as OUR_LSTM

Outputs = tuple[Tensor, ...]

_OURS = {LSTM_CELL: OUR_LSTM, GRU: OUR_GRU}


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A layer with its arguments; the same calls are checked and timed.

    Attributes:
        module: The layer.
        x: The input in the form of this side: padded, or the data of a packed batch.
        states: The initial hidden state, and for an LSTM the initial cell state.
        given: The gradients of the output (in the form of x) and of the final states.
        call: A function that computes (y in the form of x, h_n), for an LSTM (y, h_n, c_n).
        padded: A function that converts a tensor in the form of x to [T, B, features], with zeros as padding.
        leaves: All tensors that get a gradient: x, the initial states and the weights.
        held_bytes: The memory that calls leave allocated for later calls, as the kernel states it.
        names: The names of the states; the last ones are not used if there are fewer states.
    """

    module: nn.Module
    x: Tensor
    states: tuple[Tensor, ...]
    given: Outputs
    call: Callable[[], Outputs]
    padded: Callable[[Tensor], Tensor]
    leaves: tuple[Tensor, ...]
    held_bytes: int = 0
    names: tuple[str, ...] = ("h", "c")

    def prepare(self, training: bool) -> None:
        """Set the mode of the layer, and whether the inputs require gradients."""
        self.module.train(training)
        for tensor in (self.x, *self.states):
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
        found = self.named(outputs, training)
        self.forget()
        return found

    def named(self, outputs: Outputs, training: bool) -> dict[str, Tensor]:
        """Return the outputs of the last call, and in training its gradients, by name; nothing is copied."""
        names = ("y", *(f"{name}_n" for name in self.names))
        found = {name: output.detach() for name, output in zip(names, outputs, strict=False)}
        found["y"] = self.padded(found["y"])
        if training:
            found["dx"] = self.padded(_gradient(self.x))
            found |= {f"d{name}0": _gradient(state) for name, state in zip(self.names, self.states, strict=False)}
            found |= {f"d{name}": _gradient(weight) for name, weight in self.module.named_parameters()}
        return found

    def owned_bytes(self, training: bool) -> int:
        """Return the size of the outputs, and in training of all gradients: memory that every implementation needs."""
        y_elements = self.given[0].numel()
        count = y_elements + sum(state.numel() for state in self.states)
        if training:
            count += sum(tensor.numel() for tensor in self.leaves)
        return count * self.x.element_size()


def gatewise_side(call: Call, dtype: torch.dtype, kernel: str) -> Side:
    """Create gatewise's side with a kernel, "auto" or `LEAN`; a ragged batch is padded, with lengths on the device."""
    options = {"memory": LEAN} if kernel == LEAN else {"kernel": kernel}
    module = _module(_OURS[call.cell], call, dtype, **options)
    x, states, given = _tensors(call, dtype)
    lengths = None if call.lengths is None else call.lengths.to(x.device)

    def run() -> Outputs:
        return _outputs(module(x, _form(states), lengths))

    return Side(module, x, states, given, run, lambda tensor: tensor, (x, *states, *module.parameters()))


def rival_side(call: Call, dtype: torch.dtype) -> Side:
    """Create the side of PyTorch's layer; a ragged batch is a `PackedSequence`.

    On a CPU a call begins and ends with the padded batch, as gatewise's does, so that packing and padding are timed. On
    a GPU the batch is packed before the timing, because packing reads lengths on the CPU, which no CUDA graph replays.
    """
    module = _module(torch_layer(call.cell), call, dtype)
    x, states, given = _tensors(call, dtype)
    lengths, time = call.lengths, call.case.time
    if lengths is None:

        def run() -> Outputs:
            return _outputs(module(x, _form(states)))

        return Side(module, x, states, given, run, lambda tensor: tensor, (x, *states, *module.parameters()))
    if x.device.type == "cpu":

        def run_padded() -> Outputs:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            y, *final = module(packed, _form(states))
            padded, _ = pad_packed_sequence(y, total_length=time)
            return _outputs((padded, *final))

        return Side(module, x, states, given, run_padded, lambda tensor: tensor, (x, *states, *module.parameters()))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    data, *arrangement = packed

    def run_packed() -> Outputs:
        y, *final = _outputs(module(packed, _form(states)))
        return y.data, *final

    def padded(tensor: Tensor) -> Tensor:
        return pad_packed_sequence(PackedSequence(tensor, *arrangement), total_length=time)[0]

    given = pack_padded_sequence(given[0], lengths, enforce_sorted=False).data, *given[1:]
    return Side(module, data, states, given, run_packed, padded, (data, *states, *module.parameters()))


def _form(states: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
    hidden, *others = states
    return states if others else hidden


def _outputs(found: tuple) -> Outputs:
    y, final = found
    return (y, final) if isinstance(final, Tensor) else (y, *final)


def _module(kind: type[nn.Module], call: Call, dtype: torch.dtype, **options: object) -> nn.Module:
    with torch.device(call.x.device):
        module = module_of(kind, call.case, dtype=dtype, **options)
    module.load_state_dict(call.weights)
    return module


def _tensors(call: Call, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...], Outputs]:
    """Return the input, the initial states and the gradients of the outputs."""

    def copies(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        # Copies, because each side has its own flags and gradients.
        return tuple([tensor.to(dtype, copy=True) for tensor in tensors if tensor is not None])

    (x,) = copies(call.x)
    return x, copies(call.h0, call.c0), copies(call.dy, call.dh, call.dc)


def _gradient(tensor: Tensor) -> Tensor:
    # A missing gradient is an error, like one that is NaN.
    return torch.full_like(tensor, torch.nan, requires_grad=False) if tensor.grad is None else tensor.grad
