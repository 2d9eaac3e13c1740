"""A model of synthetic series: its `Trainer` clips gradients, accumulates them, validates, saves and resumes."""

import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gatewise
from clients.trial import Trial


class Forecaster(lightning.LightningModule):
    def __init__(self, hidden_size: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(4, hidden_size, num_layers=2, batch_first=True, proj_size=8)
        self.head = nn.Linear(8, 4)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0][:, :-1]), batch[0][:, 1:])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validation", nn.functional.mse_loss(self(batch[0][:, :-1]), batch[0][:, 1:]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def trainer(folder: str, epochs: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


with Trial("lightning", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    data = DataLoader(TensorDataset(torch.randn(64, 20, 4).cumsum(1)), batch_size=8, shuffle=True)
    model = Forecaster()
    if trial.gatewise:
        gatewise.accelerate(model)
    first = trainer(folder, epochs=2)
    first.fit(model, data, data)
    checkpoint = Path(folder) / "model.ckpt"
    first.save_checkpoint(checkpoint)
    resumed = trainer(folder, epochs=4)
    resumed.fit(model, data, data, ckpt_path=str(checkpoint))
    trial.compare("losses", [*model.losses, resumed.callback_metrics["validation"].item()])
    resumed.save_checkpoint(checkpoint)
    loaded = Forecaster.load_from_checkpoint(checkpoint)
    x = torch.randn(5, 20, 4)
    with torch.no_grad():
        trial.saved("save_checkpoint, load_from_checkpoint", model.eval()(x), loaded.eval()(x), loaded)
