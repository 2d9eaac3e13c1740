"""Calls of one time step of a stack of layers, in one launch for each layer: those of streams, and single calls.

`SingleSteps` keeps the states at the same addresses: a CUDA graph that has captured a step carries them from replay to
replay, because a launch finds the states where the last one has left them. `single_call` gets the states of each call
and returns new ones; it is also the forward pass of a training call (`single_training`). Both read contiguous weights
where they are. In each call they copy weights that are not contiguous, and those that tensor cores read and that do not
begin at a multiple of 16 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Result
from gatewise.contract.weights import DirectionWeights, by_direction
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.stepwise.launch import SOURCES, Prepared, address
from gatewise.kernels.stepwise.products import state_dtype
from gatewise.kernels.stepwise.single_criteria import MOST_PARAMETERS, is_tiled
from gatewise.kernels.stepwise.single_form import LANES, VECTOR_BYTES, Form

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int


class Single(ctypes.Structure):
    """The struct `Single` of single.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("x", "input_weights", "recurrent_weights", "input_bias", "recurrent_bias")],
        ("parameters", _POINTER * MOST_PARAMETERS),
        *[(name, _SIZE) for name in ("batch", "inputs", "units", "is_last")],
    ]


class Held(ctypes.Structure):
    """The struct `Held` of single.cu."""

    _fields_ = [("of", Single), *[(name, _POINTER) for name in ("hidden", "carried", "output", "begun")]]


class Call(ctypes.Structure):
    """The struct `Call` of single.cu."""

    _fields_ = [
        ("of", Single),
        *[(name, _POINTER) for name in ("hidden", "others", "hidden_after", "others_after", "output", "sums")],
    ]


_PARAMETERS, _STATES = Single.parameters.offset // 8, Call.hidden.offset // 8


class SingleSteps:
    """The states of a stack of layers, and their steps.

    The launches are made for the addresses and forms of the weights of a call. They are used in later calls whose
    weights have the same ones: `is_prepared_for` compares them in every call, and a launch has nothing else of the
    weights.

    Args:
        cell: The cell, which must be one that `single_criteria` accepts.
        states: For each layer the hidden state and the other states before the first step [B, H], on the device.
        dtype: The dtype of the calls.
    """

    def __init__(self, cell: Cell, states: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> None:
        self.cell, self.dtype, self.device = cell, dtype, states[0][0].device
        # PyTorch's compiler can trace what reads these names, but not the cached function that returns them.
        self._names = carried_states(cell)
        self._initial = [cell.initial_value(name) for name in ("h", *self._names)]
        layers, self._shape = len(states), tuple(states[0][0].shape)
        # In inference mode the tensors would be ones that nothing outside of it may write to.
        with torch.inference_mode(False), torch.no_grad():
            like = torch.empty(0, dtype=dtype, device=self.device)
            self._hidden = like.new_empty(layers, 2, *self._shape)
            self._carried = like.new_empty(layers, len(self._names), *self._shape, dtype=state_dtype(dtype))
            self._begun = like.new_zeros(layers, dtype=torch.int32)
            self._between = like.new_empty(layers - 1, *self._shape)
        self._of_one_step = True  # whether the states of all layers are those of the same step
        self._known: list[tuple] | None = None
        self._copies: list[Tensor] = []
        self._first = self._last = Held()
        self._launches: list[Callable[[], None]] = []
        self.write(states)

    def write(self, states: Sequence[tuple[Tensor, ...]]) -> None:
        """Set the states of all layers, at the addresses where they are."""
        with torch.no_grad():
            for layer, each in enumerate(states):
                named = dict(zip(("h", *self.cell.states), each, strict=True))
                self._hidden[layer].copy_(named["h"])  # both buffers, whichever is read next
                for place, name in enumerate(self._names):
                    self._carried[layer, place].copy_(named[name])
        self._of_one_step = True

    def reset(self, rows: Tensor | None) -> None:
        """Set the states of sequences to their initial values, at the addresses where they are.

        Args:
            rows: The sequences [B], bool, on the device of the states; None for all of them.
        """
        of_carried = [self._carried[:, place] for place in range(len(self._names))]
        with torch.no_grad():
            for value, states in zip(self._initial, (self._hidden, *of_carried), strict=True):
                if rows is None:
                    states.fill_(value)
                else:
                    states.masked_fill_(rows.unsqueeze(-1), value)
        if rows is None:
            self._of_one_step = True

    def read(self) -> list[tuple[Tensor, ...]]:
        """Return copies of the states of all layers, in the dtype of states.

        Raises:
            ArgumentError: The last step failed after it had begun, and the states were neither written nor reset since.
        """
        if not self._of_one_step:
            self._refuse_states()
        # A block counts itself in each step, modulo two steps, and the first buffer is read while the count is 0.
        second = (self._begun > 0).view(-1, 1, 1)
        with torch.no_grad():
            hidden = torch.where(second, self._hidden[:, 1], self._hidden[:, 0]).to(self._carried.dtype)
            found = []
            for layer, carried in enumerate(self._carried):
                named = {"h": hidden[layer]} | dict(zip(self._names, carried.clone(), strict=True))
                found.append(tuple([named[name] for name in ("h", *self.cell.states)]))
        return found

    def is_prepared_for(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the launches are those for the weights, in the flat order of PyTorch's layers."""
        # The device is known from the address: devices have different ones.
        return self._known == [
            (weight.data_ptr(), weight.shape, weight.dtype, weight.is_contiguous()) for weight in weights
        ]

    def prepare(self, weights: Sequence[Tensor]) -> None:
        """Make the launches for weights, whose forms fit together.

        Args:
            weights: The weights in the flat order of PyTorch's layers, in the dtype of the calls.

        Raises:
            ShapeError: The weights are not those of as many layers and units as the states.
        """
        layers, units = len(self._hidden), weights[1].shape[-1]
        matrices = sum(weight.dim() == 2 for weight in weights)
        if matrices != 2 * layers or units != self._shape[1]:
            expectation = f"those of {layers} layers with {self._shape[1]} units, as the states are"
            got = f"{matrices // 2} layers with {units} units"
            raise ShapeError(sentence("weights", expectation, got, "Make a new stream of the layer."))
        # Copies are those of one call.
        own = [readable(weight, self.cell, self._shape[1]) for weight in weights]
        copied = any(one is not other for one, other in zip(own, weights, strict=True))
        forms = [(weight.data_ptr(), weight.shape, weight.dtype, True) for weight in own]
        arguments = [
            self._arguments(layer, each)
            for layer, each in enumerate(by_direction(own, len(own) // layers, len(self.cell.parameters)))
        ]
        # Until everything is assigned the launches are those for no weights, also if an error or Ctrl-C comes between.
        self._known = None
        with driver.on(self.device):  # a kernel is loaded into the context of the current device
            self._launches = [self._launch(each, above=layer > 0) for layer, each in enumerate(arguments)]
        self._first, self._last = arguments[0], arguments[-1]
        self._copies = own if copied else []
        self._known = None if copied else forms

    def step(self, x: Tensor) -> Tensor:
        """Compute a step with the weights of the last `prepare`; return the hidden states of the last layer [B, H].

        Args:
            x: The input [B, I], in the dtype of the calls and on the device.

        Raises:
            ArgumentError: The last step failed after it had begun, and the states were neither written nor reset since.
        """
        if not self._of_one_step:
            self._refuse_states()
        device = self.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.step(x)
        place = x.data_ptr()
        if place % VECTOR_BYTES or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
            place = x.data_ptr()
        y = x.new_empty(*self._shape)  # PyTorch reads two integers faster than a tuple
        self._first.of.x, self._last.output = place, y.data_ptr()
        try:
            for launch in self._launches:
                launch()
        except BaseException:  # Ctrl-C too
            self._of_one_step = False  # some layers may have their new states already
            raise
        return y

    def _refuse_states(self) -> NoReturn:
        got = "those of a step that failed after it had begun"
        raise ArgumentError(sentence("states", "those of a whole step", got, "Call reset(), or assign states."))

    def _arguments(self, layer: int, weights: DirectionWeights) -> Held:
        inner = layer < len(self._between)
        return Held(
            _single(self._between[layer - 1].data_ptr() if layer else None, weights, self._shape[0], not inner),
            self._hidden[layer].data_ptr(),
            self._carried[layer].data_ptr(),
            self._between[layer].data_ptr() if inner else None,
            self._begun[layer].data_ptr(),
        )

    def _launch(self, arguments: Held, *, above: bool) -> Callable[[], None]:
        binary, shape = _kernel_of(self.cell, self.dtype, arguments.of, self.device, above=above)
        return driver.prepared(binary, "single_step", shape, arguments, self.device)


def single_call(problem: Problem, inputs: Inputs, sums: Tensor | None = None) -> Result:
    """Compute a call of one step that `single_criteria` accepts: y [1, B, H], h_n [L, B, H] and c_n [L, B, S*H].

    Args:
        problem: The call.
        inputs: The inputs.
        sums: The memory for the sums of the cell [B, number of sums * H], in the dtype of states, if there is one layer
            and a backward pass follows.
    """
    device, batch, cell = inputs.x.device, problem.batch, problem.cell
    with driver.on(device):
        x, h0, c0 = aligned(inputs.x), aligned(inputs.h0), aligned(inputs.c0)
        y, h_n, c_n = x.new_empty(1, batch, problem.hidden_size), torch.empty_like(h0), torch.empty_like(c0)
        own = [readable(weight, cell, problem.hidden_size) for weight in inputs.weights]
        weights, number = [weight.data_ptr() for weight in own], problem.weights_per_direction
        misaligned = tuple([address % VECTOR_BYTES for address in weights])
        # A thread writes the addresses of a call to arguments of its own.
        launches = _launches_of(problem, device, misaligned, threading.get_ident())
        plain = number - len(cell.parameters)
        h_bytes, c_bytes = h0.nbytes // problem.num_layers, c0.nbytes // problem.num_layers
        vectors, output, kept = x.data_ptr(), y.data_ptr(), 0 if sums is None else sums.data_ptr()
        h_before, h_after, c_before, c_after = h0.data_ptr(), h_n.data_ptr(), c0.data_ptr(), c_n.data_ptr()
        for layer, (addresses, launch) in enumerate(launches):
            start, h, c = layer * number, layer * h_bytes, layer * c_bytes
            addresses[0] = vectors
            addresses[1 : 1 + plain] = weights[start : start + plain]
            if cell.parameters:
                addresses[_PARAMETERS : _PARAMETERS + number - plain] = weights[start + plain : start + number]
            last = layer == problem.num_layers - 1
            states = h_before + h, c_before + c, h_after + h, c_after + c
            addresses[_STATES:] = *states, output if last else 0, kept
            launch()
            vectors = h_after + h
    return Result(y, h_n, c_n)


@functools.lru_cache(maxsize=256)
def _launches_of(problem: Problem, device: torch.device, misaligned: tuple[int, ...], thread: int) -> list[Prepared]:
    """Return the launch of each layer of a call, with the addresses of its tensors as an array that a call writes to.

    The launches depend on nothing of a call but the arguments of this function: a call writes all addresses anew.

    Args:
        problem: The call.
        device: The device.
        misaligned: The addresses of all weights, modulo the bytes of the widest loads.
        thread: The thread that writes the addresses and launches.
    """
    found, number = [], problem.weights_per_direction
    for layer in range(problem.num_layers):
        matrices = misaligned[layer * number : layer * number + 2]
        sizes = problem.batch, problem.layer_input_size(layer), problem.hidden_size
        single = Single(
            None, *matrices, None, None, (_POINTER * MOST_PARAMETERS)(), *sizes, layer == problem.num_layers - 1
        )
        arguments = Call(single)
        binary, shape = _kernel_of(problem.cell, problem.dtype, arguments.of, device, above=layer > 0)
        found.append(Prepared.of(binary, "single_call", shape, arguments, device))
    return found


def readable(weight: Tensor, cell: Cell, units: int) -> Tensor:
    """Return a weight whose rows lie one after the other, at an address from which its kernel loads; copy it if needed.

    Tensor cores are used where sizes and dtype allow it, whatever the addresses are: the blocks of a step must be the
    same in all steps, because they count themselves.
    """
    if not weight.is_contiguous():
        weight = weight.contiguous()
    misaligned = weight.data_ptr() % VECTOR_BYTES and weight.dim() == 2
    if misaligned and is_tiled(cell, weight.element_size(), weight.shape[1], units):
        return weight.clone()
    return weight


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that is contiguous and aligned for vector loads; copy it only if necessary."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor


def _single(vectors: int | None, weights: DirectionWeights, batch: int, is_last: bool) -> Single:
    """Return the arguments of a layer's step, with the address of its input."""
    return Single(
        vectors,
        *[address(tensor) for tensor in weights[:4]],
        (_POINTER * MOST_PARAMETERS)(*map(address, weights.parameters)),
        batch,
        weights.w_ih.shape[1],
        weights.w_hh.shape[1],
        is_last,
    )


def _kernel_of(
    cell: Cell, dtype: torch.dtype, single: Single, device: torch.device, *, above: bool
) -> tuple[bytes, driver.Shape]:
    """Return the machine code for a layer's step, and its launch configuration.

    Args:
        cell: The cell.
        dtype: The dtype of the call.
        single: The arguments of the layer's step.
        device: The device.
        above: Whether the preceding launch is that for the layer below.
    """
    matrices = (single.input_weights or 0, single.inputs), (single.recurrent_weights or 0, single.units)
    form = Form.of(cell, dtype.itemsize, single.batch, *matrices)
    early = above and Device.probe(device).capability >= (9, 0)
    blocks = -(-single.units // form.units)
    shape = driver.Shape((blocks, 1, 1), LANES * form.warps, 0, cooperative=False, early=early)
    return _binary(cell, dtype, form, device), shape


@functools.lru_cache(maxsize=256)
def _binary(cell: Cell, dtype: torch.dtype, form: Form, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "single.cu", architecture, form.macros(dtype), row_code(cell))
