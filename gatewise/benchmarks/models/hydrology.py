"""Rainfall-runoff models: LSTMs over a year of weather, and a linear head, of which the loss takes the last day."""

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
        embedding: The number of features of the embeddings of either kind of input, which a second LSTM reads too; 0
            for one LSTM that reads the inputs themselves.
    """

    time: int
    batch: int
    hidden_size: int
    dynamic: int
    static: int
    dropout: float
    embedding: int = 0

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device."""
        return ForecastModel(self) if self.embedding else CatchmentModel(self)

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
        self.lstm = nn.LSTM(sizes.dynamic + sizes.static, sizes.hidden_size)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(sizes.hidden_size, 1)
        _remember(self.lstm)

    def predict(self, weather: Tensor, catchment: Tensor, *targets: Tensor) -> Tensor:
        """Return the discharge of the last day [B]."""
        x = torch.cat([weather, catchment.expand(len(weather), -1, -1)], dim=-1)
        y, _ = self.lstm(x)
        return self.head(self.dropout(y))[-1, :, 0]

    def forward(self, weather: Tensor, catchment: Tensor, discharge: Tensor, deviation: Tensor) -> Tensor:
        """Return the loss."""
        return _nash_sutcliffe(self.predict(weather, catchment), discharge, deviation)


class ForecastModel(nn.Module):
    """The model of google-research/flood-forecasting without missing inputs, with a linear head.

    Embeddings are the input of a hindcast LSTM, and with its outputs that of a forecast LSTM.
    """

    def __init__(self, sizes: Hydrology) -> None:
        super().__init__()
        size, features = sizes.hidden_size, sizes.embedding
        self.of_catchment = nn.Sequential(
            *(nn.Linear(sizes.static, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, features))
        )
        self.of_weather = nn.Sequential(nn.Linear(sizes.dynamic + features, 100), nn.Tanh(), nn.Linear(100, features))
        self.hindcast = nn.LSTM(2 * features, size, batch_first=True)
        self.forecast = nn.LSTM(2 * features + size, size, batch_first=True)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(size, 1)
        _remember(self.hindcast)
        _remember(self.forecast)

    def predict(self, weather: Tensor, catchment: Tensor, *targets: Tensor) -> Tensor:
        """Return the discharge of the last day [B]."""
        weather = weather.transpose(0, 1)
        static = self.of_catchment(catchment).unsqueeze(1).expand(-1, weather.shape[1], -1)
        x = torch.cat([static, self.of_weather(torch.cat([weather, static], dim=-1))], dim=-1)
        past, _ = self.hindcast(x)
        y, _ = self.forecast(torch.cat([x, past], dim=-1))
        return self.head(self.dropout(y))[:, -1, 0]

    def forward(self, weather: Tensor, catchment: Tensor, discharge: Tensor, deviation: Tensor) -> Tensor:
        """Return the loss."""
        return _nash_sutcliffe(self.predict(weather, catchment), discharge, deviation)


def _remember(lstm: nn.LSTM) -> None:
    with torch.no_grad():
        lstm.get_parameter("bias_hh_l0")[lstm.hidden_size : 2 * lstm.hidden_size] = _FORGET_BIAS


def _nash_sutcliffe(found: Tensor, discharge: Tensor, deviation: Tensor) -> Tensor:
    """Return a form of the Nash-Sutcliffe efficiency: squared errors relative to the variance."""
    return ((found - discharge) ** 2 / (deviation + 0.1) ** 2).mean()
