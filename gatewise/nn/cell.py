"""One time step of an LSTM as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gatewise.contract.transforms import is_transformed
from gatewise.nn import torchscript
from gatewise.nn.arguments import check_dtype, check_pair, check_step, checked_sizes
from gatewise.nn.call_errors import CALL_ERRORS, restate_step
from gatewise.nn.pytorch_layer import weights_of_cell
from gatewise.nn.symbolic import recorded


class LSTMCell(nn.LSTMCell):
    r"""One time step of one LSTM layer, a drop-in for `torch.nn.LSTMCell`.

    $$\begin{aligned}
    i &= \sigma(W_{ii} x + b_{ii} + W_{hi} h + b_{hi}) & f &= \sigma(W_{if} x + b_{if} + W_{hf} h + b_{hf}) \\
    g &= \tanh(W_{ig} x + b_{ig} + W_{hg} h + b_{hg}) & o &= \sigma(W_{io} x + b_{io} + W_{ho} h + b_{ho}) \\
    c' &= f \odot c + i \odot g & h' &= o \odot \tanh(c')
    \end{aligned}$$

    The step is computed by PyTorch's own fused operator (`torch.lstm_cell`). Programs that loop over time are faster
    with `gatewise.LSTM`, and those that get their input step by step and compute no gradients with its method `stream`.

    Args:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        bias: Whether the two bias vectors exist.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype(dtype)
        sizes = checked_sizes(input_size, hidden_size, least_input=0)
        super().__init__(sizes.input_size, sizes.hidden_size, bool(bias), device, dtype)

    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute one time step.

        Args:
            input: The input [B, I], or [I] without a batch.
            hx: The hidden state and the cell state, [B, H] or [H] each; zeros if None.

        Returns:
            The next hidden state and cell state, in the shapes of `hx`.

        Raises:
            ShapeError: A rank or size does not fit.
            DtypeError: The dtype of the input differs from that of the parameters, and autocast is off.
            ArgumentError: `input` is not a tensor, or `hx` is not a pair of tensors.
        """
        if not isinstance(input, Tensor):
            return recorded(self, input, hx=hx)
        weights = weights_of_cell(self)
        if hx is not None:
            check_pair(hx)
        check_step(input, hx, self.input_size, self.hidden_size, weights[0].dtype)
        try:
            if input.dim() == 2:
                return _step(self, input, hx, weights)
            row = None if hx is None else (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
            h, c = _step(self, input.unsqueeze(0), row, weights)
            return h.squeeze(0), c.squeeze(0)
        except CALL_ERRORS as error:
            restate_step(error, input, hx, weights[0])
            raise

    __prepare_scriptable__ = torchscript.scriptable
    _slow_forward = torchscript.traced


# No method, because a class of a program that derives from torch.nn.LSTMCell may have a method of this name.
def _step(
    cell: LSTMCell, x: Tensor, state: tuple[Tensor, Tensor] | None, weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    if state is None:
        zeros = x.new_zeros(x.shape[0], cell.hidden_size)
        state = (zeros, zeros)
    if is_transformed():  # `vmap` has no rule for the operator
        return _plain_step(x, state, *weights)
    return torch.lstm_cell(x, state, *weights)


def _plain_step(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    h, c = state
    i, f, g, o = (linear(x, w_ih, b_ih) + linear(h, w_hh, b_hh)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
