"""Captures of LSTM calls on a GPU, whatever ran before them."""

import functools
import gc
import subprocess
import sys
import textwrap

import pytest
import torch

import gatewise
from gatewise.cells import LSTM
from gatewise.functional.execution import prepare
from gatewise.selection.timing import captured

pytestmark = pytest.mark.gpu

STARTED_AFRESH = """
    import sys, torch, gatewise
    before, within = sys.argv[1:]
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    layers = {name: gatewise.LSTM(64, 64, kernel=name, **options) for name in (before, within)}
    layers[within].load_state_dict(layers[before].state_dict())
    x = torch.randn(20, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    def step(layer):
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        y, (h, c) = layer(x)
        y.backward(torch.ones_like(y))
        return y
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layers[before])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(layers[within])
    graph.replay()
    torch.cuda.synchronize()
    found, dx = y.clone(), x.grad.clone()
    expected = step(layers[within])
    assert torch.allclose(found, expected, atol=0.02), (found - expected).abs().max()
    assert torch.allclose(dx, x.grad, atol=0.05), (dx - x.grad).abs().max()
"""


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("cudnn", "persistent"),
        ("cudnn", "stepwise"),
        ("aten", "persistent"),
        ("persistent", "cudnn"),
        ("stepwise", "cudnn"),
    ],
)
def test_a_kernel_may_run_for_the_first_time_inside_a_capture(before, within):
    """In a separate process, because a library is initialised once per process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STARTED_AFRESH), before, within], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def chosen(module, x):
    """Return the plan for a call."""
    weights = tuple(module.parameters())
    return prepare(x, None, weights, None, None, module.bidirectional, 0.0, True, "auto", "normal", LSTM())[0]


def test_a_capture_is_noticed_and_warm_up_calls_may_announce_it():
    module = gatewise.LSTM(64, 64, device="cuda")
    x = torch.randn(20, 8, 64, device="cuda")
    seen = []

    def look():
        seen.append(chosen(module, x).problem.captured)
        seen.append(gatewise.explain(module, x).problem.captured)
        x.add(1)

    captured(look, warmups=1)
    assert seen == [False, False, True, True]
    with gatewise.for_cuda_graph():
        look()
    assert seen[4:] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_announced_warm_up_calls_have_the_bits_of_the_replay(dtype):
    torch.manual_seed(0)
    module = gatewise.LSTM(512, 512, 2, bidirectional=True, device="cuda", dtype=dtype)
    x = torch.randn(50, 128, 512, device="cuda", dtype=dtype, requires_grad=True)
    results = []

    def step():
        for leaf in (x, *module.parameters()):
            leaf.grad = None
        y, _ = module(x)
        y.backward(y.detach())
        results.append((y, x.grad))

    with gatewise.for_cuda_graph():
        replay = captured(step, warmups=1)
    replay()
    (y, dx), (again, dx_again) = results
    assert torch.equal(y, again)
    assert torch.equal(dx, dx_again)


def test_a_replay_keeps_what_the_captured_function_holds():
    size = 1 << 20
    out = torch.zeros(size, device="cuda")
    held = torch.ones(size, device="cuda")
    replay = captured(functools.partial(out.copy_, held))
    del held
    gc.collect()
    fillings = [torch.full([size], float("nan"), device="cuda") for _ in range(8)]  # which take memory that is free
    replay()
    assert out.eq(1).all()
    assert len(fillings) == 8
