"""Recurrent matrices of fewer parameters: block-diagonal ones and ones of low rank.

The parameters of a matrix are its blocks or its factors, and the matrix [G*H, H] is made of them in every call by
operators of PyTorch. So every kernel computes such a layer, and autograd gives the gradients of the parameters.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn import init


def checked_structure(heads: object, recurrent_rank: object, hidden_size: int) -> tuple[int, int]:
    """Return the number of heads and the rank of a layer's recurrent matrices, as integers of Python.

    Args:
        heads: The number of heads; 1 for matrices that connect all units.
        recurrent_rank: The rank; 0 for matrices without factors.
        hidden_size: H, the number of hidden units.

    Raises:
        ArgumentError: One of them is not an integer in its range, the heads do not divide H, or both are given.
    """
    number, rank = _integer(heads), _integer(recurrent_rank)
    if number is None or number < 1 or hidden_size % number:
        expectation = f"a positive integer that divides hidden_size = {hidden_size}"
        raise ArgumentError(sentence("heads", expectation, repr(heads), "1 means that all units are connected."))
    if rank is None or not 0 <= rank <= hidden_size:
        expectation = f"an integer from 0 to hidden_size = {hidden_size}"
        raise ArgumentError(sentence("recurrent_rank", expectation, repr(recurrent_rank), "0 means no factors."))
    if number > 1 and rank:
        advice = "A matrix has either blocks or factors."
        raise ArgumentError(sentence("recurrent_rank", f"0 with heads = {number}", rank, advice))
    return number, rank


def _integer(value: object) -> int | None:
    # Integers of NumPy are integers, too.
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def shapes_of(layer: Any) -> dict[str, tuple[int, int]]:
    """Return the shapes of the parameters of one recurrent matrix, by their names without the layer's number.

    Args:
        layer: A layer with the attributes `cell`, `hidden_size`, `heads` and `recurrent_rank`.
    """
    rows, hidden_size, rank = len(layer.cell.gates) * layer.hidden_size, layer.hidden_size, layer.recurrent_rank
    if rank:
        return {"weight_rh": (rows, rank), "weight_hr": (rank, hidden_size)}
    return {"weight_hh": (rows, hidden_size // layer.heads)}


def matrix_of(layer: Any, suffix: str = "") -> Tensor:
    """Return one recurrent matrix of a layer [G*H, H].

    Args:
        layer: A layer with the attributes `cell`, `hidden_size`, `heads` and `recurrent_rank`.
        suffix: The end of the names of the parameters, such as "_l0".
    """
    if layer.recurrent_rank:
        return getattr(layer, f"weight_rh{suffix}") @ getattr(layer, f"weight_hr{suffix}")
    weight = getattr(layer, f"weight_hh{suffix}")
    if layer.heads == 1:
        return weight
    units = layer.hidden_size // layer.heads
    blocks = weight.unflatten(0, (len(layer.cell.gates), layer.heads, units))
    # [G, N, H/N, H/N] becomes [G, N, H/N, N, H/N], zero where the two heads differ.
    return torch.diag_embed(blocks.permute(0, 2, 3, 1), dim1=1, dim2=3).flatten(3).flatten(0, 2)


def product_of(layer: Any, suffix: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function of hidden states [B, H] that multiplies them by a recurrent matrix, without making it.

    For a single step the matrix takes more time to make than to multiply by.

    Args:
        layer: A layer with the attributes `cell`, `hidden_size`, `heads` and `recurrent_rank`, one of the last two set.
        suffix: The end of the names of the parameters, such as "_l0".
        dtype: The dtype of the product.
    """
    if layer.recurrent_rank:
        left, right = (getattr(layer, f"{kind}{suffix}").to(dtype) for kind in ("weight_rh", "weight_hr"))
        return lambda h: linear(linear(h, right), left)
    heads, units = layer.heads, layer.hidden_size // layer.heads
    blocks = getattr(layer, f"weight_hh{suffix}").to(dtype).view(-1, heads, units, units)

    def of_heads(h: Tensor) -> Tensor:
        # [G, N, U, U] times [N, U, B] is [G, N, U, B].
        found = torch.matmul(blocks, h.view(-1, heads, units).permute(1, 2, 0))
        return found.permute(3, 0, 1, 2).flatten(1)

    return of_heads


def initialise_(parameter: Tensor, layer: Any, kind: str) -> None:
    """Fill a matrix or a bias of a layer in place, so that a new layer's sums have the variance of PyTorch's.

    Args:
        parameter: The parameter.
        layer: A layer with the attributes `hidden_size`, `heads` and `recurrent_rank`.
        kind: The name of the parameter without the layer's number.
    """
    if kind == "weight_hr":
        torch.nn.init.kaiming_uniform_(parameter, nonlinearity="linear")
        return
    read = {"weight_hh": layer.hidden_size // layer.heads, "weight_rh": layer.recurrent_rank}
    init.uniform_([parameter], read.get(kind, layer.hidden_size))
