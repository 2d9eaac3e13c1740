"""The comparison before the timing notices a way that computes something else."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from gatewise.benchmarks.models import agreement
from gatewise.benchmarks.models.cases import TINY_CASES
from gatewise.benchmarks.models.ways import Way, ways

CPU = torch.device("cpu")
SPEECH = TINY_CASES[-1]
WORKLOAD = dataclasses.replace(
    TINY_CASES[1], program=dataclasses.replace(TINY_CASES[1].program, time=8)
)  # with dropout


class Louder(Way):
    """A way whose layers have outputs that are wrong by some percents."""

    def model(self, workload, seed, device, *, shorter=False):
        model = super().model(workload, seed, device, shorter=shorter)
        for layer in model.modules():
            if isinstance(layer, nn.LSTM):
                layer.register_forward_hook(lambda layer, inputs, output: (_louder(output[0]), output[1]))
        return model


def _louder(y):
    return y._replace(data=1.5 * y.data) if isinstance(y, tuple) else 1.5 * y


def test_a_loss_curve():
    before, after = ways(WORKLOAD)
    theirs = agreement.curves(WORKLOAD, before, 50, CPU)
    assert theirs[0] != theirs[1]
    own = agreement.same_curve(agreement.losses(WORKLOAD, after, 0, 50, CPU), theirs)
    assert own.note == ""
    assert own.worst < 0.1
    assert own.largest < 1e-3
    scaled = agreement.same_curve([loss + 1.0 for loss in theirs[0]], theirs)
    assert "which 3 seeds spread over" in scaled.note


def test_a_loss_that_is_not_finite():
    theirs = [[2.0 - 0.01 * step + 0.1 * seed for step in range(50)] for seed in range(3)]
    found = agreement.same_curve([*theirs[0][:30], *[math.nan] * 20], theirs)
    assert found.note == "the loss is nan after 30 steps"
    assert found.largest == math.inf


def test_an_output():
    before, after = ways(SPEECH)
    assert agreement.same_output(SPEECH, after, before, CPU).note == ""
    found = agreement.same_output(SPEECH, Louder("louder"), before, CPU)
    assert "from float64, more than the allowed" in found.note
    assert found.largest > 1e-3


def test_the_loss_is_followed_on_shorter_sizes():
    shorter = dataclasses.replace(WORKLOAD.program, time=7)
    workload = dataclasses.replace(WORKLOAD, shorter=shorter)
    assert agreement.batches(workload, 0, 1, CPU, shorter=True)[0][0].shape[0] == 7
    assert agreement.batches(workload, 0, 1, CPU)[0][0].shape[0] == WORKLOAD.program.time


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(each, marks=pytest.mark.exhaustive if each.name in ("bonito-tiny", "tts-tiny") else ())
        for each in TINY_CASES
    ],
    ids=lambda workload: workload.name,
)
def test_every_model_learns(workload):
    losses = agreement.losses(workload, Way("before"), 0, 50, CPU)
    assert sum(losses[25:]) < 0.98 * sum(losses[:25])
