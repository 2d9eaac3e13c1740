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
from gatewise.kernels.persistent.launches.compiled import SOURCES, on
from gatewise.kernels.persistent.launches.operands import Operand, SourceStruct, TokensStruct
from gatewise.kernels.persistent.launches.tokens import Tokens

_DIRECTIONS = 2
_OPERANDS = 2
_MOST_RESULTS = 2
_THREADS = 256
_RESULT_THREADS = 128
_MOST_BLOCKS = 4096  # several times as many as are at work at once, so that all multiprocessors end at the same time


class Rows(NamedTuple):
    """The gradients of the gate sums of a direction, with what is multiplied with them.

    Attributes:
        values: The gradients [tokens, 4H], float32, contiguous.
        exponents: The memory for the exponent of the largest value of each row [tokens], int32, see scales.cuh.
        operands: The operands of sums over tokens, at most two.
        largest_terms: For each, the memory for the exponent of the largest terms, int32, filled by `fill_unwritten`.
    """

    values: Tensor
    exponents: Tensor
    operands: Sequence[Operand] = ()
    largest_terms: Sequence[Tensor] = ()


class Matrix(NamedTuple):
    """A matrix of which the largest finite magnitude is wanted.

    Attributes:
        values: The values, float32, contiguous.
        largest: The memory for the bits of the largest magnitude, int32, filled by `fill_unwritten`.
    """

    values: Tensor
    largest: Tensor


class _Rows(ctypes.Structure):
    """The struct `Rows` of half_rows.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "exponents")),
        ("sources", SourceStruct * _OPERANDS),
        ("largest_terms", ctypes.c_void_p * _OPERANDS),
    ]


class _Matrix(ctypes.Structure):
    """The struct `Matrix` of half_rows.cu, field by field."""

    _fields_ = [("values", ctypes.c_void_p), ("count", ctypes.c_longlong), ("largest", ctypes.c_void_p)]


class _HalfRows(ctypes.Structure):
    """The struct `HalfRows` of half_rows.cu, field by field."""

    _fields_ = [
        ("rows", _Rows * _DIRECTIONS),
        ("matrices", _Matrix * _DIRECTIONS),
        ("tokens", TokensStruct),
        ("directions", ctypes.c_int),
    ]


def halve_rows(
    rows: Sequence[Rows],
    matrices: Sequence[Matrix],
    tokens: Tokens,
    lengths: Tensor | None,
    resets: Tensor | None = None,
) -> None:
    """Round gradients to float16 in place, and find the exponents by which the factors of their products are scaled.

    Each row is multiplied by a power of two, so that its largest value is in [2^14, 2^15). Its float16 values take the
    first half of its memory. Values after the end of a sequence count for nothing, nor do hidden states before a reset.

    Args:
        rows: The gradients of each direction.
        matrices: The other matrices, at most two.
        tokens: The order of the tokens.
        lengths: The sequence lengths [B] on the device, int64, or None.
        resets: The steps at which episodes begin [T, B], as in `write_operands`, or None.
    """
    count, width = rows[0].values.shape
    own = [each._replace(operands=[operand.with_contiguous_rows() for operand in each.operands]) for each in rows]
    if rows[0].values.is_meta or not count:
        return
    device = rows[0].values.device
    word = math.gcd(16, *(operand.alignment for each in own for operand in each.operands))
    arguments = _HalfRows(
        (_Rows * _DIRECTIONS)(*[_rows(each, word) for each in own]),
        (_Matrix * _DIRECTIONS)(*[_Matrix(m.data_ptr(), m.numel(), found.data_ptr()) for m, found in matrices]),
        TokensStruct.of(tokens, lengths, resets, tokens.time),
        len(rows),
    )
    grid = min(count, _MOST_BLOCKS), len(rows) + len(matrices), 1
    shape = driver.Shape(grid, _THREADS, 0, cooperative=False)
    with on(device):
        binary = _code_of_rows(width, word, device, resets is not None)
        driver.launch(binary, "recurrent_half_rows", shape, arguments, device)


def _rows(own: Rows, word: int) -> _Rows:
    sources = (SourceStruct * _OPERANDS)(*[SourceStruct.of(operand, word) for operand in own.operands])
    terms = (ctypes.c_void_p * _OPERANDS)(*[found.data_ptr() for found in own.largest_terms])
    return _Rows(own.values.data_ptr(), own.exponents.data_ptr(), sources, terms)


class Part(NamedTuple):
    """A product of float16 factors, with what determines their powers of two.

    Attributes:
        product: The product [rows, any], float32, with any distance between rows.
        largest_term: The exponent of the largest terms, int32, if the product is a sum over tokens.
        exponents: Otherwise, the exponent of each row's gradients [rows], int32.
        largest: Otherwise, the bits of the largest magnitude of the other factor, int32.
    """

    product: Tensor
    largest_term: Tensor | None = None
    exponents: Tensor | None = None
    largest: Tensor | None = None


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
        *((name, ctypes.c_void_p) for name in ("exponents", "largest", "largest_term")),
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
    with on(device):
        binary = _code_of_results(word, device)
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
    each = [None if found is None else found.data_ptr() for found in (own.exponents, own.largest, own.largest_term)]
    return _Part(own.product.data_ptr(), own.product.stride(0) // values, *each)


@functools.lru_cache(maxsize=128)
def _code_of_rows(width: int, word: int, device: torch.device, resets: bool) -> bytes:
    return Rounding.of_rows(width, word, Device.probe(device).architecture, resets=resets).compile()


@functools.lru_cache(maxsize=16)
def _code_of_results(word: int, device: torch.device) -> bytes:
    return Rounding.of_results(word, Device.probe(device).architecture).compile()


class Rounding(NamedTuple):
    """The machine code of a kernel around float16 products.

    Attributes:
        name: The name of the source: "half_rows" or "half_results".
        architecture: The architecture.
        sizes: The template parameters.
    """

    name: str
    architecture: str
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of_rows(cls, width: int, word: int, architecture: str, *, resets: bool) -> Rounding:
        """Return the code that rounds rows of gradients of a width and reads other values in words of some bytes."""
        sizes = {"WIDTH": width, "THREADS": _THREADS, "BYTES": word, "HALVES": 1, "RESETS": int(resets)}
        return cls("half_rows", architecture, (*sizes.items(),))

    @classmethod
    def of_results(cls, word: int, architecture: str) -> Rounding:
        """Return the code that scales results back, in words of a number of bytes."""
        return cls("half_results", architecture, (("BYTES", word),))

    @property
    def source(self) -> Rounding:
        """The key of the machine code."""
        return self

    def compile(self) -> bytes:
        """Compile the source, or take it from the cache on the disk."""
        macros = {**dict(self.sizes), **formats.macros(torch.float32)}
        return toolchain.compile_source(SOURCES / f"{self.name}.cu", self.architecture, macros)
