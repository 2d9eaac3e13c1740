"""One time step of any recurrent cell as a layer."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from gatewise.cells import Cell, StatementError
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.functional.arguments import check_name
from gatewise.functional.differentiable import recurrent
from gatewise.functional.resets import check_resets
from gatewise.nn import init
from gatewise.nn.arguments import (
    check_cell,
    check_compiled,
    check_dtype,
    check_flag,
    check_step,
    checked_sizes,
    refuse_script,
)
from gatewise.nn.call_errors import CALL_ERRORS, restate_step
from gatewise.nn.recurrent_matrix import checked_structure, initialise_, matrix_of, shapes_of
from gatewise.nn.states import States, checked_states, joined_states, returned_states, separate_states
from gatewise.nn.symbolic import recorded


class RecurrentCell(nn.Module):
    """One time step of one layer of a recurrent cell, shipped or of your own.

    For each gate the sum `W_ih x + b_ih + W_hh h + b_hh` is computed, and the cell's `step` makes the next states of
    the sums, as in a layer `gatewise.Recurrent`. Parameters have the names and shapes of `torch.nn.LSTMCell`, with the
    rows of the cell's G gates: `weight_ih` [G*H, I], `weight_hh` [G*H, H], `bias_ih` [G*H] and `bias_hh` [G*H]. Those
    of the cell follow under their own names, [H] each. The names of a `Recurrent` with one layer and one direction are
    the same with `_l0` at the end. The initial values of parameters are those of `Recurrent`.

    The step is for programs that get their input step by step, such as streams and policies that act. Programs that
    have the whole sequence are faster with `gatewise.Recurrent`. The kernel of a call is chosen as for a sequence of
    one step: `gatewise.explain(layer, (1, B, I))` of a `Recurrent` with the same sizes shows which one.

    In float16 and bfloat16 all states are rounded to the dtype between the calls. A layer rounds only the hidden state
    that is multiplied, and keeps the others in float32 from step to step.

    Args:
        cell: The cell, such as `gatewise.cells.CoupledLSTM()`, or an instance of your own class.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        bias: Whether the two bias vectors exist; None for what the cell says (`Cell.bias`), which is True for all cells
            but those with layer normalization.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run, one of `gatewise.kernel_names()`.
        heads: N, the number of heads, which divides H: `weight_hh` is then [G*H, H/N], as in `Recurrent`.
        recurrent_rank: r, the rank of the recurrent matrix; 0 for a full one. `weight_rh` [G*H, r] and `weight_hr`
            [r, H] then take the place of `weight_hh`, as in `Recurrent`.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        KernelRefused: No kernel is named `kernel`.
        StatementError: Names of the cell clash with each other or with attributes of the module, or an initial value is
            neither a number nor a function.

    Examples:
        >>> from gatewise.cells import PeepholeLSTM
        >>> cell = RecurrentCell(PeepholeLSTM(), 10, 20)
        >>> states = None
        >>> for x in torch.randn(5, 3, 10):
        ...     states = cell(x, states)
        >>> h, c = states
        >>> h.shape, c.shape
        (torch.Size([3, 20]), torch.Size([3, 20]))
    """

    heads = 1  # of layers that were saved before there were the options
    recurrent_rank = 0
    weight_ih: nn.Parameter | None
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        bias: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
        heads: int = 1,
        recurrent_rank: int = 0,
    ) -> None:
        super().__init__()
        check_cell(cell)
        input_size, hidden_size, *_ = checked_sizes(input_size, hidden_size)
        bias = cell.bias if bias is None else bias
        check_flag("bias", bias)
        check_name(kernel, "kernel")
        check_dtype(dtype)
        heads, recurrent_rank = checked_structure(heads, recurrent_rank, hidden_size)
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.kernel = kernel
        self.heads = heads
        self.recurrent_rank = recurrent_rank
        rows = len(cell.gates) * hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, input_size), **shapes_of(self)}
        if bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        for name in cell.parameters:
            if hasattr(self, name):
                expectation, advice = "names that a RecurrentCell has no attribute of", "Choose another name."
                message = sentence(f"{type(cell).__name__}.parameters", expectation, repr(name), advice)
                raise StatementError(message)
            shapes[name] = (hidden_size,)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        if not bias:
            self.register_parameter("bias_ih", None)
            self.register_parameter("bias_hh", None)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: States | None = None, resets: Tensor | None = None) -> States:
        """Compute one time step.

        Args:
            input: The input [B, I], or [I] without a batch.
            hx: The states before the step: the hidden state [B, H], or [H] without a batch. For a cell that has states
                beside the hidden one this is a tuple: the hidden state, and the others in the order of `cell.states`,
                all of one shape. If None, states are zero, or what `cell.initial_states` says.
            resets: The rows in which an episode begins at this step [B], or one value [] without a batch; bool, or
                integers, which are set unless they are 0, on the input's device. Where it is set, the states before the
                step are not read: they are zero, or what `cell.initial_states` says, and no gradient flows back through
                them.

        Returns:
            The states after the step, in the form of `hx`.

        Raises:
            ShapeError: A rank or size does not fit.
            DtypeError: A dtype differs from that of the parameters, and autocast is off.
            DeviceError: Tensors are on incompatible devices.
            ArgumentError: `input`, a state or `resets` is not a tensor, or `hx` has another number of states.
            KernelRefused: The kernel named by `kernel` does not exist or cannot run this call.
            StatementError: The cell's step returns other states, or cannot run.
        """
        if not isinstance(input, Tensor):
            return recorded(self, input, hx=hx, resets=resets)
        states = None if hx is None else checked_states(self.cell, hx)
        # Weights are looked up in every call, because parametrizations compute them and functional_call replaces them.
        w_ih = self.weight_ih
        if w_ih is None:
            raise ArgumentError(sentence("weight_ih", "a tensor", "None", "Assign a parameter to it."))
        check_step(input, states, self.input_size, self.hidden_size, w_ih.dtype)
        if resets is not None:
            check_resets(resets, input.shape[:-1], "[B]" if input.dim() == 2 else "[]")
        check_compiled(self.cell)
        try:
            if input.dim() == 2:
                return returned_states(self._step(input, states, resets, w_ih))
            rows = None if states is None else tuple([state.unsqueeze(0) for state in states])
            found = self._step(input.unsqueeze(0), rows, None if resets is None else resets.unsqueeze(0), w_ih)
            return returned_states(tuple([state.squeeze(0) for state in found]))
        except CALL_ERRORS as error:
            restate_step(error, input, hx, w_ih)
            raise

    def _step(
        self, x: Tensor, states: tuple[Tensor, ...] | None, resets: Tensor | None, w_ih: Tensor
    ) -> tuple[Tensor, ...]:
        given = None
        if states is not None:
            given = joined_states(self.cell, tuple([state.unsqueeze(0) for state in states]))
        kinds = (*(("bias_ih", "bias_hh") if self.bias else ()), *self.cell.parameters)
        _, h, others = recurrent(
            x.unsqueeze(0),
            given,
            (w_ih, matrix_of(self), *[getattr(self, kind) for kind in kinds]),
            lengths=None,
            batch_sizes=None,
            bidirectional=False,
            dropout=0.0,
            kernel=self.kernel,
            memory=NORMAL,
            cell=self.cell,
            resets=None if resets is None else resets.unsqueeze(0),
        )
        return separate_states(self.cell, h.squeeze(0), others.squeeze(0))

    def reset_parameters(self) -> None:
        """Initialise weights and biases as in `Recurrent`, and parameters of the cell as it states."""
        for name, parameter in self.named_parameters():
            if name.startswith("cell."):  # of a cell that is a module, which has initialised them itself
                continue
            # A parametrization moves the parameter `p` to `parametrizations.p.original`.
            kind = name.removeprefix("parametrizations.").partition(".")[0]
            if kind in self.cell.parameters:
                init.of_cell_(parameter, self.cell, kind)
            else:
                initialise_(parameter, self, kind)

    def extra_repr(self) -> str:
        """Return the cell, the sizes and every option that differs from its default."""
        options = {"bias": True, "kernel": "auto", "heads": 1, "recurrent_rank": 0}
        given = [(name, getattr(self, name)) for name, default in options.items() if getattr(self, name) != default]
        sizes = f"{self.cell}, {self.input_size}, {self.hidden_size}"
        return ", ".join([sizes, *(f"{name}={value}" for name, value in given)])

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script("RecurrentCell")
