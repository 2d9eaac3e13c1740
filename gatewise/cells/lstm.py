"""The LSTM cell: one step, and its adjoint derived by hand.

    z = W_ih x + b_ih + W_hh h' + b_hh          pre-activations [B, 4H], gates in the order i f g o
    i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o);   g = tanh(z_g)
    c = f * c' + i * g
    m = o * tanh(c)
    h = W_hr m                                  h = m without projection

(h', c' are the previous state.) The matrix products belong to the caller, who does most of them for all steps at once;
this file is what lies between them: (z, c') -> (m, c) and its adjoint (dm, dc) -> (dz, dc').

The adjoint of a step is linear in (dm, dc), and its coefficients depend on the forward pass alone:

    dc_total = dc + dm * a                      a = o (1 - tanh(c)^2)
    dz_i = dc_total * g i (1 - i)
    dz_f = dc_total * c' f (1 - f)
    dz_g = dc_total * i (1 - g^2)
    dz_o = dm * tanh(c) o (1 - o)
    dc'  = dc_total * f

With dc_total substituted, every line is `dm * p + dc * q`. `coefficients` computes p and q for many steps at once, so
that the chain through time, which is all that cannot run in parallel, is left with two pointwise operators a step.

Source: Hochreiter & Schmidhuber, "Long short-term memory" (1997), with the forget gate of Gers et al. (2000) and the
projection of Sak et al. (2014): the cell of `torch.nn.LSTM`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CELL = 4
"""Row of dc' in what `adjoint` returns, after the rows of the four gates."""


class Coefficients(NamedTuple):
    """The adjoint of some steps: rows 0 to 3 give dz in gate order, row 4 gives dc'.

    Attributes:
        from_hidden: p, what dm is multiplied with [..., 5, H].
        from_cell: q, what dc is multiplied with [..., 5, H].
    """

    from_hidden: Tensor
    from_cell: Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that c, dc and everything pointwise are computed in.

    float32 for half types, else the dtype itself. c is a sum over time: kept in a half type it would lose increments
    smaller than its last bit, and activations rounded one by one would add about six roundings a step. With float32 in
    between, a half step rounds z and h, the operands of matrix products, and nothing else: what fused half kernels do,
    and less than PyTorch's native loop, which stores c in the half type too.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def step(z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, c) of one step, both in the dtype of `c`.

    Args:
        z: Pre-activations [B, 4H], any dtype.
        c: Previous cell state [B, H], in `state_dtype(z.dtype)`.
    """
    z = z.to(c.dtype)
    hidden_size = c.shape[-1]
    # One sigmoid over all four gates costs less than two over parts; its g quarter is not used.
    i, f, _, o = torch.sigmoid(z).split(hidden_size, -1)
    g = torch.tanh(z.narrow(-1, 2 * hidden_size, hidden_size))
    c = torch.addcmul(f * c, i, g)
    return o * torch.tanh(c), c


def hidden(z: Tensor, c: Tensor) -> Tensor:
    """Return m of steps already computed, from what was kept of them.

    Args:
        z: Pre-activations [..., 4H], any dtype.
        c: Cell states after the steps [..., H].
    """
    o = torch.sigmoid(z[..., 3 * c.shape[-1] :].to(c.dtype))
    return o * torch.tanh(c)


def coefficients(z: Tensor, previous_c: Tensor, c: Tensor, out: Coefficients | None = None) -> Coefficients:
    """Return the coefficients of the adjoint, for any number of steps at once.

    Args:
        z: Pre-activations [..., 4H], any dtype.
        previous_c: Cell states before the steps [..., H].
        c: Cell states after the steps [..., H].
        out: Where to write; None for new tensors.
    """
    z = z.to(c.dtype)
    hidden_size = c.shape[-1]
    i, f, _, o = torch.sigmoid(z).split(hidden_size, -1)
    g = torch.tanh(z.narrow(-1, 2 * hidden_size, hidden_size))
    tanh_c = torch.tanh(c)
    if out is None:
        rows = (*c.shape[:-1], CELL + 1, hidden_size)
        out = Coefficients(c.new_empty(rows), c.new_empty(rows))
    of_i, of_f, of_g, of_o, of_c = out.from_cell.unbind(-2)
    torch.mul(g * i, 1 - i, out=of_i)
    torch.mul(previous_c * f, 1 - f, out=of_f)
    torch.mul(i, 1 - g * g, out=of_g)
    of_o.zero_()
    of_c.copy_(f)
    dc_dm = o * (1 - tanh_c * tanh_c)
    torch.mul(dc_dm.unsqueeze(-2), out.from_cell, out=out.from_hidden)
    torch.mul(tanh_c * o, 1 - o, out=out.from_hidden[..., 3, :])
    return out


def adjoint(dm: Tensor, dc: Tensor, coefficients: Coefficients, out: Tensor | None = None) -> Tensor:
    """Return the gradients before one step from those after it: dz in rows 0 to 3, dc' in row 4, [B, 5, H].

    Args:
        dm: Gradient of m [B, H], any dtype.
        dc: Gradient of c [B, H].
        coefficients: Of this step, [B, 5, H] each.
        out: Where to write; None for a new tensor.
    """
    through_hidden = dm.unsqueeze(-2) * coefficients.from_hidden
    return torch.addcmul(through_hidden, dc.unsqueeze(-2), coefficients.from_cell, out=out)
