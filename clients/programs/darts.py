"""Forecasts of several series: `RNNModel`, which feeds its output back, and `BlockRNNModel`."""

import tempfile
from pathlib import Path

import numpy as np
import torch

import gatewise
from clients.trial import Trial

trial = Trial("darts", "torch.nn.LSTM = gatewise.LSTM")
if trial.gatewise:
    torch.nn.LSTM = gatewise.LSTM

from darts import TimeSeries
from darts.models import BlockRNNModel, RNNModel
from darts.utils.likelihood_models.torch import GaussianLikelihood

with trial, tempfile.TemporaryDirectory() as folder:
    steps = np.arange(80)
    series = [
        TimeSeries.from_values((np.sin(steps / 4 + shift) + 0.1 * np.random.randn(80)).astype(np.float32))
        for shift in range(3)
    ]
    for kind, options in (
        (RNNModel, {"training_length": 20, "n_rnn_layers": 2, "likelihood": GaussianLikelihood()}),
        (BlockRNNModel, {"output_chunk_length": 4, "n_rnn_layers": 2, "dropout": 0.2}),
    ):
        model = kind(
            input_chunk_length=12,
            model="LSTM",
            hidden_dim=12,
            batch_size=16,
            n_epochs=3,
            random_state=0,
            pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False},
            **options,
        )
        model.fit(series, val_series=series)
        trial.compare("losses", list(model.trainer.callback_metrics.values()))
        trial.compare("weights", torch.cat([weight.flatten() for weight in model.model.parameters()]))
        model.save(str(Path(folder) / "model.pt"))
        loaded = kind.load(str(Path(folder) / "model.pt"), pl_trainer_kwargs={"accelerator": "cpu"})
        answers = [each.predict(6, series=series[0], random_state=0).values() for each in (model, loaded)]
        trial.compare("forecasts", answers[0])
        trial.saved("save, load", *answers, loaded.model)
