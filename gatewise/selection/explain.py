"""`gatewise.explain`: the decision for a call, without making the call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.cells import Cell
from gatewise.contract.capture import state as capture_state
from gatewise.contract.data_parallel import reserved
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device, tf32_allowed
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import LEAN, NORMAL, Layout, Problem
from gatewise.contract.pytorch import cell_of
from gatewise.selection.choose import decide, decide_by_prediction
from gatewise.selection.explain_step import with_step
from gatewise.selection.preference import AUTO, preference

_SHOWN = 60
"""The largest number of characters of a value in an error; of a longer one, the type is shown."""


@runtime_checkable
class LSTMLike(Protocol):
    """The attributes that the layers of gatewise and PyTorch share."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    training: bool


@runtime_checkable
class StreamLike(Protocol):
    """The attributes of a stream."""

    layer: LSTMLike
    batch: int


def explain(
    module: LSTMLike | StreamLike,
    x: Tensor | Sequence[int],
    *,
    lengths: Tensor | Sequence[int] | bool | None = None,
    device: Device | torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    training: bool | None = None,
    kernel: str | None = None,
    captured: bool | None = None,
    resets: Tensor | bool | None = None,
) -> Decision:
    """Return which kernel a call would run, why the others would not, and the predicted time and memory; run nothing.

    Args:
        module: A recurrent layer of gatewise, or one of PyTorch's, for which the decision is that after
            `gatewise.accelerate`; or a stream. The decision for a step of a stream has one more verdict, "one_step",
            for the stream's own way to compute it; if that refuses, the step is a call of the kernel that is chosen,
            and raises an error in the capture of a CUDA graph.
        x: The input, or its shape as the module takes it: (T, B, I), (B, T, I) with batch_first, or (T, I); of a stream
            (B, I).
        lengths: The lengths of the sequences, or True for lengths on x's device.
        device: The device of the call: a device of this machine, the name of a GPU ("h200", see `Device.names()`), or a
            `Device`. Default: x's device, otherwise that of the module's weights.
        dtype: The dtype of input and weights. Default: x's, otherwise that of the module's weights; under autocast for
            the device, the dtype to which it converts them.
        training: Whether a backward pass follows. Default: the module's mode.
        kernel: The kernel, as in the argument of a call. Default: the module's own.
        captured: Whether the call is captured in a CUDA graph inside `gatewise.for_cuda_graph`, so that only the
            device's time counts. Default: the current state; False for a device given by name.
        resets: The steps at which episodes begin, as in a call, or True for some. Default: none.

    Returns:
        The `Decision`, which can be printed. `decision.chosen` is None if the named kernel refuses, or if a stream
        refuses to be captured.

    Raises:
        ArgumentError: `module` is not such a layer, or a size is not a non-negative integer.
        ShapeError: The shape does not fit the module.
        DtypeError: `dtype` is not a floating-point type of PyTorch.
        DeviceError: The device cannot be probed (for example "meta"); give the name of a GPU instead. Or there is no
            device or GPU of the name.

    Examples:
        >>> import gatewise
        >>> lstm = gatewise.LSTM(512, 512, device="meta")
        >>> gatewise.explain(lstm, (100, 64, 512), device="h200").chosen
        'persistent'
    """
    if isinstance(module, StreamLike):
        return _of_step(module, x, lengths, device, dtype, training, kernel, captured, resets)
    training = bool(getattr(module, "training", False)) if training is None else training
    cell = cell_of(module, training)
    if not isinstance(module, LSTMLike) or not isinstance(cell, Cell):
        advice = "Of a whole model, gatewise.verify tells the kernels, and gatewise.compare the times."
        got = type(module).__name__
        raise ArgumentError(sentence("module", "a recurrent layer of gatewise or PyTorch", got, advice))
    weight = next(module.parameters())  # type: ignore[attr-defined]
    shape = _shape(x)
    if len(shape) not in (2, 3) or shape[-1] != module.input_size:
        expectation = f"(T, B, {module.input_size}), with batch_first (B, T, {module.input_size})"
        raise ShapeError(sentence("x", f"a tensor or shape {expectation}", shape))
    if len(shape) == 2:
        time, batch = shape[0], 1
    else:
        time, batch = (shape[1], shape[0]) if module.batch_first else (shape[0], shape[1])
    where = _device(device if device is not None else x.device if isinstance(x, Tensor) else weight.device)
    number_type = dtype or _converted(x.dtype if isinstance(x, Tensor) else weight.dtype, where.kind)
    if not isinstance(number_type, torch.dtype) or not number_type.is_floating_point:
        raise DtypeError(sentence("dtype", "a floating-point type such as torch.float32", repr(number_type)))
    capture = "announced" if captured else ""
    if captured is None and where.kind == "cuda" and not _described(device):
        capture = capture_state()
    layout = _layout(lengths, where)
    problem = Problem(
        time=time,
        batch=batch,
        input_size=module.input_size,
        hidden_size=module.hidden_size,
        proj_size=module.proj_size,
        num_layers=module.num_layers,
        bidirectional=module.bidirectional,
        bias=module.bias,
        dtype=number_type,
        layout=layout,
        dropout=module.dropout if training and module.num_layers > 1 else 0.0,
        needs_grad=training,
        allow_tf32=where.kind == "cuda" and number_type == torch.float32 and tf32_allowed(),
        lean=getattr(module, "memory", NORMAL) == LEAN,
        cell=cell,
        reserved=reserved() if where.kind == "cuda" else 0,
        captured=capture != "",
        announced=capture == "announced",
        # Of a single step, the states are reset before the call.
        resets=resets is not None and resets is not False and (time != 1 or layout is not Layout.DENSE),
    )
    wanted = getattr(module, "kernel", AUTO) if kernel is None else kernel
    # A device that is only described cannot be measured, whatever the policy is.
    return decide_by_prediction(problem, where, wanted) if _described(device) else decide(problem, where, wanted)


def _of_step(
    stream: StreamLike,
    x: Tensor | Sequence[int],
    lengths: object,
    device: Device | torch.device | str | None,
    dtype: torch.dtype | None,
    training: object,
    kernel: str | None,
    captured: bool | None,
    resets: object,
) -> Decision:
    layer, shape = stream.layer, _shape(x)
    for name, value in (("lengths", lengths), ("training", training), ("resets", resets)):
        if value is not None and value is not False:
            raise ArgumentError(sentence(name, "left out for a stream", repr(value)))
    if shape != (stream.batch, layer.input_size):
        raise ShapeError(sentence("x", f"of shape [B, I] = {[stream.batch, layer.input_size]}", list(shape)))
    where = device if device is not None else x.device if isinstance(x, Tensor) else None
    size = (shape[0], 1, shape[1]) if layer.batch_first else (1, *shape)
    number_type = dtype
    if dtype is None and isinstance(x, Tensor):
        number_type = _converted(x.dtype, _device(where or x.device).kind)
    options = {"device": where, "dtype": number_type, "training": False, "kernel": kernel, "captured": captured}
    decision = explain(layer, size, **options)
    wanted = preference(getattr(layer, "kernel", AUTO) if kernel is None else kernel)
    structured = getattr(layer, "heads", 1) > 1 or getattr(layer, "recurrent_rank", 0) > 0
    return with_step(decision, wanted, structured)


def _shape(x: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    try:
        shape = tuple(operator.index(size) for size in x)
    except TypeError:
        got = repr(x) if len(repr(x)) <= _SHOWN else type(x).__name__
        advice = "Give the padded batch and `lengths`." if isinstance(x, PackedSequence) else ""
        raise ArgumentError(sentence("x", "a tensor or a shape, integers", got, advice)) from None
    if min(shape, default=0) < 0:
        raise ArgumentError(sentence("x", "a shape of sizes from 0 up", shape))
    return shape


def _converted(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Return the dtype of a call, to which autocast converts input and weights of a dtype if it is on for a device."""
    if dtype == torch.float64 or not dtype.is_floating_point or not torch.is_autocast_enabled(kind):
        return dtype
    return torch.get_autocast_dtype(kind)


def _device(device: Device | torch.device | str) -> Device:
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and _described(device):
        return Device.named(device)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        expectation = f"cuda, cuda:N or one of {', '.join(Device.names())}"
        raise DeviceError(sentence("device", expectation, repr(device))) from None
    return Device.probe(device)


def _described(device: Device | torch.device | str | None) -> bool:
    # "cpu" is the CPU of this machine, as in PyTorch.
    return isinstance(device, Device) or (
        isinstance(device, str) and device != "cpu" and device.lower() in Device.names()
    )


def _layout(lengths: Tensor | Sequence[int] | bool | None, device: Device) -> Layout:
    if lengths is None or lengths is False:
        return Layout.DENSE
    on_gpu = lengths.is_cuda if isinstance(lengths, Tensor) else lengths is True and device.kind == "cuda"
    return Layout.DEVICE_LENGTHS if on_gpu else Layout.HOST_LENGTHS
