"""What products over all steps read beside gradients of the gate sums, laid out token by token."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launch import SOURCES, on
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.tokens import Tokens

_THREADS = 128
_TOKENS_OF_A_BLOCK = _THREADS // 32
_MOST_BLOCKS = 2048
MOST_TOGETHER = 4


class Operand(NamedTuple):
    """Values of a sequence, for products with what belongs to its steps.

    Attributes:
        source: Of all steps [T, B, F].
        first: What goes into the step that a row begins with [B, F], contiguous; None if that is the step's own.
        shift: What goes into step t is of step t + shift: 0, -1 or, in the reverse direction, 1.
        start: Steps of the sequence before the first one that is wanted.
    """

    source: Tensor
    first: Tensor | None = None
    shift: int = 0
    start: int = 0

    def new(self, tokens: Tokens, scratch: Scratch) -> Tensor:
        """Return unwritten memory for it [tokens, F], F rounded up."""
        return scratch.new_empty(tokens.time * tokens.batch, hidden_of(self.source.shape[2]))


def states_before(y: Tensor, first: Tensor, direction: int, start: int = 0) -> Operand:
    """Return the hidden states that went into steps.

    Args:
        y: Outputs of a direction [T, B, F].
        first: Its initial states [B, F].
        direction: 0, or 1 for reverse.
        start: As in `Operand`.
    """
    return Operand(y, first.contiguous(), 1 if direction else -1, start)


class _Operand(ctypes.Structure):
    """The struct `Operand` of operands.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "first", "target")),
        *((name, ctypes.c_longlong) for name in ("step", "row")),
        *((name, ctypes.c_int) for name in ("columns", "width", "shift", "start")),
    ]


class _Operands(ctypes.Structure):
    """The struct `Operands`."""

    _fields_ = [
        ("of", _Operand * MOST_TOGETHER),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("total", "time", "batch", "step", "row")),
    ]


def write(wanted: Sequence[Operand], into: Sequence[Tensor], tokens: Tokens, lengths: Tensor | None) -> None:
    """Write operands, with zeros beyond the ends of sequences and beyond the columns, in one launch.

    Args:
        wanted: At most `MOST_TOGETHER`.
        into: Where, as `Operand.new` returns it.
        tokens: The steps that are wanted, and the order of their tokens.
        lengths: Sequence lengths [B] on the device, int64, or None.
    """
    sources = [own._replace(source=_with_dense_rows(own.source)) for own in wanted]
    if not tokens.time * tokens.batch:
        return
    word = math.gcd(16, *(_alignment(own, target) for own, target in zip(sources, into, strict=True)))
    each = [_arguments(own, target, word) for own, target in zip(sources, into, strict=True)]
    arguments = _Operands(
        (_Operand * MOST_TOGETHER)(*each),
        None if lengths is None else lengths.data_ptr(),
        sources[0].source.shape[0],
        tokens.time,
        tokens.batch,
        tokens.step,
        tokens.row,
    )
    device = into[0].device
    blocks = min(-(-tokens.time * tokens.batch // _TOKENS_OF_A_BLOCK), _MOST_BLOCKS)
    shape = driver.Shape((blocks, len(each), 1), _THREADS, 0, cooperative=False)
    with on(device):
        driver.launch(_code(word, device), "recurrent_operands", shape, arguments, device)


def _with_dense_rows(source: Tensor) -> Tensor:
    return source if source.stride(2) == 1 else source.contiguous()


def _alignment(own: Operand, target: Tensor) -> int:
    size, (_, _, columns) = own.source.element_size(), own.source.shape
    starts = [tensor.data_ptr() for tensor in (own.source, own.first, target) if tensor is not None]
    return math.gcd(*starts, *(size * values for values in (*own.source.stride()[:2], columns, target.shape[1])))


def _arguments(own: Operand, target: Tensor, word: int) -> _Operand:
    values = word // own.source.element_size()
    return _Operand(
        own.source.data_ptr(),
        None if own.first is None else own.first.data_ptr(),
        target.data_ptr(),
        own.source.stride(0) // values,
        own.source.stride(1) // values,
        own.source.shape[2] // values,
        target.shape[1] // values,
        own.shift,
        own.start,
    )


@functools.lru_cache(maxsize=64)
def _code(word: int, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "operands.cu", architecture, {"BYTES": word})
