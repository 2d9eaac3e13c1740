"""The validation of a user's arguments and their conversion to a `Problem` and `Inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.attention.call import Inputs
from gatewise.attention.problem import Problem, Score
from gatewise.contract.device import tf32_products_allowed
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.transforms import is_transformed

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_OF_SCORE = {"v": Score.ADDITIVE, "norm_weight": Score.ADDITIVE, "norm_bias": Score.ADDITIVE, "weight": Score.GENERAL}


def prepare(
    tensors: Sequence[Any], lengths: Tensor | Sequence[int] | None, score: str | Score, needs_grad: bool
) -> tuple[Problem, Inputs]:
    """Check every argument and describe the call.

    Args:
        tensors: The query [T, B, Q], and the other tensors of `Inputs` but the lengths.
        lengths: The lengths [B], or None.
        score: The score.
        needs_grad: Whether a backward pass may follow.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on different devices.
        ArgumentError: A parameter is missing, or belongs to another score; or an argument is no tensor.
    """
    query, keys, values, v, weight, norm_weight, norm_bias = tensors
    kind = _score(score)
    parameters = {"v": v, "weight": weight, "norm_weight": norm_weight, "norm_bias": norm_bias}
    _check_parameters(kind, parameters)
    check_tensors(parameters)
    for name, tensor in {"query": query, "keys": keys, "values": values}.items():
        check_tensors({name: tensor})
        if tensor.dim() != 3:
            raise ShapeError(sentence(name, "of 3 dimensions", f"shape {list(tensor.shape)}"))
    source, batch, hidden = keys.shape
    size = hidden if weight is None else weight.shape[0]
    expected = {
        "query": (query, (query.shape[0], batch, size)),
        "values": (values, (source, batch, values.shape[2])),
        "v": (v, (hidden,)),
        "weight": (weight, (size, hidden)),
        "norm_weight": (norm_weight, (hidden,)),
        "norm_bias": (norm_bias, (hidden,)),
    }
    if keys.dtype not in _FLOATS:
        raise DtypeError(sentence("keys", "a floating-point tensor", str(keys.dtype)))
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            advice = f"The keys are {list(keys.shape)}: [S, B, H]."
            raise ShapeError(sentence(name, f"of shape {list(shape)}", list(tensor.shape), advice))
        if tensor.dtype != keys.dtype:
            raise DtypeError(sentence(name, f"of the keys' dtype {keys.dtype}", tensor.dtype, "Convert one of them."))
        if tensor.device != keys.device:
            raise DeviceError(sentence(name, f"on the keys' device '{keys.device}'", f"'{tensor.device}'"))
    problem = Problem(
        steps=query.shape[0],
        source=source,
        batch=batch,
        hidden_size=hidden,
        value_size=values.shape[2],
        score=kind,
        query_size=0 if weight is None else size,
        layer_norm=norm_weight is not None,
        ragged=lengths is not None,
        dtype=keys.dtype,
        needs_grad=needs_grad,
        allow_tf32=keys.is_cuda and tf32_products_allowed(),
    )
    checked = None if lengths is None else _lengths(lengths, source, batch, keys.device)
    return problem, Inputs(query, keys, values, checked, v, weight, norm_weight, norm_bias)


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` if a value is neither None nor a dense tensor."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            advice = "Convert it with torch.as_tensor."
            raise ArgumentError(sentence(name, "a tensor", type(tensor).__name__, advice))
        if tensor is not None and tensor.layout is not torch.strided:
            advice = "Call .to_dense() on it."
            raise ArgumentError(sentence(name, "a dense tensor", f"one of {tensor.layout}", advice))


def as_tensor(lengths: Sequence[int], batch: int) -> Tensor:
    """Return lengths that are given as a sequence as a tensor on the CPU.

    Raises:
        ArgumentError: They are no integers.
    """
    try:
        return torch.tensor(lengths, dtype=None if len(lengths) else torch.int64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        advice = "Give one for each sequence."
        raise ArgumentError(sentence("lengths", f"None, or {batch} integers", repr(lengths), advice)) from None


def check_like(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Check the shape of a tensor, and that its dtype and device are those of another one, which has the keys'.

    Raises:
        ArgumentError: It is no tensor.
        ShapeError: It has another shape.
        DtypeError: It has another dtype.
        DeviceError: It is on another device.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(sentence(name, f"a tensor of shape {list(shape)}", type(tensor).__name__))
    if tuple(tensor.shape) != shape:
        raise ShapeError(sentence(name, f"of shape {list(shape)}", list(tensor.shape)))
    if tensor.dtype != like.dtype:
        raise DtypeError(sentence(name, f"of the keys' dtype {like.dtype}", tensor.dtype, "Convert one of them."))
    if tensor.device != like.device:
        raise DeviceError(sentence(name, f"on the keys' device '{like.device}'", f"'{tensor.device}'"))


def _score(score: str | Score) -> Score:
    try:
        return Score(score)
    except ValueError:
        known = ", ".join(repr(each.value) for each in Score)
        raise ArgumentError(sentence("score", f"one of {known}", repr(score))) from None


def _check_parameters(score: Score, parameters: dict[str, Tensor | None]) -> None:
    for name, owner in _OF_SCORE.items():
        if parameters[name] is not None and score is not owner:
            raise ArgumentError(sentence(name, f"None for the {score.value} score", "a tensor"))
    needed = {Score.ADDITIVE: "v", Score.GENERAL: "weight"}.get(score)
    if needed and parameters[needed] is None:
        raise ArgumentError(sentence(needed, f"a tensor for the {score.value} score", "None"))
    if (parameters["norm_weight"] is None) != (parameters["norm_bias"] is None):
        raise ArgumentError(
            sentence("norm_bias", "given together with norm_weight", "only one of them", "Give both or none.")
        )


def _lengths(lengths: Tensor | Sequence[int], source: int, batch: int, device: torch.device) -> Tensor:
    given = lengths if isinstance(lengths, Tensor) else as_tensor(lengths, batch)
    if given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex:
        raise DtypeError(sentence("lengths", "integers", str(given.dtype)))
    if tuple(given.shape) != (batch,):
        raise ShapeError(sentence("lengths", f"of shape {[batch]}", list(given.shape), "Give one for each sequence."))
    if given.is_meta and device.type != "meta":
        advice = "Give lengths that have values."
        raise DeviceError(sentence("lengths", f"on the CPU or on the keys' device '{device}'", "on meta", advice))
    if given.dtype == torch.uint64:
        given = given.to(torch.int64)  # PyTorch has no minimum of unsigned ones
    if given.is_cpu and batch and not is_transformed():
        # Lengths on a GPU are not checked, because that would synchronise; the kernels clamp them to [0, S]. Inside of
        # `vmap` no call may read its own.
        least, most = int(given.min()), int(given.max())
        if least < 0 or most > source:
            found = least if least < 0 else most
            raise ShapeError(sentence("lengths", f"between 0 and S = {source}", found))
    return given.to(device, torch.int64, non_blocking=True)
