"""Runoff of synthetic basins: `start_run` trains `cudalstm` with static attributes, and the run is evaluated."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import xarray

import gatewise
from clients.trial import Trial

trial = Trial("neuralhydrology", "torch.nn.LSTM = gatewise.LSTM")
if trial.gatewise:
    torch.nn.LSTM = gatewise.LSTM

from neuralhydrology.evaluation import get_tester
from neuralhydrology.training.basetrainer import BaseTrainer
from neuralhydrology.utils.config import Config


def basins(folder: Path) -> None:
    """Write rain, temperature and runoff of three basins as neuralhydrology's generic data set."""
    (folder / "time_series").mkdir()
    (folder / "attributes").mkdir()
    date = pd.date_range("2000-01-01", "2001-12-31", name="date")
    for number, basin in enumerate("abc"):
        rain = np.random.gamma(0.5, 4.0, len(date))
        runoff = pd.Series(rain).ewm(halflife=3 + 2 * number).mean().to_numpy()
        table = pd.DataFrame({"rain": rain, "warmth": np.sin(date.dayofyear / 58), "runoff": runoff}, index=date)
        xarray.Dataset.from_dataframe(table).to_netcdf(folder / "time_series" / f"{basin}.nc")
    table = pd.DataFrame({"area": [1.0, 2.0, 4.0]}, index=pd.Index(list("abc"), name="basin"))
    table.to_csv(folder / "attributes" / "attributes.csv")
    (folder / "basins.txt").write_text("a\nb\nc\n")


with trial, tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    basins(folder)
    periods = {"train": ("01/03/2000", "30/06/2000"), "validation": ("01/07/2000", "30/09/2000")}
    periods["test"] = ("01/02/2001", "30/06/2001")
    settings = {
        **{f"{period}_basin_file": folder / "basins.txt" for period in periods},
        **{f"{period}_start_date": first for period, (first, _) in periods.items()},
        **{f"{period}_end_date": last for period, (_, last) in periods.items()},
        "experiment_name": "trial",
        "run_dir": folder,
        "data_dir": folder,
        "dataset": "generic",
        "dynamic_inputs": ["rain", "warmth"],
        "static_attributes": ["area"],
        "target_variables": ["runoff"],
        "model": "cudalstm",
        "head": "regression",
        "output_activation": "linear",
        "hidden_size": 16,
        "initial_forget_bias": 3,
        "output_dropout": 0.2,
        "optimizer": "Adam",
        "loss": "NSE",
        "learning_rate": {0: 0.01},
        "batch_size": 64,
        "epochs": 2,
        "clip_gradient_norm": 1,
        "predict_last_n": 1,
        "seq_length": 30,
        "num_workers": 0,
        "seed": 0,
        "device": "cpu",
        "metrics": ["NSE"],
        "validate_every": 1,
        "validate_n_random_basins": 3,
        "save_weights_every": 1,
        "log_interval": 1,
        "log_tensorboard": False,
        "verbose": 0,
    }
    trainer = BaseTrainer(Config(settings))
    trainer.initialize_training()
    trainer.train_and_validate()
    trial.compare("weights", torch.cat([weight.flatten() for weight in trainer.model.parameters()]))
    answers = []
    for model in (trainer.model, None):  # None: the one that was saved
        tester = get_tester(cfg=trainer.cfg, run_dir=trainer.cfg.run_dir, period="test", init_model=model is None)
        results = tester.evaluate(epoch=2, save_results=False, metrics=["NSE"], model=model)
        answers.append([results[basin]["1D"]["NSE"] for basin in "abc"])
    trial.compare("efficiencies", answers[0])
    trial.saved("run folder, evaluate", *answers, tester.model)
