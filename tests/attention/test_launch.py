"""Launching Triton's programs the short way, with a stand-in for Triton."""

import pytest
import torch

from gatewise.attention.fused import launch


@pytest.fixture
def compilations(monkeypatch):
    """Return the list of compilations, with one entry for each."""
    found = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments, stream: None

    class Program:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: found.append(constants) or Compiled()

    monkeypatch.setattr(launch, "_program", lambda name: (Program(), True))
    known = {}
    monkeypatch.setattr(launch, "_compiled", lambda: known)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


def run(*arguments, **constants):
    launch._launch("score_program", (1,), arguments, num_warps=4, **constants)


def test_a_program_is_compiled_once_for_what_triton_looks_at(compilations):
    tensor = torch.zeros(64)
    for _ in range(2):
        run(tensor, 32, None, BT=4)
    run(torch.ones(8), 48, None, BT=4)  # another tensor as aligned, another multiple of 16
    assert len(compilations) == 1
    run(tensor, 33, None, BT=4)
    run(tensor, 1, None, BT=4)
    run(tensor[1:], 32, None, BT=4)
    run(tensor.half(), 32, None, BT=4)
    run(tensor, 32, tensor, BT=4)
    run(tensor, 32, None, BT=8)
    assert len(compilations) == 7


def test_what_is_remembered_does_not_grow_without_bound(compilations, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_COMPILED", 3)
    for steps in (1, 2, 4, 8, 16):
        run(torch.zeros(64), BT=steps)
        assert len(launch._compiled()) <= 3
    run(torch.zeros(64), BT=16)
    assert len(compilations) == 5
