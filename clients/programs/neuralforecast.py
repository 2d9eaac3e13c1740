"""The forecasters `LSTM`, `DeepAR` and `TFT` on several series."""

import tempfile

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, TFT, DeepAR

import gatewise
from clients.trial import Trial

with (
    Trial("neuralforecast", "gatewise.accelerate(model)  # for model in forecast.models") as trial,
    tempfile.TemporaryDirectory() as folder,
):
    steps = np.tile(np.arange(60), 4)
    names = np.repeat(["a", "b", "c", "d"], 60)
    values = np.sin(steps / 4 + np.repeat(np.arange(4), 60)) + 0.1 * np.random.randn(240)
    table = pd.DataFrame({"unique_id": names, "ds": steps, "y": values})
    options = {
        "h": 4,
        "input_size": 12,
        "max_steps": 6,
        "batch_size": 4,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "logger": False,
    }
    models = [
        LSTM(encoder_hidden_size=12, decoder_hidden_size=8, **options),
        LSTM(encoder_hidden_size=12, decoder_hidden_size=8, recurrent=True, alias="recurrent", **options),
        DeepAR(lstm_hidden_size=12, **options),
        TFT(hidden_size=8, **options),
    ]
    forecast = NeuralForecast(models=models, freq=1)
    if trial.gatewise:
        for model in forecast.models:
            gatewise.accelerate(model)
    forecast.fit(table)
    for model in forecast.models:
        trial.compare("losses", [loss for _, loss in model.train_trajectories])
    torch.manual_seed(0)
    before = forecast.predict().drop(columns=["unique_id", "ds"])
    trial.compare("forecasts", before.to_numpy())
    forecast.save(folder, overwrite=True)
    loaded = NeuralForecast.load(folder)
    torch.manual_seed(0)
    after = loaded.predict()[before.columns]  # which are in another order
    trial.saved("save, load", before, after, torch.nn.ModuleList(loaded.models))
