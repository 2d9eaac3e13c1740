"""Embeddings of speakers by the published weights, and a few steps of training that tell two speakers apart."""

import numpy as np
import torch
from resemblyzer import VoiceEncoder, preprocess_wav
from torch import nn

import gatewise
from clients.trial import Trial

with Trial("resemblyzer", "gatewise.accelerate(encoder)") as trial:
    encoder = VoiceEncoder("cpu", verbose=False)
    if trial.gatewise:
        gatewise.accelerate(encoder)
    time = np.arange(3 * 16000) / 16000
    voices = [
        sum(np.sin(2 * np.pi * pitch * k * time + np.random.rand()) / k for k in range(1, 9))
        * (0.6 + 0.4 * np.sin(9 * time))
        for pitch in (110, 113, 205, 210)
    ]
    waves = [preprocess_wav(voice.astype(np.float32)) for voice in voices]
    before = encoder.embed_speaker(waves)
    trial.compare("embeddings", before)
    for wave in waves:
        trial.compare("embeddings", encoder.embed_utterance(wave, return_partials=True)[1])

    optimizer = torch.optim.Adam(encoder.parameters(), 1e-4)
    mels = torch.randn(4, 30, 40) + torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None, None]
    for _ in range(4):
        embedded = encoder(mels)
        loss = nn.functional.mse_loss(embedded @ embedded.T, torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 3)
        optimizer.step()
        trial.compare("losses", loss)
