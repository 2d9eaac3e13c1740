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
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
_PPO = functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-5)
_SPEECH = functools.partial(torch.optim.AdamW, lr=1e-4, betas=(0.0, 0.99), eps=1e-9)

_NEURALHYDROLOGY = "neuralhydrology, CudaLSTM (Kratzert et al. 2022)"
_BONITO = "bonito, encoder of"
_SHORT_ROLLOUT = 32  # steps
_PPO_ABOUT = "PPO with CleanRL's recurrence"


def _bonito(name: str, about: str, sizes: Basecaller, shorter: Basecaller | None = None) -> Workload:
    return Workload(name, f"{_BONITO} {about}", sizes, _ADAMW, 2.0, torch.float16, "reverse=", shorter=shorter)


def _ppo(name: str, sizes: Policy) -> Workload:
    shorter = dataclasses.replace(sizes, time=min(sizes.time, _SHORT_ROLLOUT))
    return Workload(name, _PPO_ABOUT, sizes, _PPO, 0.5, adaptation="resets=", shorter=shorter)


CASES = (
    Workload(
        "flood-512",
        "google-research/flood-forecasting (Nearing et al. 2024)",
        Hydrology(365, 512, 512, dynamic=12, static=28, dropout=0.0, every_step=False),
        _ADAM,
        1.0,
    ),
    Workload("cudalstm-128", _NEURALHYDROLOGY, Hydrology(365, 256, 128, 5, 27, 0.4, every_step=True), _ADAM, 1.0),
    Workload("cudalstm-256", _NEURALHYDROLOGY, Hydrology(365, 256, 256, 5, 27, 0.4, every_step=True), _ADAM, 1.0),
    _bonito(
        "bonito-sup", "sup", Basecaller(10_000, 6, 64, 1024, 5, bases=5), Basecaller(2_000, 6, 64, 1024, 5, bases=5)
    ),
    _bonito("bonito-hac", "hac", Basecaller(10_000, 5, 64, 384, 5, bases=4), Basecaller(2_000, 5, 64, 384, 5, bases=4)),
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
    Workload("flood-tiny", "hydrology", Hydrology(30, 32, 16, 3, 3, 0.0, every_step=False), _ADAM, 1.0),
    Workload("cudalstm-tiny", "hydrology", Hydrology(30, 32, 16, 2, 3, 0.4, every_step=True), _ADAM, 1.0),
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
