"""The tensors of a setting: a layer, its input, and the corresponding tensors for the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.cells import Cell, cell_named, in_training
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.functional.initial_states import initial_states
from gatewise.functional.passes import with_masks
from gatewise.nn import GRU, LSTM, Recurrent
from gatewise.nn.weight_dropout import with_dropped_weights
from gatewise.testing.cases import with_positive_normalizers
from gatewise.testing.trials.memory import laid_out, walled
from gatewise.testing.trials.setting import Setting

_RESET_RATE = 0.1
_MASKS_SEED = 0


class Tensors(NamedTuple):
    """The tensors of a call.

    Attributes:
        layer: The layer, with its parameters laid out as in the setting.
        input: The input [T, B, I], or a packed sequence.
        x: The leaf whose gradient is computed: the input, or the data of the packed sequence.
        state: The initial hidden state and the other initial states side by side, or None.
        lengths: The lengths in the form that the layer accepts, or None.
        above: The gradients of y, h_n and c_n in the layer's layout; None for those that the setting does not have.
        resets: The resets [T, B] in the dtype of the setting, or None.
        masks: The masks of dropout and zoneout that every call draws, if `seed_masks` comes before it.
    """

    layer: LSTM | GRU | Recurrent
    input: Tensor | PackedSequence
    x: Tensor
    state: tuple[Tensor, Tensor] | None
    lengths: Tensor | list[int] | None
    above: OutputGradients
    resets: Tensor | None
    masks: tuple[Tensor, ...] = ()


class Asked(NamedTuple):
    """The tensors of the reference.

    Attributes:
        problem: The description of the call, in the dtype of the computation.
        inputs: The inputs in that dtype.
        above: The gradients of the outputs, or None.
        order: The index in the user's batch of each row of a packed batch; None if the orders are equal.
        steps: The step of each row that the reference reads at each step [T, B], for a layer that reads sequences from
            their last step to their first; None for others.
        factors: The derivative of each weight of the reference by the layer's parameter, where the layer drops
            weights; no factors otherwise.
    """

    problem: Problem
    inputs: Inputs
    above: OutputGradients | None
    order: Tensor | None
    steps: Tensor | None = None
    factors: tuple[Tensor, ...] = ()

    def to_user(self, result: Result, gradients: InputGradients | None) -> tuple[Result, InputGradients | None]:
        """Return the result of the reference in the order of the user's batch and of time."""
        if self.steps is not None:
            result = result._replace(y=_in_steps(result.y, self.steps))
            if gradients is not None and gradients.x is not None:
                gradients = gradients._replace(x=_in_steps(gradients.x, self.steps))
        if self.factors and gradients is not None:
            weights = [
                own if own is None else own * factor
                for own, factor in zip(gradients.weights, self.factors, strict=True)
            ]
            gradients = gradients._replace(weights=tuple(weights))
        if self.order is None:
            return result, gradients
        back = torch.argsort(self.order)
        result = result._replace(h_n=result.h_n.index_select(1, back), c_n=result.c_n.index_select(1, back))
        if gradients is not None and gradients.h0 is not None and gradients.c0 is not None:
            h0, c0 = gradients.h0.index_select(1, back), gradients.c0.index_select(1, back)
            gradients = gradients._replace(h0=h0, c0=c0)
        return result, gradients


def make(setting: Setting) -> tuple[Tensors, Asked]:
    """Return the tensors of a setting, and those of the reference."""
    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    generator = torch.Generator(device).manual_seed(setting.seed)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * deviation).to(dtype)

    layer = _layer(setting, device, dtype, normal)
    problem = _problem(setting)
    rows = _lengths(setting)
    states = problem.num_layers * problem.num_directions
    x = laid_out(normal(setting.time, setting.batch, setting.input_size), setting.x)
    h0 = walled(normal(states, setting.batch, problem.state_size))
    c0 = walled(with_positive_normalizers(problem.cell, normal(states, setting.batch, problem.states_size)))
    _poison(setting, x, rows)
    lengths = _as_given(setting, rows, device)
    layout = problem.layout
    batch_sizes = order = None
    given: Tensor | PackedSequence
    if setting.packed:
        packed = nn.utils.rnn.pack_padded_sequence(x, rows, enforce_sorted=False)
        order = packed.sorted_indices
        x = laid_out(packed.data[:, None], setting.x)[:, 0].detach()
        x.requires_grad_(setting.x_learned and setting.training)
        given, batch_sizes = packed._replace(data=x), packed.batch_sizes
    else:
        x = x.detach().requires_grad_(setting.x_learned and setting.training)
        given = x
    learned = setting.states == "learned" and setting.training
    state = None if setting.states == "none" else (h0.requires_grad_(learned), c0.requires_grad_(learned))
    if state is None:
        h0, c0 = initial_states(problem.cell, torch.zeros_like(h0), torch.zeros_like(c0))
    y_shape = (*x.shape[:-1], problem.output_size)
    inner = setting.computes_in
    wanted = setting.above.split()
    of_y = normal(*y_shape).to(inner)
    if setting.above == "sum":
        of_y = of_y.new_ones(()).expand(y_shape)
    above = OutputGradients(
        of_y if {"y", "sum"} & set(wanted) else None,
        normal(*h0.shape).to(inner) if "h" in wanted else None,
        normal(*c0.shape).to(inner) if "c" in wanted else None,
    )
    resets = None
    if setting.resets:
        drawn = torch.rand(setting.time, setting.batch, generator=generator, device=device) < _RESET_RATE
        resets = drawn.to(getattr(torch, setting.resets))

    def sorted_rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or order is None else tensor.index_select(1, order)

    parameters = [weight.detach() for names in layer.all_weights for weight in names]
    dropped, factors, each = parameters, (), len(layer.all_weights[0])
    seed_masks()
    if setting.weight_dropout:
        dropped = with_dropped_weights(parameters, each, setting.weight_dropout)
        seed_masks()
        ones = [torch.ones_like(weight, dtype=torch.float64) for weight in parameters]
        factors = with_dropped_weights(ones, each, setting.weight_dropout)
    weights = tuple(weight.to(inner, copy=True) for weight in dropped)
    ragged = layout in (Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS)
    # Copied, so that a call that modifies its inputs is detected.
    steps = _steps_from_the_last(rows, setting.time).to(device) if setting.reverse else None
    inputs = Inputs(
        _in_steps(x.detach().to(inner, copy=True), steps),
        sorted_rows(h0.detach().to(inner, copy=True)),  # type: ignore[arg-type]
        sorted_rows(c0.detach().to(inner, copy=True)),  # type: ignore[arg-type]
        weights,
        rows if ragged else None,
        batch_sizes,
        resets=None if resets is None else resets.bool(),
    )
    inputs = with_masks(problem, inputs)
    copied = [None if one is None else one.clone() for one in above]
    of_outputs = None if copied[0] is None else _in_steps(copied[0], steps)
    own = OutputGradients(of_outputs, sorted_rows(copied[1]), sorted_rows(copied[2]))
    tensors = Tensors(layer, given, x, state, lengths, above, resets, inputs.masks)
    return tensors, Asked(problem, inputs, own if setting.training else None, order, steps, factors)


def seed_masks() -> None:
    """Set the state of PyTorch's generators to that in which every call of a setting draws its masks."""
    torch.manual_seed(_MASKS_SEED)


def _steps_from_the_last(rows: Tensor, time: int) -> Tensor:
    steps = torch.arange(time)[:, None]
    return torch.where(steps < rows, rows - 1 - steps, steps)


def _in_steps(sequence: Tensor, steps: Tensor | None) -> Tensor:
    """Return a tensor [T, B, F] with the values of other steps; they are in the order of time again if done twice."""
    return sequence if steps is None else sequence.gather(0, steps[:, :, None].expand_as(sequence))


def _problem(setting: Setting) -> Problem:
    layout = Layout.DENSE
    if setting.packed:
        layout = Layout.PACKED
    elif setting.lengths:
        layout = Layout.HOST_LENGTHS if setting.lengths_on_cpu else Layout.DEVICE_LENGTHS
    return Problem(
        setting.time,
        setting.batch,
        setting.input_size,
        setting.hidden_size,
        proj_size=setting.proj_size,
        num_layers=setting.num_layers,
        bidirectional=setting.bidirectional,
        bias=setting.bias,
        dtype=setting.computes_in,
        layout=layout,
        dropout=setting.dropout,
        needs_grad=setting.training,
        allow_tf32=setting.allow_tf32 and setting.computes_in == torch.float32,
        cell=_cell(setting),
        resets=bool(setting.resets),
    )


def _cell(setting: Setting) -> Cell:
    cell = cell_named(setting.cell)
    if not setting.regularised:
        return cell
    zoneout = (setting.zoneout, *[setting.zoneout_others] * len(cell.states))
    return in_training(cell, setting.recurrent_dropout, zoneout, setting.candidate_dropout)


def _layer(
    setting: Setting, device: torch.device, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> LSTM | GRU | Recurrent:
    sizes = setting.input_size, setting.hidden_size, setting.num_layers
    options: dict[str, Any] = {
        "bias": setting.bias,
        "batch_first": setting.batch_first,
        "dropout": setting.dropout,
        "bidirectional": setting.bidirectional,
        "device": device,
        "dtype": dtype,
        "kernel": setting.kernel,
        "memory": setting.memory,
        "reverse": setting.reverse,
        "weight_dropout": setting.weight_dropout,
    }
    cell = cell_named(setting.cell)
    zoneout = {"h": setting.zoneout} | dict.fromkeys(cell.states, setting.zoneout_others)
    rates: dict[str, Any] = {
        "recurrent_dropout": setting.recurrent_dropout,
        "zoneout": zoneout,
        "candidate_dropout": setting.candidate_dropout,
    }
    match setting.cell:
        case _ if setting.regularised:
            layer = Recurrent(cell, *sizes, **options, **rates)
        case "lstm":
            layer = LSTM(*sizes, **options, proj_size=setting.proj_size)
        case "gru":
            layer = GRU(*sizes, **options)
        case _:
            layer = Recurrent(cell, *sizes, **options)
    names = [name for name, _ in layer.named_parameters()]
    for number, name in enumerate(names):
        own = getattr(layer, name)
        # Without an activation function that is bounded, larger weights make sequences grow beyond all dtypes.
        spread = 0.3 if own.dim() == 1 else (0.5 if setting.cell == "rnn_relu" else 1.0) * setting.hidden_size**-0.5
        value = normal(*own.shape, deviation=spread)
        if setting.weights == "flat":
            with torch.no_grad():
                own.copy_(value)
        elif setting.weights == "transposed" and own.dim() == 2:
            setattr(layer, name, nn.Parameter(walled(value.t()).t()))
        else:
            setattr(layer, name, nn.Parameter(walled(value, odd=setting.weights == "odd")))
        getattr(layer, name).requires_grad_(setting.training and number < len(names) - setting.frozen)
    return layer


def _lengths(setting: Setting) -> Tensor:
    if not setting.ragged:
        return torch.full((setting.batch,), setting.time, dtype=torch.int64)
    generator = torch.Generator().manual_seed(setting.seed)
    shortest = 1 if setting.packed else 0
    rows = torch.randint(shortest, setting.time + 1, (setting.batch,), generator=generator)
    if setting.packed:
        rows[0] = setting.time  # so that T is the length of the longest sequence of the packed batch
    return rows


def _as_given(setting: Setting, rows: Tensor, device: torch.device) -> Tensor | list[int] | None:
    if not setting.lengths:
        return None
    if setting.lengths == "list":
        return rows.tolist()
    return rows.to("cpu" if setting.lengths_on_cpu else device, getattr(torch, setting.lengths))


def _poison(setting: Setting, x: Tensor, rows: Tensor) -> None:
    if not x.numel():
        return
    if setting.poison == "x":
        generator = torch.Generator().manual_seed(setting.seed)
        at = [int(torch.randint(size, (), generator=generator)) for size in x.shape]
        x[tuple(at)] = math.nan
    elif setting.poison == "padding" and setting.x != "one row":
        beyond = torch.arange(setting.time)[:, None] >= rows
        x[beyond.to(x.device)] = math.nan


def write_over(old: Tensors, new: Tensors) -> None:
    """Overwrite tensors in place with the values of others of the same setting."""

    def each(tensors: Tensors) -> list[Tensor | None]:
        lengths = tensors.lengths if isinstance(tensors.lengths, Tensor) else None
        return [tensors.x, *(tensors.state or ()), lengths, tensors.resets, *tensors.above, *tensors.layer.parameters()]

    with torch.no_grad():
        for target, source in zip(each(old), each(new), strict=True):
            if target is not None and source is not None and not _repeats(target):
                target.copy_(source)


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in the gradient of a sum, which is 1 everywhere."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
