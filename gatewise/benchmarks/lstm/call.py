"""The values of one call: drawn once for each case, and the same in every precision."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gatewise.benchmarks.cases import GRU, LSTM, LSTMCase


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The input, initial states, weights and gradients of the outputs of a call.

    They are exact in float16, bfloat16 and all wider formats, so that one float64 result is the truth for all
    precisions, and every error is one of the computation.

    Attributes:
        case: The sizes.
        x: The input [T, B, I], normally distributed with mean zero.
        h0: The initial hidden state [L*D, B, H], normally distributed.
        c0: The initial cell state [L*D, B, H], normally distributed; None for a GRU, which has none.
        weights: The weights by name, uniformly distributed as in PyTorch.
        dy: The gradient of the output [T, B, D*H], normally distributed.
        dh: The gradient of the final hidden state, normally distributed.
        dc: The gradient of the final cell state, normally distributed; None for a GRU.
        lengths: The lengths of the sequences [B] on the CPU, in random order, with T as the largest; None if all are T.
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
        """The total number of time steps of all sequences."""
        if self.lengths is None:
            return self.case.time * self.case.batch
        return int(self.lengths.sum())

    @property
    def gates(self) -> int:
        """Gates of the cell: rows of the recurrent weights for each hidden unit."""
        return self.weights["weight_hh_l0"].shape[0] // self.case.hidden_size


def draw(case: LSTMCase, device: torch.device, seed: int = 1, cell: str = LSTM) -> Call:
    """Draw the values of a case; a seed gives the same values on devices of the same kind."""
    generator = torch.Generator(device).manual_seed(seed)

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


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor rounded to numbers that are exact in bfloat16 and in float16, in float16."""
    return tensor.to(torch.bfloat16).to(torch.float16)


def torch_layer(cell: str) -> type[nn.Module]:
    """Return PyTorch's layer of a cell."""
    return {LSTM: nn.LSTM, GRU: nn.GRU}[cell]


def module_of(kind: type[nn.Module], case: LSTMCase, **options: object) -> nn.Module:
    """Create a layer with a case's sizes; `kind` takes the arguments of PyTorch's layer."""
    size = case.hidden_size
    return kind(size, size, case.num_layers, bidirectional=case.directions == 2, **options)


def _lengths(case: LSTMCase, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, case.time // 4), case.time + 1, (case.batch,), generator=generator)
    lengths[int(torch.randint(case.batch, (), generator=generator))] = case.time
    return lengths
