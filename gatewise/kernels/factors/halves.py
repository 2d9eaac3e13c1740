"""Launch the kernels around float16 products of float32 gradients: they round gradients, and scale results back."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.factors.copies import SOURCES

MOST_FACTORS = 7
_MOST_RESULTS = 2
_THREADS = 256
_WARPS = _THREADS // 32
_RESULT_THREADS = 128
_MOST_BLOCKS = 4096  # several times as many as are at work at once, so that all multiprocessors end at the same time


class Factor(NamedTuple):
    """Values of which the largest finite magnitude is wanted.

    Attributes:
        values: The values [T, B, any] or [rows, any], float32, with consecutive values in each row.
        largest: The memory for its bits, int32, from `new_largest`; several factors may have the same.
        ragged: Whether values after the end of a sequence count for nothing.
    """

    values: Tensor
    largest: Tensor
    ragged: bool = False


class _Factor(ctypes.Structure):
    """The struct `Factor` of half_rows.cu, field by field."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("step", "row")),
        ("largest", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("columns", "time", "batch", "ragged", "blocks")),
    ]


class _HalfRows(ctypes.Structure):
    """The struct `HalfRows` of half_rows.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p * 2) for name in ("rows", "exponents", "largest")),
        ("of", _Factor * MOST_FACTORS),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tokens", "directions", "blocks")),
    ]


def new_largest(count: int, scratch: Scratch) -> tuple[Tensor, ...]:
    """Return memory for the bits of so many largest magnitudes, with the negative number that stands for none."""
    places = scratch.new_empty(count, dtype=torch.int32)
    if not places.is_meta:
        with driver.on(places.device):
            driver.fill_with_ones(places)
    return places.unbind()


def halve_rows(
    rows: Sequence[Tensor],
    exponents: Sequence[Tensor],
    largest: Sequence[Tensor],
    factors: Sequence[Factor],
    lengths: Tensor | None,
) -> None:
    """Round matrices to float16 in place, each row multiplied by a power of two, and find the largest of other values.

    The float16 values of a row, the largest of which is in [2^14, 2^15), take the first half of the row's memory.

    Args:
        rows: The gradients of gate sums of each direction [tokens, 4H], float32, contiguous.
        exponents: The memory for the biased exponent of the largest value of each row [tokens], int32.
        largest: The memory for the bits of the largest magnitude of each matrix, int32, from `new_largest`.
        factors: The other factors, at most `MOST_FACTORS`.
        lengths: The sequence lengths [B] on the device, int64, or None.
    """
    tokens, width = rows[0].shape
    if rows[0].is_meta or not tokens:
        return
    structs = [_factor(own, lengths is not None) for own in factors]
    blocks = min(tokens, _MOST_BLOCKS)
    arguments = _HalfRows(
        *(_addresses(tensors) for tensors in (rows, exponents, largest)),
        (_Factor * MOST_FACTORS)(*structs),
        None if lengths is None else lengths.data_ptr(),
        tokens,
        len(rows),
        blocks,
    )
    device = rows[0].device
    grid = len(rows) * blocks + sum(own.blocks for own in structs), 1, 1
    shape = driver.Shape(grid, _THREADS, 0, cooperative=False)
    with driver.on(device):
        binary = _code("half_rows", device, WIDTH=width, THREADS=_THREADS)
        driver.launch(binary, "recurrent_half_rows", shape, arguments, device)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 2)(*[tensor.data_ptr() for tensor in tensors])


def _factor(own: Factor, ragged: bool) -> _Factor:
    values = own.values if own.values.dim() == 3 else own.values.unsqueeze(0)
    time, batch, columns = values.shape
    step, row, _ = values.stride()
    address, largest = values.data_ptr(), own.largest.data_ptr()
    blocks = min(-(-time * batch // _WARPS), _MOST_BLOCKS // 4)  # a warp reads a token
    return _Factor(address, step, row, largest, columns, time, batch, ragged and own.ragged, blocks)


class Part(NamedTuple):
    """A product of float16 factors, with what determines their powers of two.

    Attributes:
        product: The product [rows, any], float32, with any distance between rows.
        largest: The bits of the largest magnitude of the other factor.
        largest_gradient: The bits of the largest magnitude of all gradients, if the product is a sum over tokens.
        exponents: The exponent of each row's gradients [rows] otherwise.
    """

    product: Tensor
    largest: Tensor
    largest_gradient: Tensor | None = None
    exponents: Tensor | None = None


class HalfResult(NamedTuple):
    """The sum of one or two products, without powers of two and padding.

    Attributes:
        parts: The products.
        into: The memory for the result [groups * rows, columns], contiguous; that of the only product where it fits.
        groups: The number of groups of rows, each of which is cropped by itself.
    """

    parts: tuple[Part, ...]
    into: Tensor
    groups: int = 1


class _Part(ctypes.Structure):
    """The struct `Part` of half_results.cu, field by field."""

    _fields_ = [
        ("product", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("exponents", "largest_gradient", "largest")),
    ]


class _Result(ctypes.Structure):
    """The struct `Result` of half_results.cu, field by field."""

    _fields_ = [
        ("parts", _Part * 2),
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("product_group", "group", "rows", "columns")),
    ]


class _Results(ctypes.Structure):
    """The struct `Results` of half_results.cu, field by field."""

    _fields_ = [("of", _Result * _MOST_RESULTS)]


def write_results(results: Sequence[HalfResult]) -> None:
    """Write the results of products of float16 factors, at most two of them in one launch."""
    if results[0].into.is_meta:
        return
    word = math.gcd(16, *(_alignment(own) for own in results))
    arguments = _Results((_Result * _MOST_RESULTS)(*[_result(own, word // 4) for own in results]))
    device, rows = results[0].into.device, max(own.into.shape[0] for own in results)
    shape = driver.Shape((min(rows, _MOST_BLOCKS), len(results), 1), _RESULT_THREADS, 0, cooperative=False)
    with driver.on(device):
        binary = _code("half_results", device, BYTES=word)
        driver.launch(binary, "recurrent_half_results", shape, arguments, device)


def _alignment(own: HalfResult) -> int:
    starts = [own.into.data_ptr(), *(part.product.data_ptr() for part in own.parts)]
    return math.gcd(*starts, 4 * own.into.shape[1], *(4 * part.product.stride(0) for part in own.parts))


def _result(own: HalfResult, values: int) -> _Result:
    (rows, columns), (product_rows, _) = own.into.shape, own.parts[0].product.shape
    parts = (_Part * 2)(*[_part(part, values) for part in own.parts])
    groups = own.groups
    return _Result(parts, own.into.data_ptr(), product_rows // groups, rows // groups, rows, columns // values)


def _part(own: Part, values: int) -> _Part:
    of_gradients = [None if each is None else each.data_ptr() for each in (own.exponents, own.largest_gradient)]
    return _Part(own.product.data_ptr(), own.product.stride(0) // values, *of_gradients, own.largest.data_ptr())


@functools.lru_cache(maxsize=128)
def _code(name: str, device: torch.device, **sizes: int) -> bytes:
    macros = {**sizes, **formats.macros(torch.float32)}
    return toolchain.compile_source(SOURCES / f"{name}.cu", Device.probe(device).architecture, macros)
