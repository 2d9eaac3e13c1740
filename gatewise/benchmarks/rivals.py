"""The implementations with which gatewise is compared: plain PyTorch, as its users write it, in its fastest form."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.backends import cudnn, mkldnn
from torch.nn import functional

from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.nn import LSTM
from gatewise.selection import kernel_names

LayerState = tuple[Tensor, Tensor]


class CellLoop(nn.Module):
    """A stack of `torch.nn.LSTMCell`, stepped through time in Python."""

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(size, size) for _ in range(num_layers))
        self.dropout = dropout

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Run x [T, B, H] from a state ([L, B, H], [L, B, H])."""
        h_n, c_n = [], []
        for layer, cell in enumerate(self.cells):
            if layer > 0:
                x = functional.dropout(x, self.dropout, self.training)
            h, c = state[0][layer], state[1][layer]
            outputs = []
            for step in x.unbind():
                h, c = cell(step, (h, c))
                outputs.append(h)
            x = torch.stack(outputs)
            h_n.append(h)
            c_n.append(c)
        return x, (torch.stack(h_n), torch.stack(c_n))


class NativeLSTM(nn.Module):
    """`torch.nn.LSTM` on PyTorch's own loop: without cuDNN on a GPU, without oneDNN on a CPU."""

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size, num_layers, dropout=dropout)

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Run x [T, B, H] from a state ([L, B, H], [L, B, H])."""
        with _without_libraries():
            return self.lstm(x, state)


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    # The contexts `flags` of both backends would also set their TF32 switches.
    before = cudnn.enabled, mkldnn.enabled
    cudnn.enabled = mkldnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled, mkldnn.enabled = before


class Loop(enum.Enum):
    """The training loop around the model."""

    PLAIN = "as it is usually written"
    LIBRARY = "gatewise.training, launch by launch"
    GRAPH = "gatewise.training, replayed as a CUDA graph"


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One implementation of the stacked LSTM of a model, which is one row of the benchmark.

    Attributes:
        name: The name in tables.
        layer: A function that creates it from (size, num_layers, dropout): a module from (x [T, B, H], state) to (y,
            state), whose parameters have the shapes and the order of `torch.nn.LSTM`'s.
        kernel: The kernel of gatewise; None for plain PyTorch.
        loop: The training loop.
    """

    name: str
    layer: Callable[[int, int, float], nn.Module]
    kernel: str | None = None
    loop: Loop = Loop.PLAIN

    def replayed(self) -> Way:
        """Return the same layer, with the whole step replayed as a CUDA graph."""
        return dataclasses.replace(self, name=f"{self.name}, graph", loop=Loop.GRAPH)


def torch_lstm(size: int, num_layers: int, dropout: float) -> nn.LSTM:
    """Create a `torch.nn.LSTM`, which uses cuDNN on a GPU, and on a CPU oneDNN or PyTorch's own code."""
    return nn.LSTM(size, size, num_layers, dropout=dropout)


def ways() -> list[Way]:
    """Return all ways: plain PyTorch first, then each kernel of gatewise, each also replayed as a CUDA graph."""
    library = Way("nn.LSTM", torch_lstm)
    plain = [Way("nn.LSTMCell loop", CellLoop), Way("nn.LSTM, native loop", NativeLSTM), library, library.replayed()]
    own = [_gatewise(name) for name in kernel_names()]
    return plain + [each for way in own for each in (way, way.replayed())]


def _gatewise(kernel: str) -> Way:
    def layer(size: int, num_layers: int, dropout: float) -> nn.Module:
        return LSTM(size, size, num_layers, dropout=dropout, kernel=kernel)

    return Way(f"gatewise {kernel}", layer, kernel, Loop.LIBRARY)


class LanguageModel(nn.Module):
    """The PTB language model: embedding, stacked LSTM, decoder, and dropout between them; weights are not tied."""

    def __init__(self, case: LanguageModelCase, vocabulary: int, way: Way, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, case.hidden_size)
        self.layer = way.layer(case.hidden_size, case.num_layers, dropout)
        self.decoder = nn.Linear(case.hidden_size, vocabulary)
        self.dropout = dropout

    def forward(self, tokens: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return the decoder's input [T*B, H] and the final state, from tokens [T, B]."""
        x = functional.dropout(self.embedding(tokens), self.dropout, self.training)
        y, state = self.layer(x, state)
        return functional.dropout(y, self.dropout, self.training).flatten(0, 1), state
