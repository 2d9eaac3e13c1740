"""Launch the kernel that gathers the factors of matrix products over all steps, token by token."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gatewise.kernels.cuda import driver
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launches.auxiliary import copying_code, copying_shape
from gatewise.kernels.persistent.launches.tokens import Tokens
from gatewise.kernels.persistent.sizes.padding import hidden_of

MOST_OPERANDS = 4


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

    def with_contiguous_rows(self) -> Operand:
        """Return the operand with consecutive values in each row of the source, which is copied only if necessary."""
        return self if self.source.stride(2) == 1 else self._replace(source=self.source.contiguous())

    @property
    def alignment(self) -> int:
        """The number of bytes of which every address and distance of the values is a multiple."""
        size, (step, row, _) = self.source.element_size(), self.source.stride()
        starts = [tensor.data_ptr() for tensor in (self.source, self.first) if tensor is not None]
        return math.gcd(*starts, *(size * values for values in (step, row, self.source.shape[2])))


class Scale(NamedTuple):
    """What determines the powers of two by which the values of an operand are multiplied, see operands.cu.

    Attributes:
        exponents: The exponent of the largest gradient of each token [tokens], int32; None for a matrix.
        largest: The exponent of the largest terms of each column [F], int32, from `scale_columns`; for a matrix, that
            of the largest value.
    """

    exponents: Tensor | None
    largest: Tensor


class SourceStruct(ctypes.Structure):
    """The struct `Source` of gathered.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "first")),
        *((name, ctypes.c_longlong) for name in ("step", "row")),
        *((name, ctypes.c_int) for name in ("columns", "shift", "start")),
    ]

    @classmethod
    def of(cls, own: Operand, word: int) -> SourceStruct:
        """Return the struct for an operand, with distances in words of this number of bytes."""
        (step, row, _), columns = own.source.stride(), own.source.shape[2]
        values = word // own.source.element_size()
        first = None if own.first is None else own.first.data_ptr()
        places = step // values, row // values, columns // values
        return cls(own.source.data_ptr(), first, *places, own.shift, own.start)


class TokensStruct(ctypes.Structure):
    """The struct `Tokens` of gathered.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lengths", "resets")),
        *((name, ctypes.c_int) for name in ("total", "time", "batch", "step", "row")),
    ]

    @classmethod
    def of(cls, tokens: Tokens, lengths: Tensor | None, resets: Tensor | None, total: int) -> TokensStruct:
        """Return the struct for tokens of a sequence with a total number of steps."""
        each = [None if tensor is None else tensor.data_ptr() for tensor in (lengths, resets)]
        return cls(*each, total, tokens.time, tokens.batch, tokens.step, tokens.row)


class _Operand(ctypes.Structure):
    """The struct `Operand` of operands.cu, field by field."""

    _fields_ = [
        ("source", SourceStruct),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("width", "stride")),
        *((name, ctypes.c_void_p) for name in ("exponents", "largest_terms")),
    ]


class _Operands(ctypes.Structure):
    """The struct `Operands` of operands.cu, field by field."""

    _fields_ = [("of", _Operand * MOST_OPERANDS), ("tokens", TokensStruct)]


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
    sources = [own.with_contiguous_rows() for own in wanted]
    if into[0].is_meta or not tokens.time * tokens.batch:
        return
    starts = [scale.largest.data_ptr() for scale in scales]
    word = math.gcd(16, *starts, *(_alignment(own, target) for own, target in zip(sources, into, strict=True)))
    every = scales or [None] * len(wanted)
    each = [_struct(*given, word) for given in zip(sources, into, every, strict=True)]
    of_tokens = TokensStruct.of(tokens, lengths, resets, sources[0].source.shape[0])
    arguments = _Operands((_Operand * MOST_OPERANDS)(*each), of_tokens)
    device = into[0].device
    shape = copying_shape("operands", tokens.time * tokens.batch, max(own.width for own in each), len(each))
    with driver.on(device):
        binary = copying_code("operands", word, device, resets is not None, bool(scales))
        driver.launch(binary, "recurrent_operands", shape, arguments, device)


def _alignment(own: Operand, target: Tensor) -> int:
    size = own.source.element_size()
    start = target.data_ptr() * (size // target.element_size())
    return math.gcd(own.alignment, start, size * target.shape[1], size * target.stride(0))


def _struct(own: Operand, target: Tensor, scale: Scale | None, word: int) -> _Operand:
    values = word // own.source.element_size()
    sizes = target.shape[1] // values, target.stride(0) // values
    of_scale = () if scale is None else [None if each is None else each.data_ptr() for each in scale]
    return _Operand(SourceStruct.of(own, word), target.data_ptr(), *sizes, *of_scale)
