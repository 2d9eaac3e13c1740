"""Layers that get their input one time step at a time and keep their states between the calls."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gatewise.cells import Cell
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import Problem
from gatewise.contract.tracing import is_compiling
from gatewise.functional.one_step import (
    NOT_CAPTURED,
    Stack,
    autocast_dtype,
    check_tensors_of_step,
    held_step,
    held_steps,
    in_one_launch,
    one_call,
    one_step,
    state_dtype,
    steps_directly,
    steps_freely,
)
from gatewise.functional.resets import check_resets
from gatewise.nn.arguments import check_cell, refuse_input
from gatewise.nn.pytorch_layer import weights_of
from gatewise.nn.states import States, returned_states
from gatewise.nn.stream_on_cpu import RepeatedStep
from gatewise.nn.stream_tracing import refuse_if_traced, refuse_traced
from gatewise.nn.stream_weights import cell_in_evaluation, converted, flat_weights_of, step_weights_of

if TYPE_CHECKING:
    from gatewise.functional.one_step import SingleSteps


class Stream:
    """A recurrent layer that computes one time step in each call, and keeps its states from call to call.

    `layer.stream(batch)` makes one. A call `y = stream(x)` is, in values,

        y, states = layer(x.unsqueeze(0), states)   # with batch_first=False, layer.eval() and torch.no_grad()
        y = y.squeeze(0)

    for programs that get their input step by step: recognisers of speech, controllers, policies that act. Any number of
    streams can read one layer; each has states of its own. A stream is no module and belongs to no model: it adds
    nothing to a `state_dict`, and hooks of the layer do not run.

    Calls compute no gradients, and use neither dropout nor zoneout's random masks, in training mode as in evaluation
    mode. The weights are read from the layer in every call and never copied, so that whatever changes them
    (`load_state_dict`, an optimizer, a parametrization, writes to `weight.data`) counts from the next call on. After
    `layer.to(...)` the states follow the layer to its device and dtype.

    On a CPU, and if no kernel is named, a step of the cells that PyTorch has is that of `torch.lstm_cell` or the like
    for each layer: the first one is computed by this operator, the next ones, for an LSTM and a GRU, by the operators
    that it consists of, whose results may differ in the last bits and which write to memory of the stream. A step of
    other cells, projections and 16-bit numbers is a few operators of the kernel `eager`. Recurrent matrices of blocks
    or factors (`heads`, `recurrent_rank`) are not assembled there: the blocks or factors are multiplied themselves. On
    a GPU of compute capability 8.0 or later, a step of up to 8 sequences is one launch for each layer, if the layer has
    no projection and its cell can be traced and does not normalize over units. In 16-bit dtypes, with sizes that are
    multiples of 8, so is a step of up to 64 sequences, if these are at most 2^26 / (H (I + H)). Every other step is a
    call of the kernel that is chosen for a sequence of one step. `gatewise.explain(stream, (B, I))` says which of these
    computes the step, and why.

    In float16 and bfloat16, also those of autocast, the states are carried in float32, as within a call of the layer. A
    call of a kernel for a sequence of one step rounds them to 16 bits after each step.

    The launches on a GPU find the states at the same addresses in every call. So a call can be captured in a CUDA
    graph, after a first call outside of the capture. Each replay computes a step from the states that the last replay,
    call, `reset` or assignment has left, and overwrites the output of the replay before it. The graph reads memory of
    the stream and of the layer's weights, and needs both as long as it is replayed. It has to be captured again when
    the layer has moved to another device or dtype or has another cell, when a weight has been replaced by another
    tensor, and after calls in another dtype by autocast. The states then have other addresses. Those of a capture stay
    allocated as long as the stream exists, so that a replay of the earlier graph changes no other tensor.

    A stream can be copied by `copy.deepcopy` and pickled; the copy has a copy of the layer, unless both are parts of
    one copied object. Calls of one stream from several threads must not overlap. `torch.compile` leaves a call out of
    its graph.

    Args:
        layer: A `gatewise.LSTM`, `GRU`, `RNN` or `Recurrent` with one direction.
        batch: B, the number of sequences.

    Raises:
        ArgumentError: The layer is bidirectional or reads backwards, or has a `forward` of its own, or `batch` is no
            positive integer.

    Examples:
        >>> layer = gatewise.LSTM(10, 20, num_layers=2)
        >>> stream = layer.stream(batch=3)
        >>> for x in torch.randn(5, 3, 10):
        ...     y = stream(x)
        >>> y.shape
        torch.Size([3, 20])
        >>> h_n, c_n = stream.states
        >>> h_n.shape
        torch.Size([2, 3, 20])
    """

    _repeated: RepeatedStep | None = None  # of streams that were pickled before there was one

    def __init__(self, layer: Any, batch: int) -> None:
        if not isinstance(batch, numbers.Integral) or isinstance(batch, bool) or batch < 1:
            raise ArgumentError(sentence("batch", "a positive integer", repr(batch)))
        self.layer = layer
        self.batch = batch = int(batch)
        _check_forward(layer)
        self._shape = torch.Size((batch, layer.input_size))
        # The states are held at fixed addresses by the steps of a GPU, or else here; None for those of a new sequence.
        self._held: SingleSteps | None = None
        self._states: Stack | None = None
        # Those that were used in captures stay alive, since replays of the graphs read and write their memory.
        self._captured: list[SingleSteps] = []
        self._checked: list[tuple[torch.Size, torch.dtype, torch.device]] | None = None
        _check_direction(layer)
        check_cell(cell_in_evaluation(layer))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute one time step.

        Args:
            x: The input of the step [B, I], of the dtype and on the device of the layer's weights; under autocast for
                that device also of another floating-point dtype, but not of float64, which autocast never converts.

        Returns:
            The output of the last layer [B, R], a tensor of its own that no later call changes.

        Raises:
            ShapeError: The shape is not [B, I], or the shapes of the weights do not fit together.
            DtypeError: The dtype differs from that of the weights, and autocast does not convert the input; or the
                weights are of several dtypes.
            DeviceError: The device is not that of the weights, or these are on several devices.
            ArgumentError: `x` is no dense tensor, or the call is traced by `torch.export`, `torch.jit`, `torch.func` or
                `make_fx`, or made with a `FakeTensor` or under `FakeTensorMode`. Or it is captured in a CUDA graph,
                although it is computed by a call of a kernel for a sequence of one step, or although the call before
                had another device, dtype or cell, or there was none. Or the call before on a GPU failed after its step
                had begun, and the states were neither reset nor assigned since. Or a weight of the layer is None.
            KernelRefused: The kernel that was named cannot run the step.
        """
        if torch.compiler.is_compiling() and is_compiling():
            refuse_if_traced(x)
            return _outside_of_graph(self, x)
        if not isinstance(x, Tensor):
            refuse_input(x, "x")
        if (
            torch._C._is_tracing()
            or torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack()
            or type(x) is not Tensor
        ):
            refuse_if_traced(x)
        layer, held = self.layer, self._held
        if held is None:
            repeated, states = self._repeated, self._states
            if repeated is not None and states is not None:
                after = repeated.after(layer, x, states)
                if after is not None:
                    self._states = after
                    return after[-1][0].clone()  # for the reason below
        elif _is_capturing(held.device):
            self._keep(held)
        if (
            held is not None
            and x.dtype is held.dtype
            and x.shape == self._shape
            and x.device == held.device
            and x.layout is torch.strided
            and held.cell is cell_in_evaluation(layer)
            and steps_freely(layer.kernel)
            and not layer.bidirectional
            and not layer.reverse
            and not torch._C._is_any_autocast_enabled()
        ):
            return held_step(held, x, flat_weights_of(layer))
        cell = cell_in_evaluation(layer)
        autocast = autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None
        dtype = x.dtype if autocast is None else autocast
        direct = steps_directly(x, layer.kernel)
        weights, products = step_weights_of(layer, dtype if direct else None)
        weight = weights[0][0]
        # Most calls pass all checks; each further function that is called takes time, most of all with cold caches.
        if (
            x.shape != self._shape
            or x.dtype is not weight.dtype
            or x.device != weight.device
            or x.layout is not torch.strided
            or layer.bidirectional
            or layer.reverse
            or not direct
        ):
            self._check(x, weight, converted=autocast is not None)
        held = None if direct else self._holding(cell, x, dtype)
        if held is not None:
            with torch.no_grad():
                if autocast is not None:
                    x, weights = x.to(dtype), converted(weights, dtype)
                return held_step(held, x, [weight for each in weights for weight in each])
        states = self._before(cell, x, state_dtype(dtype) if direct else dtype)
        if direct:
            if autocast is not None:
                x, weights = x.to(dtype), converted(weights, dtype)
            forms = [(weight.shape, weight.dtype, weight.device) for each in weights for weight in each]
            if forms != self._checked:
                # Operators of PyTorch would broadcast a weight of one row to all units, and promote dtypes.
                check_tensors_of_step(cell, x, flat_weights_of(layer, autocast))
                self._checked = forms
                self._repeated = None if autocast else RepeatedStep.of(layer, cell, x, flat_weights_of(layer))
            after = one_step(cell, x, states, weights, products, projected=layer.proj_size > 0)
        else:
            after = one_call(cell, x, states, weights, layer.kernel)
        held = self._held
        if held is None:
            self._states = after
        elif held.dtype is dtype and held.device == x.device:
            held.write(after)
        else:
            self._held, self._states = None, after
        h = after[-1][0]
        # The state is read again by the next call, whatever the caller does with the output.
        return h.clone() if h.dtype is dtype else h.to(dtype)

    def reset(self, rows: Tensor | None = None) -> None:
        """Set states to those of a new sequence: zero, or what `cell.initial_states` says.

        Args:
            rows: The sequences to reset [B], bool, or integers, which are set unless they are 0, on the device of the
                layer's weights; their values are not read on the CPU. None for all sequences. NaN in a row that is
                reset is gone.

        Raises:
            ArgumentError: `rows` is no dense tensor, or the call is traced as a call of the stream must not be.
            ShapeError: The shape is not [B].
            DtypeError: The dtype is neither bool nor an integer type.
            DeviceError: `rows` is on another device than the weights.
        """
        refuse_if_traced(rows)
        held = self._steps()
        if rows is None:
            if held is None:
                self._states = None
            else:
                held.reset(None)
            return
        check_resets(rows, (self.batch,), "[B]", "rows")
        device = self._weight().device
        if rows.device != device:
            advice = "Move it with .to(device)."
            raise DeviceError(sentence("rows", f"on {device} like the weights", f"one on {rows.device}", advice))
        chosen = rows.bool()
        if held is not None and held.device == device:
            held.reset(chosen)
            return
        states = self._current()
        if states is None:
            return
        if states[0][0].device != device:  # the layer has moved since the last call
            states = [tuple([state.to(device) for state in each]) for each in states]
        cell = cell_in_evaluation(self.layer)
        initial = [cell.initial_value(name) for name in ("h", *cell.states)]
        with torch.no_grad():
            found = [
                tuple(
                    [state.masked_fill(chosen.unsqueeze(-1), value) for state, value in zip(each, initial, strict=True)]
                )
                for each in states
            ]
        self._held, self._states = None, found

    @property
    def states(self) -> States:
        """The states after the last call, copied, in the form in which the layer returns its final states.

        For an LSTM this is the pair (h [L, B, R], c [L, B, H]), for a GRU or an RNN h [L, B, H], and for other cells a
        tuple of h and the cell's other states [L, B, H], in the dtype of the weights. Assigned states of the same form
        are copied and converted to the layer's device and dtype; None stands for those of a new sequence.

        Raises:
            ArgumentError: The last call on a GPU failed after its step had begun, and the states were neither reset nor
                assigned since; or assigned states are of another form.
            ShapeError: The shape of an assigned state is another one.
        """
        cell = cell_in_evaluation(self.layer)
        like = self._weight()
        with torch.no_grad():
            states = self._current() or self._initial(cell, like)
            return returned_states(tuple(torch.stack(each).to(like) for each in zip(*states, strict=True)))

    @states.setter
    def states(self, given: States | None) -> None:
        refuse_if_traced(*(given if isinstance(given, (tuple, list)) else (given,)))
        if given is None:
            self.reset()
            return
        cell, layer = cell_in_evaluation(self.layer), self.layer
        names = ("h", *cell.states)
        several = isinstance(given, (tuple, list))
        found: tuple[Any, ...] = tuple(given) if several else (given,)
        if len(found) != len(names):
            expectation = f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names)})"
            raise ArgumentError(sentence("states", expectation, len(found) if several else type(given).__name__))
        for name, state in zip(names, found, strict=True):
            size = (layer.proj_size or layer.hidden_size) if name == "h" else layer.hidden_size
            expected = [layer.num_layers, self.batch, size]
            if not isinstance(state, Tensor):
                raise ArgumentError(sentence(f"states, the state {name},", "a tensor", type(state).__name__))
            if list(state.shape) != expected:
                raise ShapeError(sentence(f"states, the state {name},", f"of shape {expected}", list(state.shape)))
        like = self._weight()
        with torch.no_grad():
            kept = [state.to(like.device, state_dtype(like.dtype), copy=True).unbind(0) for state in found]
        states, held = list(zip(*kept, strict=True)), self._steps()
        if held is not None and held.device == like.device:
            held.write(states)
        else:
            self._held, self._states = None, states

    def __getstate__(self) -> dict[str, Any]:
        # A copy has addresses of its own, and makes its launches anew. Its steps have memory of their own.
        anew = {"_held": None, "_captured": [], "_checked": None, "_repeated": None}
        return self.__dict__ | anew | {"_states": self._current()}

    def __repr__(self) -> str:
        return f"Stream({self.layer!r}, batch={self.batch})"

    def _check(self, x: Tensor, weight: Tensor, converted: bool) -> None:
        _check_direction(self.layer)
        if x.shape != self._shape:
            expectation = f"of shape [B, I] = {list(self._shape)}"
            raise ShapeError(sentence("x", expectation, list(x.shape), "A stream takes one step a call."))
        if x.device != weight.device:
            advice = "Move one of them with .to(device)."
            raise DeviceError(sentence("x", f"on {weight.device} like the weights", f"one on {x.device}", advice))
        if x.dtype is not weight.dtype and not converted:
            advice = "Convert one of them with .to(dtype)."
            raise DtypeError(sentence("x", f"{weight.dtype} like the weights", x.dtype, advice))
        if x.layout is not torch.strided:
            raise ArgumentError(sentence("x", "a dense tensor", f"one of {x.layout}", "Call .to_dense() on it."))

    def _holding(self, cell: Cell, x: Tensor, dtype: torch.dtype) -> SingleSteps | None:
        """Return the steps that hold the states of a call on a GPU; None if another kernel computes it."""
        layer, held = self.layer, self._held
        capturing = _is_capturing(x.device)
        if x.is_meta or not steps_freely(layer.kernel) or not in_one_launch(self._problem(cell, dtype), x.device):
            if capturing:
                refuse_traced(NOT_CAPTURED)
            return None
        # The states are held for one cell, dtype and device. For others, they are held at other addresses.
        if held is None or (held.cell, held.dtype, held.device) != (cell, dtype, x.device):
            if capturing:
                got = "its first call in the capture of a CUDA graph, whose replays would begin with it"
                refuse_traced(got, "Call the stream once with this device, dtype and cell before the capture.")
            held = held_steps(cell, self._before(cell, x, state_dtype(dtype)), dtype)
            self._held, self._states = held, None
        return held

    def _problem(self, cell: Cell, dtype: torch.dtype) -> Problem:
        layer = self.layer
        return Problem(
            time=1,
            batch=self.batch,
            input_size=layer.input_size,
            hidden_size=layer.hidden_size,
            proj_size=layer.proj_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            dtype=dtype,
            cell=cell,
        )

    def _steps(self) -> SingleSteps | None:
        """Return the steps that hold the states, and keep them alive if a CUDA graph captures this use of them."""
        held = self._held
        # PyTorch's compiler, which may trace `reset`, would take the answer of its time for that of every call.
        if held is not None and not is_compiling() and _is_capturing(held.device):
            self._keep(held)
        return held

    def _keep(self, held: SingleSteps) -> None:
        if held not in self._captured:
            self._captured.append(held)

    def _current(self) -> Stack | None:
        held = self._steps()
        return self._states if held is None else held.read()

    def _before(self, cell: Cell, x: Tensor, dtype: torch.dtype) -> Stack:
        states = self._states if self._held is None else self._current()
        if states is None:
            return self._initial(cell, x.new_empty(0, dtype=dtype))
        first = states[0][0]
        if first.dtype is dtype and first.device == x.device:
            return states
        return [tuple([state.to(x.device, dtype) for state in each]) for each in states]

    def _initial(self, cell: Cell, like: Tensor) -> Stack:
        layer, batch = self.layer, self.batch
        sizes = {"h": layer.proj_size or layer.hidden_size, **dict.fromkeys(cell.states, layer.hidden_size)}
        each = tuple(like.new_full((batch, size), cell.initial_value(name)) for name, size in sizes.items())
        return [each] * layer.num_layers

    def _weight(self) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.RNNBase):
            return weights_of(layer)[0]
        # The others, among them matrices that have to be made, are read only for their error.
        weight = getattr(layer, "weight_ih_l0", None)
        return weight if isinstance(weight, Tensor) else layer.flat_weights()[0]


def stream(self: Any, batch: int) -> Stream:
    """Return a `gatewise.nn.Stream` of B = `batch` sequences, which computes one time step a call and keeps states."""
    return Stream(self, batch)


# PyTorch's compiler calls the function instead of tracing it. `torch._dynamo` is imported only then.
_outside_of_graph = torch._disable_dynamo(Stream.__call__)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _check_direction(layer: Any) -> None:
    for option in ("bidirectional", "reverse"):
        if getattr(layer, option):
            advice = "The last step of a sequence has to be known before its first output. Call the layer instead."
            raise ArgumentError(sentence(option, "False for a stream", "True", advice))


def _check_forward(layer: Any) -> None:
    """Check that a call of the layer computes what the steps do, and nothing of a subclass beside it."""
    defining = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
    own = "forward" in vars(layer)
    if own or not defining.__module__.startswith("gatewise.nn."):
        found = "one that was assigned to it" if own else f"that of the class {defining.__qualname__}"
        advice = "A stream would not call it. Call the layer for one step at a time, with its states."
        raise ArgumentError(sentence("layer.forward", "that of gatewise's layer for a stream", found, advice))
