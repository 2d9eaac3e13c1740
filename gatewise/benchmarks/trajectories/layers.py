"""The layers that are compared: gatewise.LSTM with a kernel, and nn.LSTM with the same interface."""

from __future__ import annotations

from torch import Tensor, nn

from gatewise.contract.problem import LEAN
from gatewise.nn import LSTM

RIVAL = "nn.LSTM"

State = tuple[Tensor, Tensor]


class Packing(nn.LSTM):
    """`torch.nn.LSTM` for padded batches with lengths, which it packs as users do."""

    def forward(self, input: Tensor, hx: State | None = None, lengths: Tensor | None = None) -> tuple[Tensor, State]:  # type: ignore[override]
        """Run the layers over [T, B, I]."""
        if lengths is None:
            return super().forward(input, hx)
        packed = nn.utils.rnn.pack_padded_sequence(input, lengths.cpu(), enforce_sorted=False)
        y, state = super().forward(packed, hx)
        return nn.utils.rnn.pad_packed_sequence(y, total_length=input.shape[0])[0], state


def layer(kind: str, input_size: int, hidden_size: int, num_layers: int = 1, **options: object) -> nn.Module:
    """Return a layer.

    Args:
        kind: `RIVAL`, the name of a kernel, "auto", or "lean".
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers.
        **options: Other arguments of `torch.nn.LSTM`.
    """
    sizes = input_size, hidden_size, num_layers
    if kind == RIVAL:
        return Packing(*sizes, **options)
    if kind == LEAN:
        return LSTM(*sizes, **options, memory=LEAN)  # type: ignore[arg-type]
    return LSTM(*sizes, **options, kernel=kind)  # type: ignore[arg-type]
