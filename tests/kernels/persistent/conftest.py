"""What tests of emulated passes share."""

import functools
import math

import pytest

from gatewise.contract import ranking
from gatewise.kernels.persistent import dry_run, kernel, replay
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes import memory, tiling_choice
from gatewise.kernels.persistent.sizes.segments import Cut, in_order


def _forget():
    of_memory = memory.lean_cut, memory.lean_forward_pieces, memory.holds_matrices, dry_run._memory_of
    for remembered in (*of_memory, replay.kept_bytes, replay._replays, replay.stack_of):
        remembered.cache_clear()


@pytest.fixture
def cut(monkeypatch):
    """Cut sequences into so many segments, or about as many, instead of in the least stated time.

    The gates of all of them are made again; or, given a second number, those of so many more are kept.
    """

    def into(count, kept=0):
        monkeypatch.setattr(memory, "_COUNTS", (1, 2, 3, 5, 7) if kept else (count,))
        monkeypatch.setattr(memory, "_PARTS_WITH_GATES_KEPT", ())
        _forget()
        if kept:
            monkeypatch.setattr(memory, "lean_cut", functools.cache(functools.partial(_keeping, count, kept)))
            monkeypatch.setattr(kernel, "lean_cut", memory.lean_cut)
            monkeypatch.setattr(memory, "_allowed", lambda problem: math.inf)

    yield into
    _forget()


@pytest.fixture
def overwritten(monkeypatch):
    """Have gradients of gate sums take the gates' place, as in TF32."""
    monkeypatch.setattr(memory, "exchanges_in_gates", lambda problem: True)
    _forget()
    yield
    _forget()


@pytest.fixture
def cut_where(monkeypatch):
    """Choose among those tilings that fit and that a function accepts."""
    fits, remembered = tiling_choice.fits, (tiling_choice._of_one_group, tiling_choice.tiling, compiled.launch_of)

    def of(accepts):
        monkeypatch.setattr(tiling_choice, "fits", lambda cut, device: accepts(cut) and fits(cut, device))
        for one in remembered:
            one.cache_clear()

    yield of
    for one in remembered:
        one.cache_clear()


@pytest.fixture
def most_bytes(monkeypatch):
    """Have blocks load totals of statistics where the pairs of all blocks are more than so many bytes."""
    weights = ranking.weights

    def of(most):
        changed = {"persistent statistics": {"bytes": most}}
        monkeypatch.setattr(ranking, "weights", lambda *asked: {**weights(*asked), **changed.get(asked[1], {})})
        compiled.launch_of.cache_clear()

    yield of
    compiled.launch_of.cache_clear()


def _keeping(rebuilt, kept, problem):
    """Keep gates of half of the steps, or of a few more or less."""
    steps = max(-(-problem.time // 2), -(-problem.time // (rebuilt + 1)), min(kept, problem.time - 1))
    return in_order(problem.time, steps, rebuilt, kept) or Cut((problem.time,))
