"""What tests of emulated passes share."""

import pytest

from gatewise.kernels.persistent import layer, lean, memory, stacked, whole


def _forget():
    of_memory = memory.segment_count, memory.forward_segment_count, memory.holds_matrices
    for remembered in (*of_memory, whole._replays, whole.stack_of):
        remembered.cache_clear()


@pytest.fixture
def cut(monkeypatch):
    """Cut sequences into so many segments, or about as many, instead of as few as memory allows."""

    def into(count):
        monkeypatch.setattr(memory, "_COUNTS", (count,))
        _forget()

    yield into
    _forget()


@pytest.fixture
def overwritten(monkeypatch):
    """Have gradients of gate sums take the gates' place, as in TF32."""
    for module in (memory, layer, lean, stacked):
        monkeypatch.setattr(module, "overwrites_gates", lambda problem: True)
    _forget()
    yield
    _forget()
