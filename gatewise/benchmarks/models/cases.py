"""The models of the benchmark, as data."""

from __future__ import annotations

import dataclasses
import functools

import torch

from gatewise.benchmarks.models.basecaller import Basecaller
from gatewise.benchmarks.models.hydrology import Hydrology
from gatewise.benchmarks.models.policy import Policy
from gatewise.benchmarks.models.speech import Speech
from gatewise.benchmarks.models.workload import Workload

_ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
_ADAMW = functools.partial(torch.optim.AdamW, lr=2e-3)
_PPO = functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-5)
_SPEECH = functools.partial(torch.optim.AdamW, lr=1e-4, betas=(0.0, 0.99), eps=1e-9)

_NEURALHYDROLOGY = "neuralhydrology, CudaLSTM (Kratzert et al. 2022)"
_BONITO = "bonito, encoder of"
_SHORT_CHUNK, _SHORT_ROLLOUT = 2_000, 32  # samples; steps
_PPO_ABOUT = "PPO with CleanRL's recurrence"


def _bonito(name: str, about: str, sizes: Basecaller) -> Workload:
    shorter = dataclasses.replace(sizes, samples=min(sizes.samples, _SHORT_CHUNK))
    return Workload(name, f"{_BONITO} {about}", sizes, _ADAMW, 2.0, torch.float16, "reverse=", shorter=shorter)


def _ppo(name: str, sizes: Policy) -> Workload:
    shorter = dataclasses.replace(sizes, time=min(sizes.time, _SHORT_ROLLOUT))
    return Workload(name, _PPO_ABOUT, sizes, _PPO, 0.5, adaptation="resets=", shorter=shorter)


CASES = (
    Workload(
        "flood-512",
        "google-research/flood-forecasting, MeanEmbeddingForecastLSTM (Gauch et al. 2025)",
        Hydrology(365, 512, 512, dynamic=9, static=18, dropout=0.4, embedding=20),
        functools.partial(torch.optim.Adam, lr=5e-4),
        1.0,
    ),
    Workload("cudalstm-128", _NEURALHYDROLOGY, Hydrology(365, 256, 128, dynamic=5, static=27, dropout=0.4), _ADAM, 1.0),
    Workload("cudalstm-256", _NEURALHYDROLOGY, Hydrology(365, 256, 256, dynamic=5, static=27, dropout=0.4), _ADAM, 1.0),
    _bonito("bonito-sup", "dna_r10.4.1 sup v4.3", Basecaller(10_000, 6, 64, 1024, 5, bases=6)),
    _bonito("bonito-hac", "hac", Basecaller(10_000, 5, 64, 384, 5, bases=5)),
    _ppo("ppo-128", Policy(128, 64, 128, observations=64, actions=8, episode=40)),
    _ppo("ppo-256", Policy(64, 128, 256, observations=64, actions=8, episode=40)),
    _ppo("ppo-512", Policy(16, 512, 512, observations=64, actions=8, episode=40)),
    Workload(
        "tts",
        "text encoder and prosody predictor of StyleTTS 2 and Kokoro (Li et al. 2023)",
        Speech(200, 400, 16, 512, style=128, num_layers=3, dropout=0.2),
        _SPEECH,
        5.0,
        capturable=False,
        inference=True,
        shorter=Speech(100, 200, 16, 512, style=128, num_layers=3, dropout=0.2),
    ),
)

# Small enough for a CPU and for tests: all code runs, but the times mean nothing.
TINY_CASES = (
    Workload(
        "flood-tiny", "hydrology", Hydrology(30, 32, 16, dynamic=3, static=3, dropout=0.0, embedding=4), _ADAM, 1.0
    ),
    Workload("cudalstm-tiny", "hydrology", Hydrology(30, 32, 16, dynamic=2, static=3, dropout=0.4), _ADAM, 1.0),
    _bonito("bonito-tiny", "a test", Basecaller(60, 5, 8, 16, 3, bases=2)),
    _ppo("ppo-tiny", Policy(12, 16, 16, observations=4, actions=3, episode=6)),
    Workload(
        "tts-tiny",
        "text-to-speech",
        Speech(6, 8, 4, 16, style=4, num_layers=1, dropout=0.2),
        _ADAMW,
        5.0,
        capturable=False,
        inference=True,
    ),
)
