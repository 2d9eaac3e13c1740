"""NCCL exchanges gradients while persistent kernels run on two GPUs: every run ends, and with the same bits."""

from __future__ import annotations

import contextlib
import multiprocessing
import time

import pytest
import torch
from several import together

from gatewise.data import Window
from gatewise.models import LanguageModel
from gatewise.training import TrainingOptions
from gatewise.training.graph import ReplayedStep, cuda_graphs
from gatewise.training.optimizers import build_optimizer
from gatewise.training.step import MeanLoss, Step

STEPS = 8
WORDS, SIZE, LAYERS, TIME, BATCH = 10_000, 1500, 2, 35, 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

KINDS = {
    "launched on a side stream": (20, {"recorded": False, "side": True}),
    "launched with a slow process": (20, {"recorded": False, "slow": True}),
    "replayed": (5, {"recorded": True}),
    "replayed with a slow process": (20, {"recorded": True, "slow": True}),
    "replayed, wide": (5, {"recorded": True, "batch": 128}),
    "rows": (5, {"recorded": True, "exchange_rows": True}),
    "whole gradients": (5, {"recorded": True, "exchange_factors": False}),
    "whole gradients with a slow process": (5, {"recorded": True, "exchange_factors": False, "slow": True}),
    "bfloat16": (5, {"recorded": True, "exchange_bfloat16": True}),
}
"""The number of runs of each kind, and its options."""


def trained(processes, recorded, slow=False, side=False, batch=BATCH, **options):
    """Train a model of PTB-large sizes; return sums of the bits of its weights, and its losses."""
    torch.manual_seed(0)
    device = processes.device
    model = LanguageModel(WORDS, SIZE, SIZE, LAYERS, device=device)
    weights = list(model.parameters())
    optimizer = build_optimizer(weights, TrainingOptions(optimizer="sgd", learning_rate=0.5, momentum=0.0))
    step = Step(MeanLoss(model), optimizer, 10.0, "bfloat16", device, processes=processes, **options)
    replayed = ReplayedStep(step, cuda_graphs(processes), print, weights, processes, step.expect)
    generator = torch.Generator().manual_seed(processes.rank)
    tokens = torch.randint(WORDS, (STEPS, TIME + 1, batch), generator=generator).to(device)
    state = (torch.zeros(LAYERS, batch, SIZE, device=device),) * 2
    losses, busy = [], torch.randn(2048, 2048, device=device)
    stream = torch.cuda.Stream(device) if side else torch.cuda.current_stream(device)
    with contextlib.closing(replayed):
        for each in tokens:
            if slow and processes.rank == 1:
                time.sleep(0.01)  # so that the collective of the other process waits on its GPU
                for _ in range(20):
                    busy = torch.tanh(busy @ busy)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                loss, state = (replayed if recorded else step)(Window(each[:-1], each[1:]), state)
                losses.append(loss.detach().clone())
            torch.cuda.current_stream(device).wait_stream(stream)
        assert replayed.shapes == recorded, "no step was captured"
    torch.cuda.synchronize(device)
    sums = [each.detach().view(torch.int32).sum(dtype=torch.int64).item() for each in weights]
    return sums, torch.stack(losses).tolist()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    jobs = {f"{kind} {run}": (trained, options) for kind, (runs, options) in KINDS.items() for run in range(runs)}
    context = multiprocessing.get_context("spawn")
    return together(tmp_path_factory.mktemp("results"), jobs, "cuda", context, seconds=300.0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_runs_end_with_the_same_bits_in_all_processes(found, kind):
    runs = [found.get(f"{kind} {run}") for run in range(KINDS[kind][0])]
    assert None not in runs, "a run failed or did not end"
    for first, second in runs:
        assert first[0] == second[0], "the weights of the processes"
    assert len({tuple(first[0]) for first, _ in runs}) == 1, "the weights of the runs"


def test_all_ways_to_run_a_step_have_the_same_losses(found):
    losses = {kind: found[f"{kind} 0"][0][1] for kind, (_, options) in KINDS.items() if "batch" not in options}
    for kind, each in losses.items():
        assert each == pytest.approx(losses["replayed"], rel=1e-3), kind
