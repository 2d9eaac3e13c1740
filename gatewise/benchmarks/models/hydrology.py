"""Rainfall-runoff models: an LSTM over a year of weather, and a linear head on the discharge of the last day."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gatewise.benchmarks.models.workload import Batch

_FORGET_BIAS = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class Hydrology:
    """The sizes of a rainfall-runoff model.

    Attributes:
        time: T, the number of days.
        batch: B, the number of samples.
        hidden_size: H, the number of hidden units.
        dynamic: The number of inputs that change daily.
        static: The number of attributes of a catchment, which are inputs of every day.
        dropout: The probability of dropping an output.
        every_step: Whether the head runs on every day, as in neuralhydrology, of which the loss takes the last.
    """

    time: int
    batch: int
    hidden_size: int
    dynamic: int
    static: int
    dropout: float
    every_step: bool

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device."""
        return CatchmentModel(self)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Yield inputs [T, B, I], discharges [B] and their standard deviation in each catchment [B].

        The discharge is that of a store that loses a tenth of its water every day.
        """
        days = torch.arange(self.time, device=generator.device)
        kept = 0.1 * 0.9 ** (self.time - 1 - days)
        while True:
            options = {"generator": generator, "device": generator.device}
            weather = torch.randn(self.time, self.batch, self.dynamic, **options)
            catchment = torch.randn(self.batch, self.static, **options)
            discharge = torch.einsum("t,tb->b", kept, weather[..., 0].relu()) + 0.1 * catchment[:, 0]
            yield weather, catchment, discharge, 0.5 + torch.rand(self.batch, **options)


class CatchmentModel(nn.Module):
    """neuralhydrology's CudaLSTM."""

    def __init__(self, sizes: Hydrology) -> None:
        super().__init__()
        self.every_step = sizes.every_step
        self.lstm = nn.LSTM(sizes.dynamic + sizes.static, sizes.hidden_size)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(sizes.hidden_size, 1)
        with torch.no_grad():
            self.lstm.get_parameter("bias_hh_l0")[sizes.hidden_size : 2 * sizes.hidden_size] = _FORGET_BIAS

    def predict(self, weather: Tensor, catchment: Tensor, *targets: Tensor) -> Tensor:
        """Return the discharge of the last day [B]."""
        x = torch.cat([weather, catchment.expand(len(weather), -1, -1)], dim=-1)
        y, _ = self.lstm(x)
        y = y if self.every_step else y[-1:]
        return self.head(self.dropout(y))[-1, :, 0]

    def forward(self, weather: Tensor, catchment: Tensor, discharge: Tensor, deviation: Tensor) -> Tensor:
        """Return the loss, a form of the Nash-Sutcliffe efficiency: squared errors relative to the variance."""
        error = self.predict(weather, catchment) - discharge
        return (error**2 / (deviation + 0.1) ** 2).mean()
