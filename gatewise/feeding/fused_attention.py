"""Additive attention and the surrounding element-wise operations as one CUDA kernel; requires the kernel "fused"."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise import attention
from gatewise.contract.device import Device
from gatewise.feeding.attention_part import Places
from gatewise.feeding.call import Inputs, at
from gatewise.feeding.elementwise import Planes
from gatewise.feeding.elementwise_kernels import (
    PlanesArgument,
    address,
    available,
    binary_of,
    of_dropout,
    planes_argument,
)
from gatewise.kernels.cuda import driver, formats

SOURCE = Path(__file__).parent / "cuda" / "attend.cu"
_WARPS = 16  # per block, as in attend.cu
_WIDEST = 1024  # the most features, and the most values: 32 for each lane of a warp
_LONGEST = 2048  # the most source positions, as in attend.cu
VECTOR_BYTES, _LEAST_BYTES = 16, 4  # the most and the fewest bytes that a thread loads at once
_PLACE_BYTES = 128  # the size of the registers for the source positions that a thread holds
_POINTER, _STRIDE, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Source(ctypes.Structure):
    """The struct `Source` of attend.cu, field by field."""

    _fields_ = [
        *[(name, _POINTER) for name in ("keys", "values", "lengths", "v")],
        *[(name, _STRIDE) for name in ("keys_step", "keys_row", "values_step", "values_row")],
        *[(name, _SIZE) for name in ("source", "features", "units")],
    ]


class Attend(ctypes.Structure):
    """The struct `Attend` of attend.cu, field by field."""

    _fields_ = [
        ("from", Source),
        *[(name, _POINTER) for name in ("query", "state", "scores", "normaliser", "context", "output", "fed", "mask")],
        *[(name, _STRIDE) for name in ("query_row", "state_row", "context_row", "output_row", "fed_row")],
        ("scale", ctypes.c_double),
    ]


class AttendGradient(ctypes.Structure):
    """The struct `AttendGradient` of attend.cu, field by field."""

    _fields_ = [
        ("from", Source),
        *[(name, _POINTER) for name in ("query", "scores", "normaliser", "output", "dy")],
        ("later", PlanesArgument),
        *[(name, _POINTER) for name in ("dsums", "dquery", "mask")],
        *[(name, _STRIDE) for name in ("query_row", "output_row", "dy_row", "dsums_row", "dquery_row")],
        ("scale", ctypes.c_double),
    ]


class _Step(NamedTuple):
    """The tensors that one step reads and writes: see `Places` and `attention.Steps`."""

    query: Tensor
    context: Tensor
    state: Tensor
    output: Tensor
    fed: Tensor
    dquery: Tensor
    scores: Tensor | None = None
    normaliser: Tensor | None = None


class FusedAttention:
    """Computes attention and the element-wise operations in one launch if `possible`; see `AttentionPart`.

    It keeps the same tensors of a step as the attention kernel "fused", the scores and their log-sum-exp, so that that
    kernel can compute the source gradients once after the loop.

    Args:
        inputs: The inputs of the decoder.
        steps: The attention steps, with the kernel "fused".
        places: The tensors that the steps read and write.
        halves: Whether operands of products are stored in float16 although the decoder is in float32.
    """

    def __init__(self, inputs: Inputs, steps: attention.Steps, places: Places, *, halves: bool) -> None:
        self._inputs, self._of_attention = inputs, steps
        # All views are created at once: creating them step by step would take as long as the launches.
        tensors = steps.queries, steps.contexts, *places, *steps.result.kept[:2]
        self._steps = [_Step(*each) for each in zip(*(tensor.unbind() for tensor in tensors), strict=True)]
        self._fed_alone = places.outputs is places.fed
        self._device = inputs.keys.device
        # Each step reads all keys and values: in float16 this takes half the time.
        operand = torch.float16 if halves else inputs.keys.dtype
        self._keys, self._values = (each.to(operand) for each in (inputs.keys, inputs.values))
        self._macros = macros_of(inputs, operand, halves=halves)
        early = Device.probe(self._device).capability >= (9, 0)
        threads = 32 * _WARPS
        self._shape = driver.Shape((inputs.batch, 1, 1), threads, 0, cooperative=False, early=early)
        keys, values, v = self._keys, self._values, steps.inputs.v
        self._source = Source(
            keys=address(keys),
            values=address(values),
            lengths=address(steps.inputs.lengths),
            v=address(v),
            keys_step=keys.stride(0),
            keys_row=keys.stride(1),
            values_step=values.stride(0),
            values_row=values.stride(1),
            source=len(keys),
            features=keys.shape[2],
            units=values.shape[2],
        )

    def forward(self, step: int) -> None:
        """Write the attentional output of a step."""
        query, context, state, output, fed, _, scores, normaliser = self._steps[step]
        arguments = Attend(
            query=address(query),
            state=address(state),
            scores=address(scores),
            normaliser=address(normaliser),
            context=address(context),
            output=None if self._fed_alone else address(output),
            fed=address(fed),
            query_row=query.stride(0),
            state_row=state.stride(0),
            context_row=context.stride(0),
            output_row=output.stride(0),
            fed_row=fed.stride(0),
            **of_dropout(at(self._inputs.dropout, step)),
        )
        self._launch("feeding_attend", arguments)

    def backward(self, step: int, dy: Tensor | None, later: Planes | None) -> None:
        """Write the gradients of the query and of the sum of context and state."""
        query, _, dsums, output, _, dquery, scores, normaliser = self._steps[step]
        arguments = AttendGradient(
            query=address(query),
            scores=address(scores),
            normaliser=address(normaliser),
            output=address(output),
            dy=address(dy),
            later=planes_argument(later),
            dsums=address(dsums),
            dquery=address(dquery),
            query_row=query.stride(0),
            output_row=output.stride(0),
            dy_row=0 if dy is None else dy.stride(0),
            dsums_row=dsums.stride(0),
            dquery_row=dquery.stride(0),
            **of_dropout(at(self._inputs.dropout, step)),
        )
        self._launch("feeding_attend_gradient", arguments)

    def source_gradients(self, dcontexts: Tensor) -> attention.Gradients:
        """Return the gradients of the attention inputs that all steps share."""
        return attention.source_gradients(self._of_attention, dcontexts)

    def _launch(self, entry: str, arguments: Attend | AttendGradient) -> None:
        setattr(arguments, "from", self._source)
        driver.launch(binary_of(SOURCE, self._macros, self._device.index), entry, self._shape, arguments, self._device)


def possible(inputs: Inputs, steps: attention.Steps, *, halves: bool) -> bool:
    """Return whether the call supports one launch per step: additive scores, kernel "fused", a GPU, bounded sizes.

    Args:
        inputs: The inputs of the decoder.
        steps: The attention steps.
        halves: Whether keys and values are read in float16.
    """
    keys, additive = inputs.keys, inputs.query_size > 0
    if not additive or steps.kernel.name != "fused" or inputs.weights.norm_weight is not None:
        return False
    if not keys.is_cuda or keys.dtype == torch.float64 or not available(keys.device):
        return False
    return fits(inputs, torch.float16 if halves else keys.dtype)


def fits(inputs: Inputs, operand: torch.dtype) -> bool:
    """Return whether the sizes are small enough, and rows are aligned to loads of at least four bytes in this dtype."""
    keys = inputs.keys
    narrow = max(keys.shape[2], inputs.units) <= _WIDEST and len(keys) <= _LONGEST
    return narrow and _width(inputs, operand) * operand.itemsize >= _LEAST_BYTES


def macros_of(inputs: Inputs, operand: torch.dtype, *, halves: bool) -> tuple[tuple[str, int], ...]:
    """Return the template parameters of the CUDA source for a call."""
    widest = max(inputs.keys.shape[2], inputs.units)
    return macros(inputs.keys.dtype, _width(inputs, operand), widest, operand.itemsize, halves=halves)


def macros(dtype: torch.dtype, width: int, widest: int, element: int, *, halves: bool) -> tuple[tuple[str, int], ...]:
    """Return the template parameters for the largest number of features or values, and the width of a load."""
    chunks = -(-widest // (32 * width))
    places = 4 if 4 * chunks * width * element <= _PLACE_BYTES else 2
    named = {**formats.macros(dtype), "WIDTH": width, "CHUNKS": chunks, "PLACES": places, "HALVES": int(halves)}
    return tuple(named.items())


def _width(inputs: Inputs, operand: torch.dtype) -> int:
    """Return the number of elements that a thread loads at once: the most to which every row is aligned."""
    keys, values = inputs.keys, inputs.values
    offsets = (each.storage_offset() for each in (keys, values))
    sizes = keys.shape[2], values.shape[2], *keys.stride()[:2], *values.stride()[:2], *offsets
    return math.gcd(VECTOR_BYTES // operand.itemsize, *sizes)
