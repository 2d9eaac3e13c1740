"""One layer of a training call with a single time step: its forward and its backward pass, for at most 64 sequences.

The forward pass is that of a call without gradients (`single`), which also keeps the sums of the cell. For up to
`MOST_ROWS` sequences the backward pass is two launches. For more, it is one launch, and matrix products of PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.kernels.cuda import deep_products, driver, formats, toolchain
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.stepwise.launch import SOURCES, Prepared
from gatewise.kernels.stepwise.products import gradients_dtype, state_dtype
from gatewise.kernels.stepwise.single import aligned, readable, single_call
from gatewise.kernels.stepwise.single_criteria import MOST_PARAMETERS, MOST_ROWS, SHARED_BYTES
from gatewise.kernels.stepwise.single_form import LANES, VECTOR_BYTES, rows_of, width_of
from gatewise.kernels.sums import has_scattered_sums, of_input, recurrent_runs

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int

_THREADS = 512  # of a block that computes products
_COLUMN_BYTES = 32  # of a row of a weight matrix, which a block multiplies: what the cache reads from memory at once
_OUTER_ROWS = 32  # of the gradient of a weight matrix, which a block computes
_MOST_LANES = 16  # the threads of a unit in the adjoint, which share the sequences


class Adjoint(ctypes.Structure):
    """The struct `Adjoint` of single_backward.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("sums", "hidden", "others", "dy", "dhidden_after", "dothers_after")],
        *[(name, _POINTER) for name in ("dsums", "dothers", "dhidden", "dhidden_before", "dproducts")],
        *[(name, _POINTER) for name in ("dinput_bias", "drecurrent_bias", "dparameters")],
        ("parameters", _POINTER * MOST_PARAMETERS),
        ("batch", _SIZE),
        ("units", _SIZE),
    ]


class Products(ctypes.Structure):
    """The struct `Products` of single_backward.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("dsums", "x", "hidden", "input_weights", "recurrent_weights", "dhidden")],
        *[(name, _POINTER) for name in ("dx", "dhidden_before", "dinput_weights", "drecurrent_weights")],
        *[(name, _SIZE) for name in ("batch", "inputs", "units")],
        ("blocks", _SIZE * 4),
    ]


class _Factors(NamedTuple):
    """The factors of the matrix products of a backward pass.

    Attributes:
        x: The input [1, B, I].
        h0: The hidden states before the step [1, B, H].
        w_ih: The input weights [G*H, I].
        w_hh: The recurrent weights [G*H, H].
        dsums: The gradients of the sums [B, number of sums * H].
        dproducts: The gradients of the recurrent products [B, G*H] for the library; None if they are consecutive
            columns of the gradients of the sums.
        direct: The part of the gradient of the hidden states [B, H] that is in no product; None if the cell's step
            reads them in products alone. It is in the dtype of states for a launch, and in that of the call for the
            library.
    """

    x: Tensor
    h0: Tensor
    w_ih: Tensor
    w_hh: Tensor
    dsums: Tensor
    dproducts: Tensor | None
    direct: Tensor | None


def forward(problem: Problem, layer: Layer) -> Result:
    """Run the forward pass of one layer.

    The kept tensor has the sums of the cell [B, number of sums * H], in the dtype of states.
    """
    one = _of_one_layer(problem, layer.x.shape[2])
    sums = layer.x.new_empty(
        problem.batch, len(problem.cell.sums) * problem.hidden_size, dtype=state_dtype(problem.dtype)
    )
    (weights,) = layer.weights
    found = single_call(one, Inputs(layer.x, layer.h0, layer.c0, weights.tensors()), sums)
    return Result(found.y, found.h_n, found.c_n, (sums,))


def backward(problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs) -> LayerGradients:
    """Run the backward pass of one layer."""
    cell, batch, size, device = problem.cell, problem.batch, problem.hidden_size, layer.x.device
    (weights,) = layer.weights
    with driver.on(device):
        x, h0, c0 = aligned(layer.x), aligned(layer.h0), aligned(layer.c0)
        own = [readable(weight, cell, size) for weight in weights.tensors()]
        matrices = own[0].data_ptr() % VECTOR_BYTES, own[1].data_ptr() % VECTOR_BYTES
        # A thread writes the addresses of a call to arguments of its own.
        adjoint, multiply = _launches_of(problem, x.shape[2], matrices, needs, device, threading.get_ident())
        dsums, dothers = x.new_empty(batch, len(cell.sums) * size), torch.empty_like(c0)
        direct = dproducts = None
        if needs.state and len(carried_states(cell)) > len(cell.states):
            dtype = problem.dtype if multiply is None else state_dtype(problem.dtype)
            direct = x.new_empty(batch, size, dtype=dtype)
        if multiply is None and (needs.state or needs.weights) and has_scattered_sums(cell):
            dproducts = x.new_empty(batch, problem.gate_rows)
        biases = parameters = None
        if needs.weights and problem.bias:
            biases = x.new_empty(2, problem.gate_rows, dtype=gradients_dtype(problem)).unbind(0)
        if needs.weights and cell.parameters:
            parameters = x.new_empty(len(cell.parameters), size)
        given = [None if each is None else aligned(each) for each in above]
        # The struct has a pointer for each dtype of the direct part.
        of_hidden = (None, direct) if multiply is None else (direct, None)
        results = dsums, dothers, *of_hidden, dproducts, *(biases or (None, None)), parameters
        adjoint(result.kept[0], h0, c0, *given, *results, *own[len(own) - len(cell.parameters) :])
        factors = _Factors(x, h0, own[0], own[1], dsums, dproducts, direct)
        if multiply is None:
            dx, dh0, dw_ih, dw_hh = _library_products(problem, factors, needs)
        else:
            dx, dh0, dw_ih, dw_hh = _few_products(problem, factors, needs, multiply)
    found = [dw_ih, dw_hh]
    if problem.bias:
        found += biases or (None, None)
    found += [None] * len(cell.parameters) if parameters is None else parameters.unbind(0)
    return LayerGradients(dx, dh0, dothers if needs.state else None, tuple(found))


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _few_products(problem: Problem, factors: _Factors, needs: Needs, multiply: Prepared) -> _Gradients:
    """Return the gradients of x, h0 and both weight matrices, which one launch computes."""
    x, h0, w_ih, w_hh, *_ = factors
    wide = gradients_dtype(problem)
    dx = torch.empty_like(x) if needs.x else None
    dh0 = torch.empty_like(h0) if needs.state else None
    dw_ih = torch.empty_like(w_ih, dtype=wide) if needs.weights else None
    dw_hh = torch.empty_like(w_hh, dtype=wide) if needs.weights else None
    multiply(factors.dsums, x, h0, w_ih, w_hh, factors.direct, dx, dh0, dw_ih, dw_hh)
    return dx, dh0, dw_ih, dw_hh


def _library_products(problem: Problem, factors: _Factors, needs: Needs) -> _Gradients:
    """Return the gradients of x, h0 and both weight matrices, which PyTorch's matrix products compute."""
    x, h0, w_ih, w_hh, dsums, dproducts, direct = factors
    wide, of_x = gradients_dtype(problem), of_input(dsums, problem.gate_rows)
    of_h = recurrent_runs(problem.cell)[0].columns_of(dsums, problem.hidden_size) if dproducts is None else dproducts
    dx = dh0 = dw_ih = dw_hh = None
    if needs.x:
        dx = deep_products.mm(of_x, w_ih).unsqueeze(0)
    if needs.state:
        if direct is None:
            direct = deep_products.mm(of_h, w_hh)
        else:
            deep_products.addmm(direct, of_h, w_hh)
        dh0 = direct.unsqueeze(0)
    if needs.weights:
        dw_ih = deep_products.mm(of_x.t(), x[0], torch.empty_like(w_ih, dtype=wide))
        dw_hh = deep_products.mm(of_h.t(), h0[0], torch.empty_like(w_hh, dtype=wide))
    return dx, dh0, dw_ih, dw_hh


@functools.lru_cache(maxsize=256)
def _launches_of(
    problem: Problem, inputs: int, misaligned: tuple[int, int], needs: Needs, device: torch.device, thread: int
) -> tuple[Prepared, Prepared | None]:
    """Return the launches of a backward pass; None for the second if PyTorch multiplies, or nothing is needed.

    The launches depend on nothing of a call but the arguments of this function: a call writes all addresses anew.

    Args:
        problem: The call.
        inputs: The number of input features of the layer.
        misaligned: The addresses of both weight matrices, modulo the bytes of the widest loads.
        needs: The gradients to compute.
        device: The device.
        thread: The thread that writes the addresses and launches.
    """
    batch, size, rows, itemsize = problem.batch, problem.hidden_size, rows_of(problem.batch), problem.element_bytes
    few = batch <= MOST_ROWS
    first, second = misaligned
    widths = width_of(first, inputs * itemsize, itemsize), width_of(second, size * itemsize, itemsize)
    wide = gradients_dtype(problem) != problem.dtype
    defined = macros(problem.cell, problem.dtype, widths if few else (1, 1), rows, wide=wide)
    numbers = Device.probe(device)
    source = SOURCES / "single_backward.cu"
    binary = toolchain.compile_source(source, numbers.architecture, defined, row_code(problem.cell))

    shape = driver.Shape((-(-size // LANES), 1, 1), LANES * defined["LANES_OF_UNIT"], 0, cooperative=False)
    adjoint = Prepared.of(binary, "single_adjoint", shape, Adjoint(batch=batch, units=size), device)
    if not few or not any(needs):
        return adjoint, None
    columns, outer = _COLUMN_BYTES // itemsize, -(-problem.gate_rows // _OUTER_ROWS)
    wanted = needs.x, needs.state, needs.weights, needs.weights
    every = -(-inputs // columns), -(-size // columns), outer, outer
    blocks = [number if is_wanted else 0 for number, is_wanted in zip(every, wanted, strict=True)]
    early = numbers.capability >= (9, 0)
    shape = driver.Shape((sum(blocks), 1, 1), _THREADS, 0, cooperative=False, early=early)
    arguments = Products(batch=batch, inputs=inputs, units=size, blocks=(_SIZE * 4)(*blocks))
    return adjoint, Prepared.of(binary, "single_products", shape, arguments, device)


@functools.lru_cache(maxsize=4096)
def _of_one_layer(problem: Problem, inputs: int) -> Problem:
    return problem.replace(num_layers=1, input_size=inputs, dropout=0.0)


def macros(cell: Cell, dtype: torch.dtype, widths: tuple[int, int], rows: int, *, wide: bool) -> dict[str, int]:
    """Return the macros with which single_backward.cu is compiled.

    Args:
        cell: The cell.
        dtype: The dtype of the call.
        widths: The numbers of values of a row of the input weights and of the recurrent weights that one instruction
            loads, or stores of their gradients.
        rows: The number of sequences: a power of two. Above `MOST_ROWS`, the source is compiled without products.
        wide: Whether the gradients of weights have the dtype of states.
    """
    few = rows <= MOST_ROWS
    # Shared memory has the totals of each thread: those of the sums and of the parameters.
    totals = LANES * (len(cell.sums) + len(cell.parameters)) * state_dtype(dtype).itemsize
    return formats.macros(dtype) | {
        "INPUT_WIDTH": widths[0],
        "WIDTH": widths[1],
        "WIDE": int(wide),
        "ROWS": rows if few else 1,
        "LANES_OF_UNIT": min(rows, _MOST_LANES, SHARED_BYTES // totals),
        "PRODUCTS": int(few),
        "THREADS": _THREADS,
        "COLUMNS": _COLUMN_BYTES // dtype.itemsize,
        "OUTER_ROWS": _OUTER_ROWS,
        "MOST_PARAMETERS": MOST_PARAMETERS,
    }
