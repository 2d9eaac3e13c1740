"""The plain PyTorch implementations compute what their names say."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gatewise.selection
from gatewise.benchmarks import rivals
from gatewise.benchmarks.rivals import CellLoop, Loop, NativeLSTM


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def call() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, h, c = (torch.randn(*shape, 8, generator=generator) for shape in ((6, 3), (2, 3), (2, 3)))
    return x, (h, c)


@pytest.mark.parametrize("make", [CellLoop, NativeLSTM])
def test_same_parameters_same_result(make, call) -> None:
    reference, layer = rivals.torch_lstm(8, 2, 0.0).double(), make(8, 2, 0.0).double()
    with torch.no_grad():
        for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            mine.copy_(theirs)
    x, state = call[0].double(), (call[1][0].double(), call[1][1].double())
    (y, final), (expected, expected_final) = layer(x, state), reference(x, state)
    for got, wanted in zip((y, *final), (expected, *expected_final), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_native_loop_does_without_onednn(call) -> None:
    def operators(layer: torch.nn.Module) -> set[str]:
        with torch.no_grad(), Operators() as seen:
            layer(*call)
        return {name for name in seen.names if "mkldnn" in name}

    assert operators(rivals.torch_lstm(8, 2, 0.0))
    assert not operators(NativeLSTM(8, 2, 0.0))


def test_libraries_are_switched_on_again(call) -> None:
    before = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        NativeLSTM(8, 2, 0.0)(torch.randn(6, 3, 7), call[1])
    assert (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled) == before


@pytest.mark.parametrize("make", [CellLoop, NativeLSTM, rivals.torch_lstm])
def test_dropout_acts_between_layers_in_training_only(make, call) -> None:
    layer = make(8, 2, 0.9)
    torch.manual_seed(0)
    assert not torch.equal(layer(*call)[0], layer(*call)[0])
    layer.eval()
    assert torch.equal(layer(*call)[0], layer(*call)[0])


def test_every_kernel_is_a_way() -> None:
    for loop in (Loop.LIBRARY, Loop.GRAPH):
        kernels = [way.kernel for way in rivals.ways() if way.kernel is not None and way.loop is loop]
        assert kernels == list(gatewise.selection.kernel_names())


def test_the_library_is_measured_as_people_run_it_and_replayed() -> None:
    loops = {way.name: way.loop for way in rivals.ways() if way.layer is rivals.torch_lstm}
    assert loops == {"nn.LSTM": Loop.PLAIN, "nn.LSTM, graph": Loop.GRAPH}
