"""The numbers of one call: drawn once a case, and the same in every precision."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gatewise.benchmarks.cases import GRU, LSTM, LSTMCase


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Input, initial states, weights and gradients of the outputs.

    They are stored in float16 and exact in float16, bfloat16 and everything wider, so that one float64 result is the
    truth of all precisions and an error is the computation's own.

    Attributes:
        case: The sizes.
        x: Input [T, B, I], normal with mean zero.
        h0: Initial hidden state [L*D, B, H], normal.
        c0: Initial cell state [L*D, B, H], normal; None for a GRU, which has none.
        weights: By name, uniform as PyTorch draws them.
        dy: Gradient of the output [T, B, D*H], normal.
        dh: Gradient of the final hidden state, normal.
        dc: Gradient of the final cell state, normal; None for a GRU.
        lengths: Steps of each sequence [B], on the CPU, in random order and the longest T; None when all have T.
        cell: "lstm" or "gru".
    """

    case: LSTMCase
    x: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: dict[str, Tensor]
    dy: Tensor
    dh: Tensor
    dc: Tensor | None
    lengths: Tensor | None
    cell: str = LSTM

    @property
    def tokens(self) -> int:
        """Steps of all sequences together."""
        if self.lengths is None:
            return self.case.time * self.case.batch
        return int(self.lengths.sum())

    @property
    def gates(self) -> int:
        """Gates of the cell: rows of the recurrent weights for each hidden unit."""
        return self.weights["weight_hh_l0"].shape[0] // self.case.hidden_size


def draw(case: LSTMCase, device: torch.device, seed: int = 1, cell: str = LSTM) -> Call:
    """Draw the numbers of a case, the same for a seed on a kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def exact(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).to(torch.float16)

    def normal(*shape: int) -> Tensor:
        return exact(torch.randn(shape, generator=generator, device=device))

    states = (case.num_layers * case.directions, case.batch, case.hidden_size)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in module_of(torch_layer(cell), case).named_parameters()}
    bound = case.hidden_size**-0.5
    weights = {
        name: exact(torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator))
        for name, shape in shapes.items()
    }
    return Call(
        case,
        x=normal(case.time, case.batch, case.hidden_size),
        h0=normal(*states),
        c0=normal(*states) if cell == LSTM else None,
        weights=weights,
        dy=normal(case.time, case.batch, case.directions * case.hidden_size),
        dh=normal(*states),
        dc=normal(*states) if cell == LSTM else None,
        lengths=_lengths(case, seed) if case.ragged else None,
        cell=cell,
    )


def torch_layer(cell: str) -> type[nn.Module]:
    """Return PyTorch's layer of a cell."""
    return {LSTM: nn.LSTM, GRU: nn.GRU}[cell]


def module_of(kind: type[nn.Module], case: LSTMCase, **options: object) -> nn.Module:
    """Make a layer of a case's sizes; `kind` takes the arguments of PyTorch's layer."""
    size = case.hidden_size
    return kind(size, size, case.num_layers, bidirectional=case.directions == 2, **options)


def _lengths(case: LSTMCase, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, case.time // 4), case.time + 1, (case.batch,), generator=generator)
    lengths[int(torch.randint(case.batch, (), generator=generator))] = case.time
    return lengths
