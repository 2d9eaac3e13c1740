"""One time step of a layer by a few operators that write to memory which all steps of a stream use.

`torch.lstm_cell` and `torch.gru_cell` allocate each intermediate value and views of it in every call, which takes up to
a fifth of the time of a small step. Here they are made once. A step writes all of the memory before it reads it, and
uses nothing of the step before. The sums are added in the same order; only the last bits of a GRU's state may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# The stubs of PyTorch do not have its argument `out`.
_linear: Callable[..., Tensor] = functional.linear


class LSTMStep:
    """Steps of LSTM layers of one size on a CPU, without gradients, of which no two may overlap.

    Args:
        batch: B, the number of sequences.
        hidden_size: H, the number of hidden units.
        dtype: The dtype of the input, the states and the weights.
    """

    def __init__(self, batch: int, hidden_size: int, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            sums, of_state = _memory(2, batch, 4 * hidden_size, dtype)
            (tanh,) = _memory(1, batch, hidden_size, dtype)
            self._memory = sums, of_state, tanh, *sums.split(hidden_size, 1)

    def __call__(
        self,
        x: Tensor,
        states: tuple[Tensor, ...],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the states after a step.

        Args:
            x: The input [B, I].
            states: The hidden state and the cell state before the step [B, H].
            w_ih: The matrix of the input [4*H, I].
            w_hh: The recurrent matrix [4*H, H].
            b_ih: The bias of the input [4*H]; None for none.
            b_hh: The bias of the recurrent products [4*H]; None for none.
        """
        sums, of_state, tanh, i, f, g, o = self._memory
        h, c = states
        _linear(x, w_ih, b_ih, out=sums)
        _linear(h, w_hh, b_hh, out=of_state)
        sums.add_(of_state)
        torch.tanh(g, out=tanh)
        sums.sigmoid_()  # of all four, because operators for i and f and for o would take longer
        c = f.mul(c)
        c.addcmul_(i, tanh)
        torch.tanh(c, out=tanh)
        return o.mul(tanh), c


class GRUStep:
    """Steps of GRU layers of one size on a CPU, without gradients, of which no two may overlap.

    Args:
        batch: B, the number of sequences.
        hidden_size: H, the number of hidden units.
        dtype: The dtype of the input, the state and the weights.
    """

    def __init__(self, batch: int, hidden_size: int, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            of_input, of_state = _memory(2, batch, 3 * hidden_size, dtype)
            r, z, n = of_input.split(hidden_size, 1)
            both = [sums[:, : 2 * hidden_size] for sums in (of_input, of_state)]
            self._memory = of_input, of_state, *both, r, z, n, of_state[:, 2 * hidden_size :]

    def __call__(
        self,
        x: Tensor,
        states: tuple[Tensor, ...],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the state after a step, in a tuple.

        Args:
            x: The input [B, I].
            states: The state before the step [B, H], in a tuple.
            w_ih: The matrix of the input [3*H, I].
            w_hh: The recurrent matrix [3*H, H].
            b_ih: The bias of the input [3*H]; None for none.
            b_hh: The bias of the recurrent products [3*H]; None for none.
        """
        of_input, of_state, gates, gates_of_state, r, z, n, n_of_state = self._memory
        (h,) = states
        _linear(x, w_ih, b_ih, out=of_input)
        _linear(h, w_hh, b_hh, out=of_state)
        gates.add_(gates_of_state)
        gates.sigmoid_()
        n.addcmul_(r, n_of_state)
        n.tanh_()
        return (torch.lerp(n, h, z),)  # n + z (h - n)


def _memory(number: int, batch: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors to which calls in inference mode and others can write; the caller is outside of that mode."""
    return [torch.empty(batch, size, dtype=dtype, device="cpu") for _ in range(number)]
