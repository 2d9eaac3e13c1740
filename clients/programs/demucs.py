"""Separation of sources: `Demucs`, and `HDemucs`, whose LSTMs and attention lie in residual branches."""

import tempfile
from pathlib import Path

import torch
from demucs.apply import apply_model
from demucs.demucs import Demucs
from demucs.hdemucs import HDemucs
from demucs.states import get_state, save_with_checksum, set_state
from torch import nn

import gatewise
from clients.trial import Trial


def plain() -> Demucs:
    return Demucs(["low", "high"], channels=4, depth=3, lstm_layers=2, dconv_mode=0, samplerate=8000, segment=0.5)


def hybrid() -> HDemucs:
    options = {"depth": 3, "nfft": 256, "norm_starts": 2, "dconv_lstm": 2, "dconv_mode": 1, "dconv_attn": 2}
    return HDemucs(["low", "high"], channels=4, samplerate=8000, segment=0.5, **options)


def sources() -> torch.Tensor:
    time = torch.arange(4000) / 8000
    pitches = torch.tensor([[110.0, 880.0], [146.0, 1174.0]])[:, :, None, None]
    return torch.sin(2 * torch.pi * pitches * time + torch.rand(2, 2, 2, 1)) / 4


with Trial("demucs", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    for make in (plain, hybrid):
        model = make()
        if trial.gatewise:
            gatewise.accelerate(model)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(3):
            wanted = sources()
            loss = nn.functional.l1_loss(model.train()(wanted.sum(1)), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.compare("losses", loss)
        save_with_checksum(get_state(model, None), Path(folder) / f"{make.__name__}.th")
        (file,) = Path(folder).glob(f"{make.__name__}-*.th")
        loaded = make()
        set_state(loaded, torch.load(file))
        set_state(model, torch.load(file))  # which has rounded the weights to half precision
        mixed = sources().sum(1)
        answers = [apply_model(each, mixed, shifts=0, split=True, overlap=0.25) for each in (model, loaded)]
        trial.compare("sources", answers[0])
        trial.saved("get_state, set_state", *answers, loaded)
