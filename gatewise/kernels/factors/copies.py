"""Launch the kernels that copy factors of matrix products: padded or cropped, gathered by steps, rounded to float16."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.factors.padding import hidden_of
from gatewise.kernels.factors.tokens import Tokens

SOURCES = Path(__file__).parent / "cuda"
MOST_OPERANDS = 4
_THREADS = 128
_MOST_BLOCKS = 2048  # about as many as fit on an H200, 16 on a multiprocessor; each takes several rows


class _Fit(ctypes.Structure):
    """The struct `Fit` of fit.cu, field by field."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("source_group", "source_columns", "rows", "group", "columns")),
        ("largest", ctypes.c_void_p),
    ]


def resized(
    matrix: Tensor,
    rows: int,
    columns: int,
    groups: int = 1,
    *,
    scratch: Scratch | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return a matrix [groups * rows, columns]: `matrix`, padded with zeros or cropped.

    Args:
        matrix: The matrix [groups * any, any], which is returned itself if it has the size asked for, its address is a
            multiple of 16 bytes, and `into` is None.
        rows: The number of rows of each group.
        columns: The number of columns.
        groups: The number of groups of rows; each group is padded or cropped by itself.
        scratch: The memory that the result is allocated in; None to allocate it by PyTorch.
        into: A contiguous tensor for the result, or None to allocate it.
    """
    if into is None and matrix.shape == (groups * rows, columns) and matrix.data_ptr() % 16 == 0:
        return matrix.contiguous()
    target = (scratch or matrix).new_empty(groups * rows, columns) if into is None else into
    return _fitted(matrix, target, groups)


def _fitted(matrix: Tensor, target: Tensor, groups: int, largest: Tensor | None = None) -> Tensor:
    """Write a matrix to a contiguous one of another size, in float16 if the largest magnitude is given."""
    if target.is_meta or not target.numel():
        return target
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    (rows, columns), (source_rows, source_columns) = target.shape, matrix.shape
    stride, size, start = matrix.stride(0), matrix.element_size(), matrix.data_ptr()
    end = target.data_ptr() * (size // target.element_size())
    word = math.gcd(16, start, end, stride * size, source_columns * size, columns * size)
    values = word // size
    sizes = stride // values, source_rows // groups, source_columns // values
    found = None if largest is None else largest.data_ptr()
    arguments = _Fit(start, target.data_ptr(), *sizes, rows, rows // groups, columns // values, found)
    shape = driver.Shape((min(rows, _MOST_BLOCKS), 1, 1), _THREADS, 0, cooperative=False)
    with driver.on(matrix.device):
        binary = _copying_code("fit", word, matrix.device, halves=largest is not None)
        driver.launch(binary, "recurrent_fit", shape, arguments, matrix.device)
    return target


def halved(matrix: Tensor, rows: int, columns: int, groups: int, largest: Tensor, scratch: Scratch) -> Tensor:
    """Return a float32 matrix [groups * rows, columns], as `resized`, in float16.

    All values are multiplied by the power of two that brings the largest to [2^14, 2^15).

    Args:
        matrix: The matrix.
        rows: The number of rows of each group.
        columns: The number of columns, a multiple of 8.
        groups: The number of groups of rows.
        largest: The bits of the largest finite magnitude, from `halve_rows`.
        scratch: The memory that the result is allocated in.
    """
    return _fitted(matrix, scratch.new_empty(groups * rows, columns, dtype=torch.float16), groups, largest)


class Operand(NamedTuple):
    """Values of a sequence that a matrix product multiplies with the gradients of the same steps.

    Attributes:
        source: The values of all steps [T, B, F].
        first: The values [B, F] for the step that a batch row begins with, contiguous; None if `shift` is 0.
        shift: The step whose values are taken, counted from the step that they are for: 0, -1 for the step before, or,
            in the reverse direction, 1.
        start: The number of steps of the sequence before the first one that is gathered.
    """

    source: Tensor
    first: Tensor | None = None
    shift: int = 0
    start: int = 0

    def new(self, tokens: Tokens, scratch: Scratch) -> Tensor:
        """Return uninitialised memory for the gathered values [tokens, F], F padded."""
        return scratch.new_empty(tokens.time * tokens.batch, hidden_of(self.source.shape[2]))


def states_before(y: Tensor, first: Tensor, direction: int, start: int = 0) -> Operand:
    """Return the hidden states that each step read, as an operand of a matrix product.

    Args:
        y: The outputs of a direction [T, B, F].
        first: Its initial states [B, F].
        direction: 0, or 1 for reverse.
        start: The number of steps before the first one, as in `Operand`.
    """
    return Operand(y, first.contiguous(), 1 if direction else -1, start)


class Scale(NamedTuple):
    """What determines the powers of two by which the values of an operand are multiplied, see operands.cu.

    Attributes:
        exponents: The biased exponent of the largest gradient of each token [tokens], int32.
        largest_gradient: The bits of the largest magnitude of all gradients.
        largest: The bits of the largest magnitude of the operand.
    """

    exponents: Tensor
    largest_gradient: Tensor
    largest: Tensor


class _Operand(ctypes.Structure):
    """The struct `Operand` of operands.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "first", "target")),
        *((name, ctypes.c_longlong) for name in ("step", "row")),
        *((name, ctypes.c_int) for name in ("columns", "width", "stride", "shift", "start")),
        *((name, ctypes.c_void_p) for name in Scale._fields),
    ]


class _Operands(ctypes.Structure):
    """The struct `Operands` of operands.cu, field by field."""

    _fields_ = [
        ("of", _Operand * MOST_OPERANDS),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("total", "time", "batch", "step", "row")),
        ("resets", ctypes.c_void_p),
    ]


def write_operands(
    wanted: Sequence[Operand],
    into: Sequence[Tensor],
    tokens: Tokens,
    lengths: Tensor | None,
    resets: Tensor | None = None,
    scales: Sequence[Scale] = (),
) -> None:
    """Gather the values of operands in one launch, with zeros after the end of sequences and as padding.

    Args:
        wanted: The operands, at most `MOST_OPERANDS`.
        into: The memory for each, from `Operand.new`.
        tokens: The steps that are gathered, and the order of their tokens.
        lengths: The sequence lengths [B] on the device, int64, or None.
        resets: The steps of the whole sequence at which episodes begin [T, B], or None. Where a step reads zeros in
            place of the hidden states before it, operands with a shift are zeros.
        scales: For each operand, what determines the powers of two by which its float32 values are multiplied; the
            memory is then float16, in rows of any distance. Nothing to gather the values as they are.
    """
    sources = [own._replace(source=_with_contiguous_rows(own.source)) for own in wanted]
    if into[0].is_meta or not tokens.time * tokens.batch:
        return
    word = math.gcd(16, *(_alignment(own, target) for own, target in zip(sources, into, strict=True)))
    every = scales or [None] * len(wanted)
    each = [_struct(*given, word) for given in zip(sources, into, every, strict=True)]
    arguments = _Operands(
        (_Operand * MOST_OPERANDS)(*each),
        None if lengths is None else lengths.data_ptr(),
        sources[0].source.shape[0],
        tokens.time,
        tokens.batch,
        tokens.step,
        tokens.row,
        None if resets is None else resets.data_ptr(),
    )
    device = into[0].device
    blocks = min(-(-tokens.time * tokens.batch // (_THREADS // 32)), _MOST_BLOCKS)  # a warp copies a token
    shape = driver.Shape((blocks, len(each), 1), _THREADS, 0, cooperative=False)
    with driver.on(device):
        binary = _copying_code("operands", word, device, resets is not None, bool(scales))
        driver.launch(binary, "recurrent_operands", shape, arguments, device)


def _with_contiguous_rows(source: Tensor) -> Tensor:
    return source if source.stride(2) == 1 else source.contiguous()


def _alignment(own: Operand, target: Tensor) -> int:
    size, (_, _, columns) = own.source.element_size(), own.source.shape
    starts = [tensor.data_ptr() for tensor in (own.source, own.first) if tensor is not None]
    starts.append(target.data_ptr() * (size // target.element_size()))
    distances = *own.source.stride()[:2], columns, target.shape[1], target.stride(0)
    return math.gcd(*starts, *(size * values for values in distances))


def _struct(own: Operand, target: Tensor, scale: Scale | None, word: int) -> _Operand:
    values = word // own.source.element_size()
    return _Operand(
        own.source.data_ptr(),
        None if own.first is None else own.first.data_ptr(),
        target.data_ptr(),
        own.source.stride(0) // values,
        own.source.stride(1) // values,
        own.source.shape[2] // values,
        target.shape[1] // values,
        target.stride(0) // values,
        own.shift,
        own.start,
        *(() if scale is None else [each.data_ptr() for each in scale]),
    )


@functools.lru_cache(maxsize=128)
def _copying_code(name: str, word: int, device: torch.device, resets: bool = False, halves: bool = False) -> bytes:
    return Copying(name, word, Device.probe(device).architecture, resets, halves).compile()


class Copying(NamedTuple):
    """The machine code of a kernel that copies rows.

    Attributes:
        name: The name of the source: "fit" or "operands".
        word: The number of bytes that a thread copies at once.
        architecture: The architecture.
        resets: Whether episodes begin inside of sequences.
        halves: Whether float32 numbers are copied as float16 numbers.
    """

    name: str
    word: int
    architecture: str
    resets: bool = False
    halves: bool = False

    @property
    def source(self) -> Copying:
        """The key of the machine code."""
        return self

    def compile(self) -> bytes:
        """Compile the source, or take it from the cache on the disk."""
        macros = {"BYTES": self.word, "RESETS": int(self.resets), "HALVES": int(self.halves)}
        macros |= formats.macros(torch.float32) if self.halves else {}
        return toolchain.compile_source(SOURCES / f"{self.name}.cu", self.architecture, macros)
