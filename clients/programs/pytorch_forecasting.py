"""The Temporal Fusion Transformer and DeepAR on series with encoders of unequal length, some of them empty."""

import tempfile
from pathlib import Path

import lightning.pytorch as lightning
import numpy as np
import pandas as pd
import torch

import gatewise
from clients.losses import Losses
from clients.trial import Trial

trial = Trial("pytorch-forecasting", "torch.nn.LSTM = gatewise.LSTM")
if trial.gatewise:
    torch.nn.LSTM = gatewise.LSTM

from pytorch_forecasting import DeepAR, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import NaNLabelEncoder
from pytorch_forecasting.metrics import QuantileLoss

with trial, tempfile.TemporaryDirectory() as folder:
    table = pd.DataFrame(
        [(series, time) for series in range(6) for time in range(40)], columns=["series", "time"]
    ).assign(
        value=lambda t: np.sin(t.time / 3 + t.series) + 0.1 * np.random.randn(len(t)),
        series=lambda t: t.series.astype(str),
    )
    for kind, shortest, options in (
        (TemporalFusionTransformer, 0, {"loss": QuantileLoss(), "hidden_size": 8}),
        (DeepAR, 1, {"hidden_size": 8}),
    ):
        data = TimeSeriesDataSet(
            table,
            time_idx="time",
            target="value",
            group_ids=["series"],
            categorical_encoders={"series": NaNLabelEncoder().fit(table.series)},
            min_encoder_length=shortest,
            max_encoder_length=12,
            max_prediction_length=4,
            time_varying_known_reals=["time"],
            time_varying_unknown_reals=["value"],
            static_categoricals=["series"],
            randomize_length=(0.3, 0.4),
        )
        torch.manual_seed(0)
        np.random.seed(0)
        model = kind.from_dataset(data, learning_rate=0.01, **options)
        losses = Losses()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            limit_train_batches=10,
            default_root_dir=folder,
            callbacks=[losses],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data.to_dataloader(train=True, batch_size=16, num_workers=0))
        trial.compare("losses", losses.values)
        file = Path(folder) / "model.ckpt"
        trainer.save_checkpoint(file)
        loaded = kind.load_from_checkpoint(file, weights_only=False)
        inputs, _ = next(iter(data.to_dataloader(train=False, batch_size=16, num_workers=0)))
        with torch.no_grad():
            answers = []
            for each in (model, loaded):
                torch.manual_seed(0)
                answers.append(each.eval()(inputs).prediction)
            trial.saved("save_checkpoint, load_from_checkpoint", *answers, loaded)
