"""The work that the kernel `aten` states for the cells of PyTorch."""

import pytest
import torch

from gatewise.cells import GRU, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.aten import aten

LSTM_CALL = Problem(20, 8, 64, 64, dtype=torch.float64, needs_grad=True)


@pytest.mark.parametrize("device", ["h200", "v100"])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_step_of_an_rnn_on_a_gpu_is_one_more_launch_than_a_fused_cell(device, needs_grad):
    lstm, found = LSTM_CALL.replace(needs_grad=needs_grad), Device.named(device)
    launches = [aten.work(lstm.replace(cell=cell), found).launches for cell in (lstm.cell, GRU(), RNN())]
    assert [count - launches[0] for count in launches] == [0, 0, lstm.time]


def test_a_step_of_an_rnn_on_a_cpu_has_three_operators_instead_of_ten():
    works = [aten.work(LSTM_CALL.replace(cell=cell), Device.named("cpu")) for cell in (LSTM_CALL.cell, RNN())]
    assert works[1].launches == 0.3 * works[0].launches


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_traffic_and_products_follow_the_cell(device):
    works = [aten.work(LSTM_CALL.replace(cell=cell), Device.named(device)) for cell in (LSTM_CALL.cell, GRU(), RNN())]
    assert [work.matmul_flops / works[0].matmul_flops for work in works] == pytest.approx([1, 0.75, 0.25])
    assert works[2].bytes_moved < 0.5 * min(work.bytes_moved for work in works[:2])


@pytest.mark.parametrize("cell", [LSTM_CALL.cell, GRU(), RNN("tanh"), RNN("relu")], ids=repr)
def test_the_estimate_of_what_is_kept_is_near_what_autograd_keeps(cell):
    problem = LSTM_CALL.replace(cell=cell)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell.name, torch.nn.RNN)(64, 64, dtype=torch.float64)
    x = torch.randn(20, 8, 64, dtype=torch.float64)
    own, saved = {weight.untyped_storage().data_ptr() for weight in (x, *layer.parameters())}, {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    kept = sum(size for pointer, size in saved.items() if pointer not in own)
    stated = sum(spec.nbytes for spec in aten.kept(problem, Device.named("cpu")))
    assert kept / stated == pytest.approx(1, rel=0.1)
