"""A layer of any recurrent cell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.cells import Cell, in_evaluation, in_training, stated
from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.steps import LayerSteps
from gatewise.functional.differentiable import recurrent, recurrent_with_steps
from gatewise.nn import init
from gatewise.nn.arguments import (
    check_cell,
    check_compiled,
    check_dtype,
    check_layer_options,
    check_rate,
    checked_candidate_dropout,
    checked_sizes,
    checked_zoneout,
    refuse_script,
    warn_of_idle_dropout,
)
from gatewise.nn.call_errors import CALL_ERRORS, restate
from gatewise.nn.recurrent_matrix import checked_structure, initialise_, matrix_of, product_of, shapes_of
from gatewise.nn.recurrent_weights import check_tensors, kinds, misfit, names_beyond, names_of, refuse_missing, suffixes
from gatewise.nn.sequences import run_one, run_packed, time_first
from gatewise.nn.states import States, checked_states, joined_states, returned_states, separate_states
from gatewise.nn.stream import stream
from gatewise.nn.symbolic import recorded
from gatewise.nn.weight_dropout import with_dropped_weights


def _rate(name: str) -> Any:
    """Return a property for a rate of the recurrence; setting it creates the cells of the layer again."""

    def read(layer: Recurrent) -> Any:
        return layer._rates[name]

    def write(layer: Recurrent, value: Any) -> None:
        layer._set_rates(**layer._rates | {name: value})

    return property(read, write)


class Recurrent(nn.Module):
    """A stack of layers of a recurrent cell, shipped or of your own.

    For each layer, time step and gate the sum `W_ih x + b_ih + W_hh h + b_hh` is computed, and the cell's `step` makes
    the next states of the sums. Parameters have the names, shapes and order of `torch.nn.LSTM`, with the rows of the
    cell's G gates: `weight_ih_l{k}` [G*H, I or D*H], `weight_hh_l{k}` [G*H, H], `bias_ih_l{k}` [G*H], `bias_hh_l{k}`
    [G*H], and the same with `_reverse`. Initial values are drawn from U(-1/sqrt(H), 1/sqrt(H)). The parameters of the
    cell follow those of each direction as `{name}_l{k}` [H], such as `p_i_l0` and `p_i_l0_reverse`, with the initial
    values that the cell states.

    With `heads` or `recurrent_rank` the layer learns the blocks or the factors of its recurrent matrices. Every call
    makes the matrices [G*H, H] of them, and the kernels read these as any other ones. So the parameters, their
    gradients and the optimizer's state are smaller, but a call takes the time of one with full matrices and a little
    more; the matrices and their gradients take memory during a training step, and the on-chip weights of `persistent`
    are those of a full matrix. No kernel skips the zeros between blocks or multiplies by the factors.

    The backward pass is derived from the statement of the cell. The kernel of a call is chosen as for `gatewise.LSTM`;
    `gatewise.explain(module, input)` shows which one and why.

    Args:
        cell: The cell, such as `gatewise.cells.CoupledLSTM()`, or an instance of your own class.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers, each reading the output of the one below.
        bias: Whether the two bias vectors exist; None for what the cell says (`Cell.bias`), which is True for all cells
            but those with layer normalization.
        batch_first: Whether input and output are [B, T, features] instead of [T, B, features]; the states never are.
        dropout: The probability of dropping each output of every layer but the last, in training mode.
        bidirectional: Whether there is a second direction, which reads the sequence from its end; D is then 2.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run, one of `gatewise.kernel_names()`.
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" keeps only tensors that cannot be
            recomputed from the input and the outputs (gradient checkpointing): a training step takes less memory, and
            more time.
        weight_dropout: The probability of dropping each element of the recurrent matrices `weight_hh` in training mode
            (weight drop of the AWD-LSTM, Merity et al. 2018): one mask for each matrix and call; the other elements are
            multiplied by 1 / (1 - weight_dropout). Every kernel runs it. With `recurrent_rank`, elements of the product
            of the factors are dropped.
        reverse: Whether the layers read each sequence from its last step to its first, within its length, as a layer
            between two flips: the output is in the order of the input, an initial state is that before the last step,
            and a final state that after the first one. Parameters are those of a layer with one direction. Input and
            output are copied in the other order around the kernel.
        recurrent_dropout: The probability of dropping each unit of the hidden state that enters the recurrent products,
            in training mode (Gal and Ghahramani 2016): one mask [B, H] for each layer, direction and call serves all
            steps; the other units are multiplied by 1 / (1 - recurrent_dropout). What else the step does with the
            hidden state is not affected.
        zoneout: The probability, at each step, that a unit keeps its hidden state from before the step (Krueger et al.
            2017), or a dictionary of such rates by the names of states, such as {"h": 0.05, "c": 0.5}. In an LSTM,
            the new hidden state is made of the new cell state even where a unit keeps the old one. In evaluation mode
            each state is its expectation, `rate * before + (1 - rate) * after`, as in haste and fairseq.
        candidate_dropout: The probability of dropping, at each step, each unit of the candidate, g of an LSTM and n of
            a GRU, in training mode (Semeniuta et al. 2016, and LayerNormBasicLSTMCell of TensorFlow 1); the other units
            are multiplied by 1 / (1 - candidate_dropout). The step of the cell marks its candidate by
            `gatewise.cells.candidate`.
        heads: N, the number of heads, which divides H. Unit u belongs to head u // (H/N), and the recurrent matrices
            connect units of one head only, as in the sLSTM of xLSTM and in FlashRNN: the matrix of each gate is
            block-diagonal. `weight_hh_l{k}` is then [G*H, H/N]: a row has the weights of its unit on the units of its
            head. Initial values are drawn from U(-1/sqrt(H/N), 1/sqrt(H/N)).
        recurrent_rank: r, the rank of the recurrent matrices; 0 for full ones. The matrix is then the product of
            `weight_rh_l{k}` [G*H, r] and `weight_hr_l{k}` [r, H], which take the place of `weight_hh_l{k}`; all gates
            share the second one. Initial values are drawn from U(-1/sqrt(r), 1/sqrt(r)) and U(-sqrt(3/H), sqrt(3/H)),
            so that the elements of the product have the variance of those of a full matrix. Not together with `heads`.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        KernelRefused: No kernel is named `kernel`.
        StatementError: Names of the cell clash, or an initial value is neither a number nor a function.

    Examples:
        >>> from gatewise.cells import CoupledLSTM
        >>> layer = Recurrent(CoupledLSTM(), 10, 20, num_layers=2)
        >>> y, (h_n, c_n) = layer(torch.randn(5, 3, 10), lengths=[5, 2, 4])
        >>> y.shape, c_n.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))
    """

    # They can be set, as `dropout` can.
    recurrent_dropout = _rate("recurrent_dropout")
    zoneout = _rate("zoneout")
    candidate_dropout = _rate("candidate_dropout")
    proj_size = 0
    # Of layers that were saved before there were the options
    reverse = False
    heads = 1
    recurrent_rank = 0

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool | None = None,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
        memory: str = NORMAL,
        weight_dropout: float = 0.0,
        reverse: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float | Mapping[str, float] = 0.0,
        candidate_dropout: float = 0.0,
        heads: int = 1,
        recurrent_rank: int = 0,
    ) -> None:
        super().__init__()
        check_cell(cell)
        input_size, hidden_size, num_layers, _ = checked_sizes(input_size, hidden_size, num_layers)
        bias = cell.bias if bias is None else bias
        check_layer_options(bias, batch_first, bidirectional, dropout, kernel, memory, reverse)
        check_dtype(dtype)
        heads, recurrent_rank = checked_structure(heads, recurrent_rank, hidden_size)
        warn_of_idle_dropout(dropout, num_layers)
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bool(bias)
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bool(bidirectional)
        self.kernel = kernel
        self.memory = memory
        self.reverse = reverse
        self.heads = heads
        self.recurrent_rank = recurrent_rank
        self.weight_dropout = check_rate("weight_dropout", weight_dropout)
        self._set_rates(recurrent_dropout, zoneout, candidate_dropout)
        rows, directions = len(cell.gates) * hidden_size, 1 + self.bidirectional
        for layer in range(num_layers):
            features = input_size if layer == 0 else directions * hidden_size
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, features), **shapes_of(self)}
            if self.bias:
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            shapes |= dict.fromkeys(cell.parameters, (hidden_size,))
            for suffix in ("", "_reverse")[:directions]:
                for kind, shape in shapes.items():
                    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{kind}_l{layer}{suffix}", parameter)
        self.reset_parameters()

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: States | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
        return_steps: bool = False,
    ) -> tuple[Tensor | PackedSequence, States] | tuple[Tensor, States, tuple[LayerSteps, ...]]:
        """Run the layers over a batch of sequences.

        Args:
            input: The input [T, B, I], or [B, T, I] with `batch_first`, or one sequence [T, I], or a `PackedSequence`.
            hx: The initial states [L*D, B, H], without B for one sequence. For a cell that has states beside the hidden
                one this is a tuple: the hidden state, and the others in the order of `cell.states`. If None, states are
                zero, or what `cell.initial_states` says.
            lengths: The number of valid steps of each sequence: B integers in [0, T], in any order, on any device. The
                padding after the end of a sequence is not read, `output` is zero there, and the final states are those
                at the end.
            resets: The steps at which episodes begin, [T, B], or [B, T] with `batch_first`, or [T] for one sequence;
                bool, or integers, which are set unless they are 0, on the input's device. Where it is set, all states
                before the step are zero, or what `cell.initial_states` says, and no gradient flows back from the step
                through them. The reverse direction carries no state across the border either. At the first step, the
                initial states of the forward direction are not read.
            return_steps: Whether to return the states and gate sums of every step as a third result. The steps are then
                computed by PyTorch operators that autograd records, as in a plain loop.

        Returns:
            The output of the last layer, [T, B, D*H] in the arrangement of `input`, and the final states of every layer
            and direction, in the form of `hx`. With `return_steps` a third value: for each layer, a record with the
            dictionaries `states` and `sums`, from names to tensors [T, B, D*H] in the arrangement of `input`, zero
            after the end of a sequence. `states` has "h" and the names in `cell.states`; `sums` has the names of the
            gates, whose values are those before any activation (for a gate in `cell.apart`, `{gate}_input` and
            `{gate}_recurrent`). All of them are differentiable.

        Raises:
            ShapeError: A rank, size or length does not fit.
            DtypeError: A dtype differs from that of the parameters, and autocast is off.
            DeviceError: Tensors are on incompatible devices.
            ArgumentError: `input` or a state is not a tensor, `hx` has another number of states, `lengths` is given
                with a `PackedSequence` or with one sequence, or `resets` or `return_steps` with a `PackedSequence`.
            KernelRefused: The kernel named by `kernel` does not exist or cannot run this call.
            StatementError: The cell's step returns other states, or cannot run.
        """
        if not isinstance(input, (Tensor, PackedSequence)):
            return recorded(self, input, hx=hx, lengths=lengths, resets=resets, return_steps=return_steps or None)
        try:
            states = None if hx is None else checked_states(self.cell, hx)
            if isinstance(input, PackedSequence):
                if return_steps:
                    advice = "Give the padded batch with `lengths`."
                    raise ArgumentError(sentence("return_steps", "False for a PackedSequence", "True", advice))
                packed, finals = run_packed(self._run, input, states, lengths, "[L*D, B, H]", resets)
                return packed, returned_states(finals)
            steps: list[LayerSteps] | None = [] if return_steps else None
            run = functools.partial(self._run, steps=steps) if return_steps else self._run
            if input.dim() == 2:
                y, finals = run_one(run, input, states, lengths, "[L*D, H]", resets)
                return self._result(y, finals, steps, lambda value: value.squeeze(1))
            if input.dim() != 3:
                arrangement = "[B, T, I]" if self.batch_first else "[T, B, I]"
                expectation = f"{arrangement}, or [T, I] for one sequence"
                raise ShapeError(sentence("input", expectation, f"rank {input.dim()} with shape {list(input.shape)}"))
            if resets is not None and self.batch_first:
                resets = time_first(resets, input.shape[:2])
            x = input.transpose(0, 1) if self.batch_first else input
            y, finals = run(x, states, lengths=lengths, resets=resets)
            if self.batch_first:
                return self._result(y.transpose(0, 1), finals, steps, lambda value: value.transpose(0, 1))
            return self._result(y, finals, steps)
        except CALL_ERRORS as error:
            restate(error, input, hx, self.batch_first)
            raise

    def _result(
        self,
        y: Tensor,
        finals: tuple[Tensor, ...],
        steps: list[LayerSteps] | None,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, States] | tuple[Tensor, States, tuple[LayerSteps, ...]]:
        states = returned_states(finals)
        if steps is None:
            return y, states
        return y, states, tuple(steps if arrange is None else [layer.map(arrange) for layer in steps])

    def _run(
        self,
        x: Tensor,
        states: tuple[Tensor, ...] | None,
        batch_sizes: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
        steps: list[LayerSteps] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        cell = self.cell_in(self.training)
        given = None if states is None else joined_states(self.cell, states)
        compiling = check_compiled(self.cell)
        # Weights are looked up in every call, because parametrizations compute them and functional_call replaces them.
        # The compiler reads no cache, such as that of their names, and warns of it.
        flat = [weight for each in self.all_weights for weight in each] if compiling else self.flat_weights()
        weights = tuple(flat)
        rate = self.weight_dropout
        if type(rate) is not float or rate:
            check_rate("weight_dropout", rate)
            if self.training:
                each = len(weights) // (self.num_layers * (1 + self.bidirectional))
                weights = with_dropped_weights(weights, each, rate)
        options: dict[str, Any] = {
            "lengths": lengths,
            "bidirectional": self.bidirectional,
            "dropout": self.dropout if self.training else 0.0,
            "kernel": self.kernel,
            "memory": self.memory,
            "resets": resets,
            "reverse": self.reverse,
            "cell": cell,
        }
        if steps is None:
            y, h_n, others_n = recurrent(x, given, weights, batch_sizes=batch_sizes, **options)
        else:
            y, h_n, others_n, found = recurrent_with_steps(x, given, weights, **options)
            steps += found
        return y, separate_states(self.cell, h_n, others_n)

    def _set_rates(
        self, recurrent_dropout: float, zoneout: float | Mapping[str, float], candidate_dropout: float
    ) -> None:
        rates = checked_zoneout(zoneout, self.cell)
        self._rates = {
            "recurrent_dropout": check_rate("recurrent_dropout", recurrent_dropout),
            "zoneout": dict(zoneout) if isinstance(zoneout, Mapping) else rates[0],
            "candidate_dropout": checked_candidate_dropout(candidate_dropout, self.cell),
        }
        own = self._rates["recurrent_dropout"], rates, self._rates["candidate_dropout"]
        self._cells = in_evaluation(self.cell, rates), in_training(self.cell, *own)

    def cell_in(self, training: bool) -> Cell:
        """Return the cell of a call in training or evaluation mode: `cell`, with dropout or zoneout if they are set."""
        found = self._cells[int(training)]
        cell = self.cell  # an attribute of the layer, which programs may set
        if found is not cell and stated(found) is not cell:
            check_cell(cell)
            self._set_rates(**self._rates)
            found = self._cells[int(training)]
        return found

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights, one list for each direction of each layer: matrices, biases, parameters of the cell.

        The recurrent matrices are [G*H, H]; with `heads` or `recurrent_rank` they are computed from the parameters.

        Raises:
            ShapeError: A weight is missing, because the sizes of the layer have been changed.
            ArgumentError: A weight is None, or something else than a tensor.
        """
        try:
            return [
                self._weights_of(suffix, matrix_of(self, suffix))
                for suffix in suffixes(self.num_layers, self.bidirectional)
            ]
        except (AttributeError, TypeError) as error:  # PyTorch would say that there is no attribute `all_weights`
            refuse_missing(self, shapes_of(self), error)
            raise

    def flat_weights(self) -> list[Tensor]:
        """Return the weights of `all_weights` in one list.

        Weights that are parameters are looked up together, as those of PyTorch's layers are: attribute access finds a
        parameter only after an AttributeError.

        Raises:
            ShapeError: The sizes of the layer have been changed, and do not fit its weights.
            ArgumentError: A weight is None, or something else than a tensor.
        """
        if type(self).all_weights is not Recurrent.all_weights:
            return [weight for each in self.all_weights for weight in each]
        beyond = names_beyond(self.num_layers, self.bidirectional, self.bias)
        if not self._parameters.keys().isdisjoint(beyond):
            raise misfit(self, f"{next(name for name in beyond if name in self._parameters)} too")
        if self.heads == 1 and not self.recurrent_rank:
            names = names_of(self.num_layers, self.bidirectional, self.bias, tuple(self.cell.parameters))
            try:
                weights: list[Any] = [*map(self._parameters.__getitem__, names)]
            except KeyError:  # a parametrization, or a plain tensor in the place of a parameter
                pass
            else:
                return check_tensors(names, weights) if type(None) in map(type, weights) else weights
        return [weight for each in self.all_weights for weight in each]

    def weights_of_step(self, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[Callable[[Tensor], Tensor]] | None]:
        """Return the weights of each layer for a single step, and the functions of their recurrent products.

        With `heads` or `recurrent_rank` the functions multiply by the blocks or factors, which stand in the place of
        the recurrent matrices; otherwise there are none, because `all_weights` has all that a step reads.

        Args:
            dtype: The dtype of the products.
        """
        if self.heads == 1 and not self.recurrent_rank:
            return self.all_weights, None
        kind = "weight_rh" if self.recurrent_rank else "weight_hh"
        ends = suffixes(self.num_layers, False)
        try:
            products = [product_of(self, end, dtype) for end in ends]
            return [self._weights_of(end, getattr(self, kind + end)) for end in ends], products
        except AttributeError as error:
            refuse_missing(self, shapes_of(self), error)
            raise

    def _weights_of(self, suffix: str, w_hh: Tensor) -> list[Tensor]:
        names = [kind + suffix for kind in kinds(self.bias, self.cell.parameters)]
        w_ih, *others = [getattr(self, name) for name in (names[0], *names[2:])]
        return check_tensors(names, [w_ih, w_hh, *others])

    stream = stream

    def reset_parameters(self) -> None:
        """Initialise matrices and biases uniformly, as the class says, and parameters of the cell as it states."""
        for name, parameter in self.named_parameters():
            if name.startswith("cell."):  # of a cell that is a module, which has initialised them itself
                continue
            # A parametrization moves the parameter `p_l0` to `parametrizations.p_l0.original`.
            kind = name.removeprefix("parametrizations.").rpartition("_l")[0]
            if kind in self.cell.parameters:
                init.of_cell_(parameter, self.cell, kind)
            else:
                initialise_(parameter, self, kind)

    def extra_repr(self) -> str:
        """Return the cell, the sizes and every option that differs from its default."""
        options = {
            "num_layers": 1,
            "bias": self.cell.bias,
            "batch_first": False,
            "dropout": 0,
            "bidirectional": False,
            "kernel": "auto",
            "memory": NORMAL,
            "weight_dropout": 0,
            "reverse": False,
            "recurrent_dropout": 0,
            "zoneout": 0,
            "candidate_dropout": 0,
            "heads": 1,
            "recurrent_rank": 0,
        }
        given = [(name, getattr(self, name)) for name, default in options.items() if getattr(self, name) != default]
        sizes = f"{self.cell}, {self.input_size}, {self.hidden_size}"
        return ", ".join([sizes, *(f"{name}={value}" for name, value in given)])

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script("Recurrent")
