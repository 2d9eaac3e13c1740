"""Streams whose states are held at fixed addresses, as on a GPU: with the CUDA sources compiled for the CPU."""

import copy
import pickle

import pytest
import torch

import gatewise
from gatewise.cells import GRU, LSTM, LayerNormLSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.functional import one_step
from gatewise.kernels.stepwise import single
from gatewise.nn import stream as streams
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.nn.test_stream import Momentum

T, B, F, H = 4, 3, 5, 7


@pytest.fixture
def launched(monkeypatch):
    """Run the launches of a GPU on the CPU; return the list of their names."""
    single._binary.cache_clear()
    monkeypatch.setattr(streams, "steps_directly", lambda x, kernel: False)
    yield launch_on_cpu(monkeypatch, Device.named("h200")).launched
    single._binary.cache_clear()


def x_of(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (T, B, F)), dtype=dtype, generator=torch.Generator().manual_seed(1))


def steps(stream, x):
    return torch.stack([stream(step) for step in x])


def outputs(layer, x, *given, **options):
    with torch.no_grad(), gatewise.use_kernel("eager"):
        return layer(x, *given, **options)


LAYERS = {
    "LSTM": lambda **options: gatewise.LSTM(F, H, 2, dtype=torch.float64, **options),
    "GRU": lambda **options: gatewise.GRU(F, H, 2, dtype=torch.float64, **options),
    "heads": lambda **options: gatewise.Recurrent(GRU(), F, H, heads=7, dtype=torch.float64, **options),
    "own cell": lambda **options: gatewise.Recurrent(Momentum(), F, H, 2, dtype=torch.float64, **options),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@each_layer
def test_steps_states_and_resets_are_those_of_a_call(make, launched):
    layer, x = make(), x_of()
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[[2, 3, 1], [0, 1, 2]] = True
    expected, final = outputs(layer, x, resets=resets)
    stream = layer.stream(B)
    for _ in range(2):
        found = []
        for step, rows in zip(x, resets, strict=True):
            stream.reset(rows)
            found.append(stream(step))
        torch.testing.assert_close(torch.stack(found), expected)
        torch.testing.assert_close(stream.states, final)
        stream.reset()
    assert launched == ["single_step"] * (2 * T * layer.num_layers)


@each_layer
def test_states_keep_their_addresses_while_they_are_set_and_reset(make, launched):
    layer, x = make(), x_of()
    stream = layer.stream(B)
    stream(x[0])
    held = stream._held
    addresses = held._hidden.data_ptr(), held._carried.data_ptr()
    saved = stream.states
    expected, _ = outputs(layer, x, saved)
    stream.reset(torch.tensor([True, False, True]))
    stream.reset()
    stream.states = saved
    torch.testing.assert_close(steps(stream, x), expected)
    assert stream._held is held
    assert (held._hidden.data_ptr(), held._carried.data_ptr()) == addresses
    assert launched


def test_states_go_over_to_other_ways_and_back(launched, monkeypatch):
    layer, x = gatewise.LSTM(F, H, dtype=torch.float64), x_of()
    expected, _ = outputs(layer, x)
    stream = layer.stream(B)
    found = [stream(x[0])]
    with gatewise.use_kernel("eager"):
        found.append(stream(x[1]))
    with monkeypatch.context() as patch:
        patch.setattr(streams, "steps_directly", one_step.steps_directly)
        found.append(stream(x[2]))
    found.append(stream(x[3]))
    torch.testing.assert_close(torch.stack(found), expected)
    assert len(launched) == 2


def test_states_follow_the_layer_to_another_dtype(launched):
    layer, x = gatewise.GRU(F, H, dtype=torch.float64), x_of()
    expected, _ = outputs(layer, x)
    stream = layer.stream(B)
    found = [stream(x[0]), stream(x[1])]
    layer.float()
    found += [stream(x[2].float()), stream(x[3].float())]
    torch.testing.assert_close(torch.stack([y.double() for y in found]), expected, rtol=1e-5, atol=1e-5)
    assert found[-1].dtype == torch.float32
    assert stream._held.dtype == torch.float32
    assert len(launched) == T


def test_another_cell_of_a_layer_is_seen(launched):
    layer, x = gatewise.Recurrent(LSTM(), F, H, dtype=torch.float64), x_of()
    stream = layer.stream(B)
    steps(stream, x)
    layer.zoneout = {"c": 0.4}
    stream.reset()
    torch.testing.assert_close(steps(stream, x), outputs(layer.eval(), x)[0])
    assert len(launched) == 2 * T


def test_changed_weights_are_seen(launched):
    layer, x = gatewise.LSTM(F, H, 2, dtype=torch.float64), x_of()
    stream = layer.stream(B)
    steps(stream, x)
    states = stream.states
    for parameter in layer.parameters():
        parameter.data.mul_(1.5)
    layer.weight_hh_l0 = torch.nn.Parameter(2 * layer.weight_hh_l0.detach())
    torch.testing.assert_close(steps(stream, x), outputs(layer, x, states)[0])
    assert launched


def test_autocast_computes_in_its_dtype(launched):
    layer, x = gatewise.LSTM(F, H), x_of(dtype=torch.float32)
    exact, _ = outputs(layer, x)
    stream = layer.stream(B)
    with torch.autocast("cpu", torch.bfloat16):
        y = steps(stream, x)
    assert y.dtype == torch.bfloat16
    assert stream._held.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)
    assert len(launched) == T


@pytest.mark.usefixtures("launched")
def test_copies_go_on_by_themselves():
    layer, x = gatewise.LSTM(F, H, dtype=torch.float64), x_of()
    stream = layer.stream(B)
    steps(stream, x[:2])
    others = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
    expected = steps(stream, x[2:])
    for other in others:
        torch.testing.assert_close(steps(other, x[2:]), expected)


@pytest.mark.usefixtures("launched")
def test_inference_mode_and_other_modes_can_alternate():
    layer, x = gatewise.LSTM(F, H, dtype=torch.float64), x_of()
    stream, found = layer.stream(B), []
    for number, step in enumerate(x):
        with torch.inference_mode(number % 2 == 0):
            stream.reset(torch.zeros(B, dtype=torch.bool))
            found.append(stream(step))
    torch.testing.assert_close(torch.stack(found), outputs(layer, x)[0])


def test_other_steps_take_the_kernel_of_a_call(launched):
    x = x_of(B, F)
    assert one_step.steps_in_one_launch(LSTM(), x, x.dtype, "auto", projected=False)
    assert not one_step.steps_in_one_launch(LSTM(), x, x.dtype, "auto", projected=True)
    assert not one_step.steps_in_one_launch(LayerNormLSTM(), x, x.dtype, "auto", projected=False)
    assert not one_step.steps_in_one_launch(LSTM(), x_of(9, F), x.dtype, "auto", projected=False)
    assert not one_step.steps_in_one_launch(LSTM(), x.to("meta"), x.dtype, "auto", projected=False)
    layer, x = gatewise.LSTM(F, H, kernel="eager", dtype=torch.float64), x_of()
    torch.testing.assert_close(steps(layer.stream(B), x), outputs(layer, x)[0])
    assert not launched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_steps_on_a_gpu_are_a_call(batch, dtype):
    torch.manual_seed(0)
    for cell in (LSTM(), GRU(), Momentum()):
        layer = gatewise.Recurrent(cell, 33, 520, 2, device="cuda", dtype=dtype)
        x = torch.randn(T, batch, 33, device="cuda", dtype=dtype)
        exact = copy.deepcopy(layer).cpu().double()
        expected, _ = outputs(exact, x.cpu().double())
        theirs = outputs(layer, x)[0].cpu().double()
        found = steps(layer.stream(batch), x).cpu().double()
        unit, size = torch.finfo(dtype).eps, expected.norm()
        assert (found - expected).norm() <= 2 * ((theirs - expected).norm() + unit * size)


@pytest.mark.gpu
@each_layer
def test_replays_of_a_captured_step_carry_the_states(make):
    layer, x = make(device="cuda"), x_of().cuda()
    expected, final = outputs(layer, x)
    stream, given = layer.stream(B), torch.zeros(B, F, dtype=torch.float64, device="cuda")
    with pytest.raises(ArgumentError, match="first call in the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stream(given)
    stream(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stream(given)
    for _ in range(2):
        stream.reset()
        found = []
        for number, step in enumerate(x):
            if number == 2:
                found.append(stream(step))  # from Python, between replays
                continue
            given.copy_(step)
            graph.replay()
            found.append(y.clone())
        torch.testing.assert_close(torch.stack(found), expected)
        torch.testing.assert_close(stream.states, final)


@pytest.mark.gpu
def test_a_captured_call_of_another_kernel_is_refused():
    stream = gatewise.LSTM(F, H, proj_size=3, device="cuda").stream(B)
    x = torch.zeros(B, F, device="cuda")
    stream(x)
    with pytest.raises(ArgumentError, match="would not carry"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stream(x)
