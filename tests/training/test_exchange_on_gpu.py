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

RUNS, STEPS = 20, 12
WORDS, SIZE, LAYERS, TIME, BATCH = 10_000, 1500, 2, 35, 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def trained(processes, recorded, slow=False, side=False, **options):
    """Train a PTB-large model; return digests of weights and the losses, and whether `persistent` may be chosen."""
    torch.manual_seed(0)
    device = processes.device
    model = LanguageModel(WORDS, SIZE, SIZE, LAYERS, device=device)
    weights = list(model.parameters())
    optimizer = build_optimizer(weights, TrainingOptions(optimizer="sgd", learning_rate=0.5, momentum=0.0))
    step = Step(MeanLoss(model), optimizer, 10.0, "bfloat16", device, processes=processes, **options)
    replayed = ReplayedStep(step, cuda_graphs(processes), print, weights, processes, step.expect)
    generator = torch.Generator().manual_seed(processes.rank)
    tokens = torch.randint(WORDS, (STEPS, TIME + 1, BATCH), generator=generator).to(device)
    state = (torch.zeros(LAYERS, BATCH, SIZE, device=device),) * 2
    losses, busy = [], torch.randn(2048, 2048, device=device)
    stream = torch.cuda.Stream(device) if side else torch.cuda.current_stream(device)
    with contextlib.closing(replayed):
        for each in tokens:
            if slow and processes.rank == 1:
                time.sleep(0.05)  # so that the collective of the other process waits on its GPU
                for _ in range(20):
                    busy = torch.tanh(busy @ busy)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                loss, state = (replayed if recorded else step)(Window(each[:-1], each[1:]), state)
                losses.append(loss.detach().clone())
            torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    sums = [each.detach().view(torch.int32).sum(dtype=torch.int64).item() for each in weights]
    return sums, torch.stack(losses).tolist(), processes.reserved


KINDS = {
    "launched": {"recorded": False},
    "replayed": {"recorded": True},
    "on a side stream": {"recorded": False, "side": True},
    "with a slow process": {"recorded": False, "slow": True},
    "replayed with a slow process": {"recorded": True, "slow": True},
    "rows": {"recorded": True, "exchange_rows": True},
    "bfloat16": {"recorded": True, "exchange_bfloat16": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_runs_end_with_the_same_bits_in_all_processes(tmp_path, kind):
    jobs = {str(run): (trained, KINDS[kind]) for run in range(RUNS)}
    context = multiprocessing.get_context("spawn")
    found = together(tmp_path, jobs, "cuda", context, seconds=550.0)
    assert len(found) == RUNS, "a run did not end"
    for first, second in found.values():
        assert first[0] == second[0], "the weights of the processes"
        assert first[2] == second[2] > 0
    assert len({tuple(first[0]) for first, _ in found.values()}) == 1, "the weights of the runs"
