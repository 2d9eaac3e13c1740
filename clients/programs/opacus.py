"""Private training: the validator refuses the layer and replaces it by `DPLSTM`, whose gradients are clipped."""

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gatewise
from clients.trial import Trial


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].mean(1))


with Trial("opacus", "gatewise.accelerate(model)") as trial:
    model = Classifier()
    if trial.gatewise:
        gatewise.accelerate(model)
    x = torch.randn(32, 7, 6)
    y = (x.mean((1, 2)) > 0).long()
    trial.compare("refusals", len(ModuleValidator.validate(model, strict=False)))

    private = ModuleValidator.fix(model)
    optimizer = torch.optim.SGD(private.parameters(), 0.1)
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    private, optimizer, data = PrivacyEngine().make_private(
        module=private,
        optimizer=optimizer,
        data_loader=data,
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for _ in range(3):
        for inputs, labels in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(private(inputs), labels)
            loss.backward()
            optimizer.step()
            trial.compare("losses", loss)
