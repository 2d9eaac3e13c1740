"""Streams whose states are held at fixed addresses, as on a GPU: with the CUDA sources compiled for the CPU."""

import copy
import gc
import itertools
import pickle
import re
import threading
import weakref

import pytest
import torch
from torch.nn.utils import parametrizations

import gatewise
from gatewise.cells import GRU, LSTM, LayerNormLSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from gatewise.functional import one_step
from gatewise.kernels.cuda import driver
from gatewise.kernels.stepwise import single
from gatewise.nn import stream as streams
from tests.calls import profile
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.nn.test_stream import Momentum
from tests.nn.test_stream_use import WRONG_WEIGHTS
from tests.pairwise import each_value

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


def test_states_go_over_to_other_ways_and_back_to_the_same_addresses(launched):
    layer, x = gatewise.LSTM(F, H, dtype=torch.float64), x_of()
    expected, _ = outputs(layer, x)
    stream = layer.stream(B)
    found = [stream(x[0])]
    held = stream._held
    with gatewise.use_kernel("eager"):
        found += [stream(x[1]), stream(x[2])]
    found.append(stream(x[3]))
    torch.testing.assert_close(torch.stack(found), expected)
    assert stream._held is held
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


def doubled_in_place(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)


def stepped(layer):
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    with gatewise.use_kernel("eager"):
        layer(x_of())[0].sum().backward()
    optimizer.step()


def loaded(layer):
    layer.load_state_dict({name: -value for name, value in layer.state_dict().items()})


def assigned(layer):
    layer.load_state_dict({name: -value for name, value in layer.state_dict().items()}, assign=True)


def other_data(layer):
    for parameter in layer.parameters():
        parameter.data = parameter.data + 0.1


def other_parameter(layer):
    layer.weight_hh_l0 = torch.nn.Parameter(2 * layer.weight_hh_l0.detach())


def parametrized(layer):
    parametrizations.orthogonal(layer, "weight_hh_l1")


def moved(layer):
    layer.float()
    layer.double()


def without_a_parameter(layer):
    value = layer.bias_hh_l0.detach() + 1
    del layer.bias_hh_l0
    layer.bias_hh_l0 = value


CHANGES = [
    doubled_in_place,
    stepped,
    loaded,
    assigned,
    other_data,
    other_parameter,
    parametrized,
    moved,
    without_a_parameter,
]


@pytest.mark.parametrize(
    ("change", "name"),
    each_value([*itertools.product(CHANGES, ["LSTM", "own cell"])]),
    ids=lambda own: getattr(own, "__name__", str(own)),
)
def test_weights_are_read_in_every_call(name, change, launched):
    layer, x = LAYERS[name](), x_of()
    stream = layer.stream(B)
    steps(stream, x)
    states = stream.states
    change(layer)
    again = stream.layer.stream(B)
    again.states = states
    expected = outputs(layer, x, states)[0]
    found = steps(stream, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, steps(again, x), rtol=0, atol=0)
    with torch.no_grad():  # and once more, for what was made for the changed weights
        for parameter in layer.parameters():
            parameter.data = parameter.data * 1.5
    states = stream.states
    torch.testing.assert_close(steps(stream, x), outputs(layer, x, states)[0])
    assert len(launched) == 2 * 4 * T


@pytest.mark.usefixtures("launched")
def test_other_forms_of_a_weight_at_the_same_address_are_seen():
    layer, x = gatewise.RNN(H, H, dtype=torch.float64), x_of(T, B, H)
    stream, weight = layer.stream(B), layer.weight_hh_l0
    stream(x[0])
    states, before = stream.states, weight.data_ptr()
    weight.data = weight.data.t()
    assert weight.data_ptr() == before
    torch.testing.assert_close(stream(x[1]), outputs(layer, x[1:2], states)[0][0])
    whole = weight.data
    for wrong, error in (
        (whole[:-1], ShapeError),
        (whole.view(torch.int64), DtypeError),
        (whole.to("meta"), DeviceError),
    ):
        weight.data = whole
        stream(x[2])
        del layer.weight_hh_l0
        layer.weight_hh_l0 = wrong
        before = stream.states
        with pytest.raises(error, match="`weights` must be"):
            stream(x[3])
        torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
        del layer.weight_hh_l0
        layer.weight_hh_l0 = weight


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_together_get_the_error_of_the_layer(wrong, launched):
    layer, x = gatewise.LSTM(5, 8, 2), x_of(dtype=torch.float32)
    stream = layer.stream(B)
    stream(x[0])
    setattr(layer, wrong.partition(" ")[0], torch.nn.Parameter(WRONG_WEIGHTS[wrong]))
    with pytest.raises((ShapeError, DtypeError, DeviceError)) as expected, gatewise.use_kernel("eager"):
        layer(x[1:2])
    with pytest.raises(expected.type) as found:
        stream(x[1])
    assert str(found.value) == str(expected.value).replace("`input`", "`x`")
    assert len(launched) == 2


@pytest.mark.usefixtures("launched")
def test_a_call_that_is_interrupted_before_its_launches_exist_leaves_the_states(monkeypatch):
    layer, x = gatewise.LSTM(F, H, 2, dtype=torch.float64), x_of()
    stream = layer.stream(B)

    def interrupted(*_):
        raise KeyboardInterrupt

    for number, step in enumerate(x[:2]):  # the first call, and one after a weight was replaced
        layer.weight_hh_l1 = torch.nn.Parameter((number + 1) * layer.weight_hh_l1.detach())
        before = stream.states
        with monkeypatch.context() as patched:
            patched.setattr(single, "_binary", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream(step)
        torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
        torch.testing.assert_close(stream(step), outputs(layer, step.unsqueeze(0), before)[0][0])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.usefixtures("launched")
def test_states_of_a_step_that_failed_between_its_layers_are_refused(number, error, monkeypatch):
    layer, x = gatewise.LSTM(F, H, 2, dtype=torch.float64), x_of()
    stream = layer.stream(B)
    stream(x[0])
    before = stream.states

    def fail():
        raise error

    def fails():
        launches = list(stream._held._launches)
        launches[number] = fail
        with monkeypatch.context() as patched:
            patched.setattr(stream._held, "_launches", launches)
            with pytest.raises(error):
                stream(x[1])

    message = "`states` must be those of a whole step, got those of a step that failed after it had begun. Call reset"
    rows = torch.tensor([True, False, True])
    for mend, given in ((lambda: setattr(stream, "states", before), before), (stream.reset, None)):
        fails()
        stream.reset(rows)  # the other row is still one of two steps
        for use in (lambda: stream(x[1]), lambda: stream.states, lambda: copy.deepcopy(stream)):
            with pytest.raises(ArgumentError, match=message):
                use()
        mend()
        expected, after = outputs(layer, x[1:], given)
        torch.testing.assert_close(steps(stream, x[1:]), expected)
        torch.testing.assert_close(stream.states, after)


@pytest.mark.usefixtures("launched")
def test_inputs_are_read_wherever_they_are():
    layer, x = gatewise.LSTM(6, H, dtype=torch.float64), x_of(T, B, 6)
    stream, expected = layer.stream(B), outputs(layer, x)[0]
    room = torch.empty(B * 6 + 1, dtype=torch.float64)
    given = (
        x[0],
        x[1].t().contiguous().t(),
        room[1:].view(B, 6).copy_(x[2]),
        torch.nn.Parameter(x[3]),
    )
    torch.testing.assert_close(torch.stack([stream(step) for step in given]), expected)


@pytest.mark.usefixtures("launched")
def test_wrong_inputs_are_refused_after_the_first_call_too():
    stream = gatewise.LSTM(F, H, dtype=torch.float64).stream(B)
    x = x_of()[0]
    stream(x)
    before = stream.states
    for wrong, error in (
        (x[:1], ShapeError),
        (x.float(), DtypeError),
        (x.to("meta"), DeviceError),
        (x.to_sparse(), ArgumentError),
        (None, ArgumentError),
    ):
        with pytest.raises(error, match="`x` must be"):
            stream(wrong)
    stream.layer.reverse = True
    with pytest.raises(ArgumentError, match="`reverse` must be False for a stream"):
        stream(x)
    stream.layer.reverse = False
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)


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
def test_autocast_may_begin_and_end_between_calls():
    layer, x = gatewise.LSTM(F, H), x_of(dtype=torch.float32)
    exact, stream, found = outputs(layer, x)[0], layer.stream(B), []
    for number, step in enumerate(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            found.append(stream(step))
    assert [y.dtype for y in found] == [torch.float32, torch.bfloat16] * 2
    torch.testing.assert_close(torch.stack([y.float() for y in found]), exact, rtol=0.02, atol=0.02)


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
def test_the_first_call_with_a_device_dtype_and_cell_is_not_captured(monkeypatch):
    layer, x = gatewise.Recurrent(LSTM(), F, H), x_of(dtype=torch.float32)[0]
    stream = layer.stream(B)
    message = (
        "`stream` must be called directly, got its first call in the capture of a CUDA graph, whose replays would "
        "begin with it. Call the stream once with this device, dtype and cell before the capture."
    )
    calls = (
        lambda: stream(x),
        lambda: in_16_bits(stream, x),
        lambda: with_another_cell(stream, x),
        lambda: in_another_dtype(stream, x),
    )
    for call in calls:
        with monkeypatch.context() as patched:
            patched.setattr(streams, "_is_capturing", lambda device: True)
            with pytest.raises(ArgumentError, match=re.escape(message)):
                call()
        call()


USES = {
    "call": lambda stream, x: stream(x),
    "reset": lambda stream, x: stream.reset(),
    "reset of rows": lambda stream, x: stream.reset(torch.tensor([True, False, True])),
    "states": lambda stream, x: stream.states,
    "assignment": lambda stream, x: setattr(stream, "states", (torch.ones(2, B, H), torch.ones(2, B, H))),
}


def in_16_bits(stream, x):
    with torch.autocast("cpu", torch.bfloat16):
        stream(x)


def with_another_cell(stream, x):
    stream.layer.zoneout = {"c": 0.4}
    stream(x)


def in_another_dtype(stream, x):
    stream.layer.double()
    stream(x.double())


@pytest.mark.parametrize(
    ("change", "use"),
    each_value([*itertools.product([in_16_bits, with_another_cell, in_another_dtype], [None, *USES.values()])]),
)
@pytest.mark.usefixtures("launched")
def test_memory_that_a_captured_graph_uses_stays_allocated(use, change, monkeypatch):
    layer, x = gatewise.Recurrent(LSTM(), F, H, 2), x_of(B, F, dtype=torch.float32)
    stream = layer.stream(B)
    stream(x)
    held = weakref.ref(stream._held)
    if use is not None:
        with monkeypatch.context() as patched:
            patched.setattr(streams, "_is_capturing", lambda device: True)
            for _ in range(2):
                use(stream, x)
    copies = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
    change(stream, x)
    gc.collect()
    assert stream._held is not held()
    assert (held() is not None) == (use is not None)
    assert [len(each._captured) for each in (stream, *copies)] == [int(use is not None), 0, 0]
    del stream
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=() if name == "LSTM" else pytest.mark.exhaustive) for name, make in LAYERS.items()],
    ids=LAYERS,
)
def test_a_compiled_function_may_reset_and_assign_the_states(make, launched, recwarn):
    layer, x = make(), x_of()
    stream, other, rows = layer.stream(B), layer.stream(B), torch.tensor([True, False, True])

    def loop(stream, x):
        y = stream(x[0])
        stream.reset(rows)
        y = y + stream(x[1])
        stream.states = stream.states
        y = y + stream(x[2])
        stream.reset()
        return y + stream(x[3])

    expected = [loop(other, x) for _ in range(2)]
    recwarn.clear()
    compiled = torch.compile(loop, backend="eager")
    torch.testing.assert_close([compiled(stream, x) for _ in range(2)], expected)
    torch.testing.assert_close(stream.states, other.states)
    assert len(launched) == 2 * 2 * 4 * layer.num_layers
    assert not list(recwarn)


@pytest.mark.usefixtures("launched")
def test_inference_mode_and_other_modes_can_alternate():
    layer, x = gatewise.LSTM(F, H, dtype=torch.float64), x_of()
    stream, found = layer.stream(B), []
    for number, step in enumerate(x):
        with torch.inference_mode(number % 2 == 0):
            stream.reset(torch.zeros(B, dtype=torch.bool))
            found.append(stream(step))
    torch.testing.assert_close(torch.stack(found), outputs(layer, x)[0])


@pytest.mark.parametrize("name", ["LSTM", "own cell"])
def test_a_step_takes_few_calls_of_python(name, launched, monkeypatch):
    # A step on a GPU takes as long as 50 calls of Python.
    monkeypatch.setattr(driver, "prepared", lambda *given: lambda: None)
    layer, x = LAYERS[name](), x_of()
    stream, called = layer.stream(B), {"call": 0, "c_call": 0}
    steps(stream, x[:3])

    def count(frame, event, argument):
        if event in called:
            called[event] += 1

    profile(lambda: stream(x[3]), count)
    assert called["call"] <= 1 + 14 + layer.num_layers
    assert called["c_call"] <= 12 + 2 * len(list(layer.parameters())) + 10
    assert not launched


REFUSED = {
    "named kernel": (lambda **options: gatewise.LSTM(F, H, kernel="eager", **options), B),
    "projection": (lambda **options: gatewise.LSTM(F, H, proj_size=3, **options), B),
    "normalization": (lambda **options: gatewise.Recurrent(LayerNormLSTM(), F, H, **options), B),
    "sequences": (lambda **options: gatewise.LSTM(F, H, **options), 9),
}


@pytest.mark.parametrize(("make", "batch"), REFUSED.values(), ids=REFUSED)
def test_other_steps_take_the_kernel_of_a_call(make, batch, launched, monkeypatch):
    called = []

    def one_call(*given):
        called.append(given[-1])
        return one_step.one_call(*given[:-1], "eager")

    monkeypatch.setattr(streams, "one_call", one_call)
    layer, x = make(dtype=torch.float64), x_of(T, batch, F)
    torch.testing.assert_close(steps(layer.stream(batch), x), outputs(layer, x)[0])
    assert called == [layer.kernel] * T
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
def test_replays_read_the_weights_and_the_resets_of_the_time():
    layer, x = gatewise.LSTM(F, H, 2, dtype=torch.float64, device="cuda"), x_of().cuda()
    stream, given = layer.stream(B), x[0].clone()
    rows = torch.zeros(B, dtype=torch.bool, device="cuda")
    stream(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.reset(rows)
        y = stream(given)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[[2, 3, 1], [0, 1, 2]] = True
    for _ in range(2):
        stream.reset()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.5)
        expected, final = outputs(layer, x, resets=resets.cuda())
        for step, reset, exact in zip(x, resets, expected, strict=True):
            given.copy_(step)
            rows.copy_(reset)
            graph.replay()
            torch.testing.assert_close(y, exact)
        torch.testing.assert_close(stream.states, final)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "size"), [(1, 512), (8, 1024), (5, 2050), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_steps_have_the_same_bits_in_calls_and_in_replays(batch, size, dtype):
    # Blocks begin and end in any order. One that read a buffer while another step wrote it would give other bits.
    layer = gatewise.LSTM(size, size, 2, device="cuda", dtype=dtype)
    x = torch.randn(400, batch, size, device="cuda", dtype=dtype)
    stream, other = layer.stream(batch), layer.stream(batch)
    expected = steps(stream, x)
    given = x[:20].clone()
    other(x[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = steps(other, given)
    other.reset()
    for number in range(0, 400, 20):
        given.copy_(x[number : number + 20])
        graph.replay()
        assert torch.equal(y, expected[number : number + 20]), number
    for found, exact in zip(other.states, stream.states, strict=True):
        assert torch.equal(found, exact)
    theirs = outputs(layer, x)[0].double()
    exact = outputs(copy.deepcopy(layer).double(), x.double())[0]
    unit, scale = torch.finfo(dtype).eps, exact.norm()
    assert (expected.double() - exact).norm() <= 2 * ((theirs - exact).norm() + unit * scale)


@pytest.mark.gpu
def test_steps_go_on_on_another_stream_and_in_another_thread():
    layer, x = gatewise.GRU(F, H, dtype=torch.float64, device="cuda"), x_of().cuda()
    stream, side = layer.stream(B), torch.cuda.Stream()
    found = [stream(x[0])]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found.append(stream(x[1]))
    torch.cuda.current_stream().wait_stream(side)
    thread = threading.Thread(target=lambda: found.append(stream(x[2])))
    thread.start()
    thread.join()
    found.append(stream(x[3]))
    torch.testing.assert_close(torch.stack(found), outputs(layer, x)[0])


@pytest.mark.gpu
def test_autocast_on_a_gpu_computes_in_its_dtype():
    layer, x = gatewise.LSTM(F, H, device="cuda"), x_of(dtype=torch.float32).cuda()
    exact, stream = outputs(layer, x)[0], layer.stream(B)
    with torch.autocast("cuda", torch.bfloat16):
        y = steps(stream, x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_a_captured_call_of_another_kernel_is_refused():
    stream = gatewise.LSTM(F, H, proj_size=3, device="cuda").stream(B)
    x = torch.zeros(B, F, device="cuda")
    stream(x)
    with pytest.raises(ArgumentError, match="would not carry"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stream(x)


@pytest.mark.gpu
def test_steps_on_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    # The kernel is loaded for the second device while the first one is the current one.
    layer, x = gatewise.LSTM(F, H, 2, dtype=torch.float64), x_of()
    expected, final = outputs(layer, x)
    layer.to("cuda:1")
    stream, given = layer.stream(B), x.to("cuda:1")
    found = steps(stream, given[:2])
    assert torch.cuda.current_device() == 0
    stream.states = stream.states
    torch.testing.assert_close(torch.cat([found, steps(stream, given[2:])]).cpu(), expected)
    torch.testing.assert_close(tuple(state.cpu() for state in stream.states), final)


@pytest.mark.gpu
def test_a_replay_after_calls_in_another_dtype_changes_no_other_tensor():
    layer, x = gatewise.LSTM(F, H, 2, device="cuda"), x_of(B, F, dtype=torch.float32).cuda()
    stream = layer.stream(B)
    stream(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream(x)
    with torch.autocast("cuda", torch.bfloat16):
        stream(x)
    before = stream.states
    # As large as the states, so that they would be allocated where the states of the capture were.
    others = [torch.zeros_like(before[0]) for _ in range(200)]
    for _ in range(2):
        graph.replay()
    assert not any(other.any() for other in others)
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
