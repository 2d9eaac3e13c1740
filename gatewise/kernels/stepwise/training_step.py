"""The forward and backward pass of one layer in a training call of one time step, for a few sequences.

The forward pass is a single step (`single`) that keeps the sums of the cell. The backward pass takes two launches for
up to `MOST_ROWS` sequences. For more, the library computes the products of the second one.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.kernels.cuda import deep_products, driver, formats, toolchain
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.stepwise.launch import SOURCES, address
from gatewise.kernels.stepwise.products import gradients_dtype, state_dtype
from gatewise.kernels.stepwise.single import aligned, readable, single_call
from gatewise.kernels.stepwise.single_criteria import MOST_PARAMETERS, MOST_ROWS
from gatewise.kernels.stepwise.single_form import LANES, rows_of, width_of
from gatewise.kernels.sums import of_input, recurrent_runs

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int

_THREADS = 256  # of a block that computes products
_COLUMN_BYTES = 32  # of a row of a weight matrix, which a block multiplies: what the cache reads from memory at once
_OUTER_ROWS = 32  # of the gradient of a weight matrix, which a block computes
_MOST_LANES = 16  # the threads of a unit in the adjoint, which share the sequences


class Adjoint(ctypes.Structure):
    """The struct `Adjoint` of single_backward.cu."""

    _fields_ = [
        *[(name, _POINTER) for name in ("sums", "hidden", "others")],
        ("parameters", _POINTER * MOST_PARAMETERS),
        *[(name, _POINTER) for name in ("dy", "dhidden_after", "dothers_after", "dsums", "dothers", "dhidden")],
        *[(name, _POINTER) for name in ("dinput_bias", "drecurrent_bias", "dparameters")],
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


def forward(problem: Problem, layer: Layer) -> Result:
    """Run the forward pass of one layer.

    The kept tensor has the sums of the cell [B, S*H], in the dtype of states.
    """
    one = _of_one_layer(problem, layer.x.shape[2])
    sums = layer.x.new_empty(
        problem.batch, len(problem.cell.sums) * problem.hidden_size, dtype=state_dtype(problem.dtype)
    )
    (weights,) = layer.weights
    found = single_call(one, Inputs(layer.x, layer.h0, layer.c0, _flat(weights)), sums)
    return Result(found.y, found.h_n, found.c_n, (sums,))


def backward(problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs) -> LayerGradients:
    """Run the backward pass of one layer."""
    cell, size, device = problem.cell, problem.hidden_size, layer.x.device
    (weights,), few = layer.weights, problem.batch <= MOST_ROWS
    with driver.on(device):
        x, h0, c0 = aligned(layer.x[0]), aligned(layer.h0), aligned(layer.c0)
        own = [readable(weight, cell, size) for weight in _flat(weights)]
        dsums = x.new_empty(problem.batch, len(cell.sums) * size)
        dothers = torch.empty_like(c0)
        # Cells whose step reads the hidden state element by element have a gradient of it that is in no product.
        direct = None
        if len(carried_states(cell)) > len(cell.states):
            direct = x.new_empty(problem.batch, size, dtype=state_dtype(problem.dtype))
        wide = gradients_dtype(problem)
        biases = x.new_empty(2, problem.gate_rows, dtype=wide) if needs.weights and problem.bias else None
        parameters = x.new_empty(len(cell.parameters), size) if needs.weights and cell.parameters else None
        given = [None if each is None else aligned(each) for each in above]
        binary = _binary_of(problem, own[0], own[1])
        plain = len(own) - len(cell.parameters)
        adjoint = Adjoint(
            *map(address, (result.kept[0], h0, c0)),
            (_POINTER * MOST_PARAMETERS)(*map(address, own[plain:])),
            *map(address, (*given, dsums, dothers, direct)),
            *([None] * 2 if biases is None else map(address, biases.unbind(0))),
            address(parameters),
            problem.batch,
            size,
        )
        blocks, lanes = (-(-size // LANES), 1, 1), min(rows_of(problem.batch), _MOST_LANES)
        driver.launch(
            binary, "single_adjoint", driver.Shape(blocks, LANES * lanes, 0, cooperative=False), adjoint, device
        )
        products = _few_products if few else _library_products
        dx, dh0, matrices = products(problem, x, h0[0], own, dsums, direct, needs, binary)
    found: list[Tensor | None] = [*matrices]
    if problem.bias:
        found += [None, None] if biases is None else biases.unbind(0)
    found += [None] * len(cell.parameters) if parameters is None else parameters.unbind(0)
    return LayerGradients(
        None if dx is None else dx.unsqueeze(0),
        None if dh0 is None else dh0.unsqueeze(0),
        dothers if needs.state else None,
        tuple(found),
    )


_Found = tuple[Tensor | None, Tensor | None, tuple[Tensor | None, Tensor | None]]


def _few_products(
    problem: Problem,
    x: Tensor,
    h0: Tensor,
    weights: list[Tensor],
    dsums: Tensor,
    direct: Tensor | None,
    needs: Needs,
    binary: bytes,
) -> _Found:
    """Compute all products in one launch: the gradients of x and h0, and those of both weight matrices."""
    if not any(needs):
        return None, None, (None, None)
    wide, (w_ih, w_hh) = gradients_dtype(problem), weights[:2]
    dx = torch.empty_like(x) if needs.x else None
    dh0 = torch.empty_like(h0) if needs.state else None
    matrices = [w.new_empty(w.shape, dtype=wide) if needs.weights else None for w in (w_ih, w_hh)]
    columns, outer = _COLUMN_BYTES // problem.element_bytes, -(-problem.gate_rows // _OUTER_ROWS)
    blocks = [
        -(-x.shape[1] // columns) if needs.x else 0,
        -(-problem.hidden_size // columns) if needs.state else 0,
        *[outer if needs.weights else 0] * 2,
    ]
    arguments = Products(
        *map(address, (dsums, x, h0, w_ih, w_hh, direct, dx, dh0, *matrices)),
        problem.batch,
        x.shape[1],
        problem.hidden_size,
        (_SIZE * 4)(*blocks),
    )
    early = Device.probe(x.device).capability >= (9, 0)
    shape = driver.Shape((sum(blocks), 1, 1), _THREADS, 0, cooperative=False, early=early)
    driver.launch(binary, "single_products", shape, arguments, x.device)
    return dx, dh0, (matrices[0], matrices[1])


def _library_products(
    problem: Problem,
    x: Tensor,
    h0: Tensor,
    weights: list[Tensor],
    dsums: Tensor,
    direct: Tensor | None,
    needs: Needs,
    binary: bytes,
) -> _Found:
    """Compute what `_few_products` computes by products of the library."""
    size, wide, (w_ih, w_hh) = problem.hidden_size, gradients_dtype(problem), weights[:2]
    of_x = of_input(dsums, problem.gate_rows)
    dx = deep_products.mm(of_x, w_ih) if needs.x else None
    dh0, matrices = None, (None, None)
    if needs.state:
        for run in recurrent_runs(problem.cell):
            factors = run.columns_of(dsums, size), run.rows_of(w_hh, size)
            if dh0 is None:
                dh0 = deep_products.mm(*factors)
            else:
                deep_products.addmm(dh0, *factors)
        if dh0 is not None and direct is not None:
            dh0 += direct
    if needs.weights:
        matrices = w_ih.new_empty(w_ih.shape, dtype=wide), w_hh.new_empty(w_hh.shape, dtype=wide)
        deep_products.mm(of_x.t(), x, matrices[0])
        for run in recurrent_runs(problem.cell):
            deep_products.mm(run.columns_of(dsums, size).t(), h0, run.rows_of(matrices[1], size))
    return dx, dh0, matrices


@functools.lru_cache(maxsize=4096)
def _of_one_layer(problem: Problem, inputs: int) -> Problem:
    return problem.replace(num_layers=1, input_size=inputs, dropout=0.0)


def _flat(weights: DirectionWeights) -> tuple[Tensor, ...]:
    """Return the weights of a layer in PyTorch's order."""
    plain = [weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh]
    return (*[weight for weight in plain if weight is not None], *weights.parameters)


def macros(dtype: torch.dtype, widths: tuple[int, int], rows: int, *, wide: bool) -> dict[str, int]:
    """Return the macros with which single_backward.cu is compiled.

    Args:
        dtype: The dtype of the call.
        widths: The numbers of values of a row of the input weights and of the recurrent weights that one instruction
            loads, or stores of their gradients.
        rows: The number of sequences: a power of two. Those of more than `MOST_ROWS` sequences have no products.
        wide: Whether the gradients of weights have the dtype of states.
    """
    few = rows <= MOST_ROWS
    return formats.macros(dtype) | {
        "INPUT_WIDTH": widths[0],
        "WIDTH": widths[1],
        "WIDE": int(wide),
        "ROWS": rows if few else 1,
        "LANES_OF_UNIT": min(rows, _MOST_LANES),
        "PRODUCTS": int(few),
        "THREADS": _THREADS,
        "COLUMNS": _COLUMN_BYTES // dtype.itemsize,
        "OUTER_ROWS": _OUTER_ROWS,
        "MOST_PARAMETERS": MOST_PARAMETERS,
    }


def _binary_of(problem: Problem, w_ih: Tensor, w_hh: Tensor) -> bytes:
    size, rows = problem.element_bytes, rows_of(problem.batch)
    widths = 1, 1
    if rows <= MOST_ROWS:
        widths = (
            width_of(w_ih.data_ptr(), w_ih.shape[1] * size, size),
            width_of(w_hh.data_ptr(), w_hh.shape[1] * size, size),
        )
    wide = gradients_dtype(problem) != problem.dtype
    return _binary(problem.cell, problem.dtype, widths, rows, wide, w_ih.device)


@functools.lru_cache(maxsize=256)
def _binary(
    cell: Cell, dtype: torch.dtype, widths: tuple[int, int], rows: int, wide: bool, device: torch.device
) -> bytes:
    architecture = Device.probe(device).architecture
    defined = macros(dtype, widths, rows, wide=wide)
    return toolchain.compile_source(SOURCES / "single_backward.cu", architecture, defined, row_code(cell))
