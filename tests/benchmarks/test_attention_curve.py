"""Attention is timed only if it learns as plain PyTorch's does."""

from __future__ import annotations

import itertools

import pytest
import torch
from typer.testing import CliRunner

from gatewise.attention.call import Inputs
from gatewise.attention.problem import Problem
from gatewise.benchmarks import attention, attention_curve
from gatewise.benchmarks.record import MEASURED, WRONG, read_lines
from gatewise.cli.bench import app
from gatewise.contract.errors import KernelRefused
from gatewise.testing.attention import make_inputs
from tests.pairwise import each_value

CPU = torch.device("cpu")


def inputs_of(steps: int, source: int, dtype: torch.dtype, device: torch.device = CPU) -> Inputs:
    problem = Problem(steps, source, 3, 31, 31, ragged=True, dtype=dtype, needs_grad=True)
    return attention._leaves(make_inputs(problem, [source] * 3), device)


@pytest.mark.parametrize(
    ("dtype", "way"),
    each_value(
        [
            *itertools.product(
                [torch.float32, torch.bfloat16, torch.float16], [name for name in attention.ways() if name != "fused"]
            )
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize(("steps", "source"), [(5, 7), (1, 9)])
def test_ways_learn_as_plain_pytorch_does(steps: int, source: int, dtype: torch.dtype, way: str) -> None:
    inputs = inputs_of(steps, source, dtype)
    before = [tensor.clone() for tensor in inputs if tensor is not None]
    found = attention_curve.rival(attention.plain, inputs).beside(attention_curve.losses(attention.ways()[way], inputs))
    assert found.agrees, str(found)
    assert found.ours[-1] < 0.9 * found.ours[0]
    after = [tensor for tensor in inputs if tensor is not None]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(tensor.grad is None for tensor in after)


@pytest.mark.parametrize("lost", ["query", "keys", "values", "v"])
def test_a_lost_gradient_is_seen(lost: str) -> None:
    inputs = inputs_of(5, 7, torch.float32)

    def spoiled(given: Inputs) -> torch.Tensor:
        return attention.plain(given._replace(**{lost: getattr(given, lost).detach()}))

    found = attention_curve.rival(attention.plain, inputs).beside(attention_curve.losses(spoiled, inputs))
    assert "after 1 steps of training" in str(found)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        pytest.param(lambda y: y * torch.nan, 3, id="a NaN in the fourth step"),
        pytest.param(lambda y: y.detach() + 0.0 * y, 4, id="no gradient from the fourth step on"),
    ],
)
def test_a_way_that_does_not_learn_gets_no_time(monkeypatch, tmp_path, change, steps: int) -> None:
    calls = []

    def spoiled(inputs: Inputs) -> torch.Tensor:
        calls.append(0)
        # The first call is compared with float64.
        return change(attention.plain(inputs)) if len(calls) > 4 else attention.plain(inputs)

    monkeypatch.setattr(attention, "ways", lambda: {attention.PLAIN: attention.plain, "reference": spoiled})
    monkeypatch.setattr(attention, "QUICK_SIZES", ((5, 7),))
    words = ["attention", "--quick", "--device", "cpu", "--seconds", "0", "--results", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 1
    right, wrong = read_lines(tmp_path / "attention_quick.jsonl", attention.AttentionRecord)
    assert right.status == MEASURED
    assert right.note.endswith("; the loss of 8 steps of training is that of plain torch")
    assert (wrong.status, wrong.median, wrong.peak_bytes) == (WRONG, None, None)
    assert wrong.error <= wrong.allowed
    assert wrong.note.startswith(f"called from Python: after {steps} steps of training")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("steps", "source"), [(31, 33), (1, 100)])
def test_every_way_learns_on_a_gpu(steps: int, source: int, dtype: torch.dtype) -> None:
    inputs = inputs_of(steps, source, dtype, torch.device("cuda"))
    rival = attention_curve.rival(attention.plain, inputs)
    for name, way in attention.ways().items():
        for replayed in (False, True):
            try:
                found = rival.beside(attention_curve.losses(way, inputs, replayed=replayed))
            except KernelRefused:
                continue
            assert found.agrees, f"{name}, {'graph' if replayed else 'eager'}: {found}"
