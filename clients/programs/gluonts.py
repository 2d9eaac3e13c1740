"""DeepAR and the Temporal Fusion Transformer, with forecasts by sampling."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import gatewise
from clients.trial import Trial

trial = Trial("gluonts", "torch.nn.LSTM = gatewise.LSTM")
if trial.gatewise:
    torch.nn.LSTM = gatewise.LSTM

from gluonts.dataset.common import ListDataset
from gluonts.model.predictor import Predictor
from gluonts.torch import DeepAREstimator, TemporalFusionTransformerEstimator

from clients.losses import Losses

with trial, tempfile.TemporaryDirectory() as folder:
    steps = np.arange(90)
    data = ListDataset(
        [{"start": pd.Period("2024-01-01", "D"), "target": np.sin(steps / 4 + shift) + 2} for shift in range(4)],
        freq="D",
    )
    for kind, options in (
        (DeepAREstimator, {"freq": "D", "num_layers": 2, "hidden_size": 12}),
        (TemporalFusionTransformerEstimator, {"freq": "D", "hidden_dim": 8}),
    ):
        losses = Losses()
        trainer = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "callbacks": [losses],
            "logger": False,
            "enable_progress_bar": False,
        }
        estimator = kind(
            prediction_length=5,
            context_length=15,
            num_batches_per_epoch=6,
            batch_size=8,
            trainer_kwargs=trainer,
            **options,
        )
        predictor = estimator.train(data)
        trial.compare("losses", losses.values)
        place = Path(folder) / kind.__name__
        place.mkdir()
        predictor.serialize(place)
        loaded = Predictor.deserialize(place)
        answers = []
        for each in (predictor, loaded):
            torch.manual_seed(0)
            answers.append(np.stack([forecast.quantile(0.5) for forecast in each.predict(data)]))
        trial.compare("forecasts", answers[0])
        trial.saved("serialize, deserialize", *answers, loaded.prediction_net)
