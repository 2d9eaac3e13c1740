"""RecurrentPPO on a CartPole whose velocities are hidden."""

import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.logger import Logger

import gatewise
from clients.trial import Trial


class Losses(Logger):
    """A logger that keeps the losses."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self.losses: list[float] = []

    def record(self, key: str, value: object, exclude: object = None) -> None:
        if key in ("train/loss", "train/value_loss", "train/approx_kl", "train/entropy_loss"):
            self.losses.append(float(value))


class Positions(gymnasium.ObservationWrapper):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


with Trial("sb3-contrib", "gatewise.accelerate(model.policy)") as trial, tempfile.TemporaryDirectory() as folder:
    options = {"lstm_hidden_size": 24, "n_lstm_layers": 2}
    model = RecurrentPPO(
        "MlpLstmPolicy", Positions(), n_steps=64, batch_size=32, n_epochs=3, policy_kwargs=options, seed=0, device="cpu"
    )
    if trial.gatewise:
        gatewise.accelerate(model.policy)
    logger = Losses()
    model.set_logger(logger)
    model.learn(256)
    trial.compare("losses", logger.losses)
    model.save(Path(folder) / "model")
    loaded = RecurrentPPO.load(Path(folder) / "model", device="cpu")
    seen = np.random.randn(5, 2).astype(np.float32)
    with torch.no_grad():
        answers = [each.predict(seen, deterministic=True)[1][1] for each in (model, loaded)]
    trial.saved("save, load", *answers, loaded.policy)
