"""Launch the kernels around float16 products of float32 gradients: they round gradients, and find and undo scales."""

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
from gatewise.kernels.persistent.launches.auxiliary import AT_ONCE, copying_shape
from gatewise.kernels.persistent.launches.compiled import SOURCES
from gatewise.kernels.persistent.launches.operands import Operand, Scale, SourceStruct, TokensStruct
from gatewise.kernels.persistent.launches.tokens import Tokens

_DIRECTIONS = 2
_MOST_RESULTS = 2
_MOST_COLUMNS = 6
_THREADS = 256
_COLUMN_THREADS = 256
_MOST_BLOCKS = 4096  # several times as many as are at work at once, so that all multiprocessors end at the same time
_AT_ONCE = 8  # tokens that a warp of half_columns.cu reads at once (benchmarks/results/copies.jsonl)
_COLUMN_BLOCKS = 2048  # about as many as fit on an H200, 16 on a multiprocessor


class Rows(NamedTuple):
    """The gradients of the gate sums of a direction.

    Attributes:
        values: The gradients [tokens, 4H], float32, contiguous.
        exponents: The memory for the exponent of the largest value of each row [tokens], int32, see scales.cuh.
    """

    values: Tensor
    exponents: Tensor


class _Rows(ctypes.Structure):
    """The struct `Rows` of half_rows.cu, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in Rows._fields]


class _HalfRows(ctypes.Structure):
    """The struct `HalfRows` of half_rows.cu, field by field."""

    _fields_ = [("of", _Rows * _DIRECTIONS), ("tokens", ctypes.c_int)]


def halve_rows(rows: Sequence[Rows]) -> None:
    """Round gradients to float16 in place.

    Each row is multiplied by a power of two, so that its largest value is in [2^14, 2^15). Its float16 values take the
    first half of its memory.

    Args:
        rows: The gradients of each direction.
    """
    count, width = rows[0].values.shape
    if rows[0].values.is_meta or not count:
        return
    device = rows[0].values.device
    each = [_Rows(*[tensor.data_ptr() for tensor in own]) for own in rows]
    arguments = _HalfRows((_Rows * _DIRECTIONS)(*each), count)
    shape = driver.Shape((min(count, _MOST_BLOCKS), len(each), 1), _THREADS, 0, cooperative=False)
    with driver.on(device):
        driver.launch(_code_of_rows(width, device), "recurrent_half_rows", shape, arguments, device)


class Columns(NamedTuple):
    """Values whose columns are to be scaled.

    Attributes:
        values: The values, float32: those that a sum over tokens multiplies with gradients; or a matrix [any, 1, F].
        scale: The memory for the exponents of the columns, filled by `fill_unwritten`; and for a sum over tokens, the
            exponents of the gradients from `halve_rows`.
    """

    values: Operand
    scale: Scale


class _Columns(ctypes.Structure):
    """The struct `Columns` of half_columns.cu, field by field."""

    _fields_ = [
        ("source", SourceStruct),
        ("tokens", TokensStruct),
        *((name, ctypes.c_void_p) for name in ("exponents", "largest")),
    ]


class _HalfColumns(ctypes.Structure):
    """The struct `HalfColumns` of half_columns.cu, field by field."""

    _fields_ = [("of", _Columns * _MOST_COLUMNS)]


def scale_columns(
    wanted: Sequence[Columns], tokens: Tokens, lengths: Tensor | None, resets: Tensor | None = None
) -> None:
    """Find the exponents by which columns are scaled.

    For the values of a sum over tokens, it is the largest sum of the exponents of a value and of the largest gradient
    of the value's token, of tokens for which neither is zero; for a matrix, that of the largest value. Values after the
    end of a sequence count for nothing, nor do hidden states before a reset, infinities and NaN. Where nothing counts,
    the exponent remains what it was.

    Args:
        wanted: The values, at most six.
        tokens: The order of the tokens of sums.
        lengths: The sequence lengths [B] on the device, int64, or None.
        resets: The steps at which episodes begin [T, B], as in `write_operands`, or None.
    """
    each = [own._replace(values=own.values.with_contiguous_rows()) for own in wanted]
    first = each[0].values.source
    if first.is_meta or not tokens.time * tokens.batch:
        return
    word = math.gcd(16, *(own.values.alignment for own in each))
    of_sums = TokensStruct.of(tokens, lengths, resets, tokens.time)
    arguments = _HalfColumns((_Columns * _MOST_COLUMNS)(*[_columns(own, of_sums, word) for own in each]))
    # A warp reads 32 words of each of some tokens at once, and then of others.
    tiles = -(-4 * max(own.values.source.shape[2] for own in each) // (32 * word))
    rows = max(own.values.source.shape[0] * own.values.source.shape[1] for own in each)
    tokens_at_once = _AT_ONCE * _COLUMN_THREADS // 32
    blocks = max(1, min(-(-rows // tokens_at_once), _COLUMN_BLOCKS // (tiles * len(each))))
    shape = driver.Shape((blocks, tiles, len(each)), _COLUMN_THREADS, 0, cooperative=False)
    with driver.on(first.device):
        binary = _code_of_columns(word, first.device, resets is not None)
        driver.launch(binary, "recurrent_half_columns", shape, arguments, first.device)


def _columns(own: Columns, of_sums: TokensStruct, word: int) -> _Columns:
    exponents, largest = own.scale
    source, found = SourceStruct.of(own.values, word), largest.data_ptr()
    if exponents is not None:
        return _Columns(source, of_sums, exponents.data_ptr(), found)
    rows = own.values.source.shape[0]
    return _Columns(source, TokensStruct.of(Tokens(rows, 1, by_row=False), None, None, rows), None, found)


class Part(NamedTuple):
    """A product of float16 factors, with what determines their powers of two.

    Attributes:
        product: The product [rows, columns], float32, with any distance between rows.
        columns: The exponents of the columns, int32, from `scale_columns`.
        rows: The exponents of the gradients of each row [rows], int32; None if the product is a sum over tokens.
    """

    product: Tensor
    columns: Tensor
    rows: Tensor | None = None


class HalfResult(NamedTuple):
    """The sum of one or two products, without powers of two and padding.

    Attributes:
        parts: The products.
        into: The memory for the result [groups * rows, columns], with any distance between rows, whose values are
            adjacent; that of the first product where it fits.
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
        *((name, ctypes.c_void_p) for name in ("rows", "columns")),
    ]


class _Result(ctypes.Structure):
    """The struct `Result` of half_results.cu, field by field."""

    _fields_ = [
        ("parts", _Part * 2),
        ("to", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
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
    device, sizes = results[0].into.device, [own.into.shape for own in results]
    words = 4 * max(columns for _, columns in sizes) // word
    shape = copying_shape("half_results", max(rows for rows, _ in sizes), words, len(results))
    with driver.on(device):
        binary = _code_of_results(word, device)
        driver.launch(binary, "recurrent_half_results", shape, arguments, device)


def _alignment(own: HalfResult) -> int:
    rows = [own.into, *(part.product for part in own.parts)]
    starts = [*rows, *(part.columns for part in own.parts)]
    places = *(each.data_ptr() for each in starts), *(4 * each.stride(0) for each in rows)
    return math.gcd(4 * own.into.shape[1], *places)


def _result(own: HalfResult, values: int) -> _Result:
    (rows, columns), (product_rows, _) = own.into.shape, own.parts[0].product.shape
    parts = (_Part * 2)(*[_part(part, values) for part in own.parts])
    groups, stride = own.groups, own.into.stride(0) // values
    return _Result(parts, own.into.data_ptr(), stride, product_rows // groups, rows // groups, rows, columns // values)


def _part(own: Part, values: int) -> _Part:
    rows = None if own.rows is None else own.rows.data_ptr()
    return _Part(own.product.data_ptr(), own.product.stride(0) // values, rows, own.columns.data_ptr())


@functools.lru_cache(maxsize=128)
def _code_of_rows(width: int, device: torch.device) -> bytes:
    return Rounding.of_rows(width, Device.probe(device).architecture).compile()


@functools.lru_cache(maxsize=16)
def _code_of_columns(word: int, device: torch.device, resets: bool) -> bytes:
    return Rounding.of_columns(word, Device.probe(device).architecture, resets=resets).compile()


@functools.lru_cache(maxsize=16)
def _code_of_results(word: int, device: torch.device) -> bytes:
    return Rounding.of_results(word, Device.probe(device).architecture).compile()


class Rounding(NamedTuple):
    """The machine code of a kernel around float16 products.

    Attributes:
        name: The name of the source: "half_rows", "half_columns" or "half_results".
        architecture: The architecture.
        sizes: The template parameters.
    """

    name: str
    architecture: str
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of_rows(cls, width: int, architecture: str) -> Rounding:
        """Return the code that rounds rows of gradients of a width."""
        return cls("half_rows", architecture, (("WIDTH", width), ("THREADS", _THREADS)))

    @classmethod
    def of_columns(cls, word: int, architecture: str, *, resets: bool) -> Rounding:
        """Return the code that finds the exponents of columns, reading words of a number of bytes."""
        sizes = {"THREADS": _COLUMN_THREADS, "AT_ONCE": _AT_ONCE, "BYTES": word, "HALVES": 1, "RESETS": int(resets)}
        return cls("half_columns", architecture, (*sizes.items(),))

    @classmethod
    def of_results(cls, word: int, architecture: str) -> Rounding:
        """Return the code that scales results back, in words of a number of bytes."""
        return cls("half_results", architecture, (("BYTES", word), ("AT_ONCE", AT_ONCE["half_results"])))

    @property
    def source(self) -> Rounding:
        """The key of the machine code."""
        return self

    def compile(self) -> bytes:
        """Compile the source, or take it from the cache on the disk."""
        macros = {**dict(self.sizes), **formats.macros(torch.float32)}
        return toolchain.compile_source(SOURCES / f"{self.name}.cu", self.architecture, macros)
