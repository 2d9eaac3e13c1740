"""How streams are used: states, resets, weights that change, copies, errors, and PyTorch's modes."""

import copy
import itertools
import pickle
import re
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

import gatewise
from gatewise.cells import GRU, LSTM, SLSTM, PeepholeLSTM
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from gatewise.nn import Stream
from tests.compiled import in_graph
from tests.pairwise import each_value

T, B, F, H = 6, 3, 5, 8


def x_of(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (T, B, F)), dtype=dtype, generator=torch.Generator().manual_seed(1))


def steps(stream, x):
    return torch.stack([stream(step) for step in x])


def outputs(layer, x, *states):
    with torch.no_grad():
        return layer(x, *states)[0]


def on_cpu(states):
    return tuple(state.cpu() for state in states) if isinstance(states, tuple) else states.cpu()


LAYERS = {
    "LSTM": lambda **options: gatewise.LSTM(F, H, 2, **options),
    "LSTM, projection": lambda **options: gatewise.LSTM(F, H, 2, proj_size=3, **options),
    "GRU": lambda **options: gatewise.GRU(F, H, 2, **options),
    "RNN": lambda **options: gatewise.RNN(F, H, 2, **options),
    "Recurrent": lambda **options: gatewise.Recurrent(SLSTM(), F, H, 2, **options),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
each_kernel = pytest.mark.parametrize("kernel", ["auto", "eager"])


@each_kernel
@each_layer
def test_states_are_those_of_the_layer_and_go_on(make, kernel):
    layer, x = make(kernel=kernel), x_of()
    stream = layer.stream(B)
    with torch.no_grad():
        _, before = layer(x[:0])
        _, after = layer(x[:4])
    torch.testing.assert_close(stream.states, before)
    expected = steps(stream, x)[4:]
    stream.reset()
    torch.testing.assert_close(stream.states, before)
    steps(stream, x[:4])
    torch.testing.assert_close(stream.states, after)
    saved = stream.states
    other = layer.stream(B)
    other.states = saved
    for one in saved if isinstance(saved, tuple) else (saved,):
        one.fill_(7.0)  # neither stream reads the caller's tensors
    torch.testing.assert_close(steps(other, x[4:]), expected)
    torch.testing.assert_close(steps(stream, x[4:]), expected)
    other.states = None
    torch.testing.assert_close(other.states, before)


@each_kernel
@each_layer
def test_rows_are_reset_as_in_a_call(make, kernel):
    layer, x = make(kernel=kernel, dtype=torch.float64), x_of(dtype=torch.float64)
    resets = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.4
    assert resets[1:].any()
    assert not resets.all()
    stream, found = layer.stream(B), []
    for step, rows in zip(x, resets, strict=True):
        stream.reset(rows if len(found) % 2 else rows.int())
        found.append(stream(step))
    with torch.no_grad(), gatewise.use_kernel("eager"):
        layer.kernel = "auto"
        expected = layer(x, resets=resets)[0]
    torch.testing.assert_close(torch.stack(found), expected)


@each_kernel
@each_layer
def test_an_output_belongs_to_the_caller(make, kernel):
    layer, x = make(kernel=kernel), x_of()
    stream = layer.stream(B)
    expected, found = outputs(layer, x), []
    for step in x:
        y = stream(step)
        found.append(y.clone())
        y.fill_(float("nan"))
    torch.testing.assert_close(torch.stack(found), expected)
    kept = [stream(step) for step in x]
    values = [y.clone() for y in kept]
    stream(x[0])
    assert all(torch.equal(one, other) for one, other in zip(kept, values, strict=True))


def changed_by_optimizer(layer):
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x_of())[0].square().sum().backward()
    optimizer.step()


def changed_by_data(layer):
    for parameter in layer.parameters():
        parameter.data.mul_(1.5)


def changed_by_numpy(layer):
    for parameter in layer.parameters():
        parameter.detach().numpy()[...] *= 1.5


def changed_by_load(layer):
    layer.load_state_dict({name: 1.5 * value for name, value in layer.state_dict().items()})


def changed_by_assignment(layer):
    layer.load_state_dict({name: 1.5 * value for name, value in layer.state_dict().items()}, assign=True)


def changed_by_attribute(layer):
    layer.weight_hh_l0 = torch.nn.Parameter(1.5 * layer.weight_hh_l0.detach())


def changed_by_parametrization(layer):
    parametrizations.weight_norm(layer, "weight_hh_l1")
    with torch.no_grad():
        layer.parametrizations.weight_hh_l1.original0.mul_(1.5)


CHANGES = [value for name, value in sorted(globals().items()) if name.startswith("changed_by_")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@each_layer
def test_changed_weights_are_seen_at_the_next_step(make, change):
    layer, x = make(dtype=torch.float64), x_of(dtype=torch.float64)
    if change is changed_by_optimizer:
        layer, x = make(), x_of()
    stream = layer.stream(B)
    before = steps(stream, x[:3])
    states = stream.states
    change(layer)
    torch.testing.assert_close(steps(stream, x[3:]), outputs(layer, x[3:], states))
    stream.reset()
    assert not torch.allclose(steps(stream, x[:3]), before)


def test_weights_of_functional_call_are_read():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = gatewise.LSTM(F, H)

        def forward(self, x):
            return steps(self.layer.stream(B), x)

    model, x = Model(), x_of()
    doubled = {name: 2 * value.detach() for name, value in model.named_parameters()}
    found = torch.func.functional_call(model, doubled, (x,))
    model.load_state_dict(doubled)
    torch.testing.assert_close(found, outputs(model.layer, x))


def test_a_layer_whose_forward_a_stream_would_not_call_has_no_stream():
    class Doubled(torch.nn.LSTM):
        def forward(self, x, hx=None):
            return super().forward(2 * x, hx)

    class Kept(gatewise.GRU):
        pass

    assigned = gatewise.LSTM(F, H)
    assigned.forward = lambda x: x
    changed = gatewise.accelerate(Doubled(F, H), verbose=False)
    for layer, found in ((changed, "of the class .*Doubled"), (assigned, "one that was assigned to it")):
        with pytest.raises(ArgumentError, match=f"`layer.forward` must be that of gatewise's layer .*{found}"):
            layer.stream(B)
    Kept(F, H).stream(B)(x_of()[0])


def test_states_follow_the_layer_to_another_dtype():
    layer, x = gatewise.LSTM(F, H), x_of()
    stream = layer.stream(B)
    steps(stream, x[:3])
    states = tuple(state.double() for state in stream.states)
    layer.double()
    expected = outputs(layer, x[3:].double(), states)
    torch.testing.assert_close(steps(stream, x[3:].double()), expected)
    assert all(state.dtype == torch.float64 for state in stream.states)
    with pytest.raises(DtypeError, match=re.escape("`x` must be torch.float64 like the weights, got torch.float32")):
        stream(x[0])


def test_a_stream_computes_no_gradients():
    layer, x = gatewise.LSTM(F, H), x_of().requires_grad_()
    stream = layer.stream(B)
    y = steps(stream, x)
    stream.reset(torch.tensor([True, False, True]))
    assert torch.is_grad_enabled()
    assert not y.requires_grad
    assert not any(state.requires_grad for state in stream.states)
    stream.states = tuple(state.requires_grad_() for state in stream.states)
    assert not stream(x[0]).requires_grad


@each_layer
def test_inference_mode_and_other_modes_can_alternate(make):
    layer, x = make(), x_of()
    stream, found = layer.stream(B), []
    for number, step in enumerate(x):
        with torch.inference_mode(number % 2 == 0):
            found.append(stream(step))
            stream.reset(torch.zeros(B, dtype=torch.bool))
    torch.testing.assert_close(torch.stack(found), outputs(layer, x))
    assert not found[1].is_inference()


def test_a_copy_goes_on_by_itself():
    layer, x = gatewise.Recurrent(GRU(), F, H, 2), x_of()
    stream = layer.stream(B)
    steps(stream, x[:3])
    copies = [copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    expected = steps(stream, x[3:])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    for other in copies:
        assert other.layer is not layer
        torch.testing.assert_close(steps(other, x[3:]), expected)
    both = copy.deepcopy({"layer": layer, "stream": stream})
    assert both["stream"].layer is both["layer"]


def test_a_stream_is_no_part_of_a_model():
    model = torch.nn.Sequential(gatewise.LSTM(F, H))
    names = list(model.state_dict())
    model.stream = model[0].stream(B)
    model.stream(x_of(B, F))
    assert list(model.state_dict()) == names
    assert isinstance(model.stream, Stream)
    assert repr(model.stream) == f"Stream({model[0]!r}, batch={B})"


def test_streams_of_one_layer_in_several_threads_are_independent():
    layer = gatewise.LSTM(F, H, 2)
    inputs = [torch.randn(50, 1, F, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    found = {}

    def run(number):
        found[number] = steps(layer.stream(1), inputs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, x in enumerate(inputs):
        torch.testing.assert_close(found[number], outputs(layer, x))


def test_a_compiled_loop_calls_the_stream():
    layer, x = gatewise.LSTM(F, H), x_of()
    stream = layer.stream(B)

    def loop(x):
        total = torch.zeros(B, H)
        for step in x.unbind(0):
            total = total + 2 * stream(step)
        return total

    expected = 2 * outputs(layer, x).sum(0)
    compiled = torch.compile(loop, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    stream.reset()
    torch.testing.assert_close(compiled(x), expected)


def test_accelerated_layers_have_streams():
    model = torch.nn.Sequential(torch.nn.LSTM(F, H))
    expected = outputs(model[0], x_of())
    gatewise.accelerate(model, verbose=False)
    torch.testing.assert_close(steps(model[0].stream(B), x_of()), expected)


def test_batch_first_makes_no_difference():
    layer, x = gatewise.LSTM(F, H, batch_first=True), x_of()
    torch.testing.assert_close(steps(layer.stream(B), x), outputs(layer, x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("option", ["bidirectional", "reverse"])
@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU, gatewise.RNN])
def test_layers_that_read_backwards_are_refused(kind, option):
    with pytest.raises(ArgumentError, match=f"`{option}` must be False for a stream, got True"):
        kind(F, H, **{option: True}).stream(B)
    layer = kind(F, H)
    stream = layer.stream(B)
    layer.reverse = True
    with pytest.raises(ArgumentError, match="`reverse` must be False for a stream, got True"):
        stream(x_of(B, F))


@pytest.mark.parametrize("batch", [0, -1, 1.0, True, None, "1"])
def test_batches_that_are_no_positive_integer_are_refused(batch):
    with pytest.raises(ArgumentError, match=f"`batch` must be a positive integer, got {batch!r}"):
        gatewise.LSTM(F, H).stream(batch)


@pytest.mark.parametrize("shape", [(F,), (1, B, F), (B + 1, F), (B, F + 1), ()])
def test_inputs_of_another_shape_are_refused(shape):
    stream = gatewise.LSTM(F, H).stream(B)
    message = f"`x` must be of shape [B, I] = [3, 5], got {list(shape)}"
    with pytest.raises(ShapeError, match=re.escape(message)):
        stream(torch.zeros(shape))


@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"proj_size": 3}], ids=repr)
@pytest.mark.parametrize("calls_before", [0, 1])
def test_inputs_that_are_not_dense_are_refused(calls_before, options):
    stream, x = gatewise.LSTM(F, H, **options).stream(B), x_of()
    for step in x[:calls_before]:
        stream(step)
    before = stream.states
    for given in (x[1].to_sparse(), x[1].to_mkldnn()):
        message = f"`x` must be a dense tensor, got one of {given.layout}. Call .to_dense() on it."
        with pytest.raises(ArgumentError, match=re.escape(message)):
            stream(given)
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)


def test_what_is_no_tensor_is_refused():
    stream = gatewise.LSTM(F, H).stream(B)
    with pytest.raises(ArgumentError, match="`x` must be a tensor, got list"):
        stream([[0.0] * F] * B)
    with pytest.raises(ArgumentError, match="`rows` must be a tensor, got list"):
        stream.reset([True] * B)


SMALL_LAYERS = {
    "lstm": lambda: gatewise.LSTM(F, H, proj_size=3),
    "gru": lambda: gatewise.GRU(F, H, 2),
    "peepholes": lambda: gatewise.Recurrent(gatewise.cells.PeepholeLSTM(), F, H),
    "heads": lambda: gatewise.Recurrent(gatewise.cells.GRU(), F, H, heads=2),
    "rank": lambda: gatewise.Recurrent(gatewise.cells.MGU(), F, H, recurrent_rank=2),
}


@pytest.mark.parametrize("value", [None, 1.0])
@pytest.mark.parametrize("kind", SMALL_LAYERS)
def test_a_weight_that_is_no_tensor_is_named(kind, value):
    names = [name for name, _ in SMALL_LAYERS[kind]().named_parameters()]
    for name in names:
        layer = SMALL_LAYERS[kind]()
        used, new = layer.stream(B), layer.stream(B)
        used(x_of(B, F))
        delattr(layer, name)
        setattr(layer, name, value)
        message = f"`{name}` must be a tensor, got {value and 'float'}. Assign a parameter to it."
        for stream in (used, new):
            with pytest.raises(ArgumentError, match=re.escape(message)):
                stream(x_of(B, F))
        with pytest.raises(ArgumentError, match=re.escape(message)):
            layer(x_of(2, B, F))
        if name == names[0]:
            with pytest.raises(ArgumentError, match=re.escape(message)):
                used.reset(torch.ones(B, dtype=torch.bool))
            with pytest.raises(ArgumentError, match=re.escape(message)):
                used.states  # noqa: B018


@pytest.mark.parametrize("kind", ["peepholes", "heads", "rank"])
def test_a_weight_that_was_deleted_is_named(kind):
    for name, _ in SMALL_LAYERS[kind]().named_parameters():
        layer = SMALL_LAYERS[kind]()
        stream = layer.stream(B)
        delattr(layer, name)
        with pytest.raises(ShapeError, match=f"`weights` must be those that .* take, got no {name}"):
            stream(x_of(B, F))
        if name == "weight_ih_l0":
            with pytest.raises(ShapeError, match=f"got no {name}"):
                stream.states  # noqa: B018


def test_wrong_rows_are_refused():
    stream = gatewise.LSTM(F, H).stream(B)
    with pytest.raises(ShapeError, match=re.escape("`rows` must be one value for each sequence, [B] = [3], got [2]")):
        stream.reset(torch.tensor([True, False]))
    with pytest.raises(DtypeError, match="`rows` must be bool or integers, got"):
        stream.reset(torch.ones(B))


def test_wrong_states_are_refused():
    stream = gatewise.LSTM(F, H, 2).stream(B)
    h = torch.zeros(2, B, H)
    for given, error, message in (
        (h, ArgumentError, "`states` must be 2 tensors (h, c), got Tensor"),
        ((h, h, h), ArgumentError, "`states` must be 2 tensors (h, c), got 3"),
        ((h, None), ArgumentError, "`states, the state c,` must be a tensor, got NoneType"),
        ((h, h[:1]), ShapeError, "`states, the state c,` must be of shape [2, 3, 8], got [1, 3, 8]"),
        ((h[:, :1], h), ShapeError, "`states, the state h,` must be of shape [2, 3, 8], got [2, 1, 8]"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            stream.states = given
    with pytest.raises(ArgumentError, match=re.escape("`states` must be 2 tensors (h, c), got int")):
        stream.states = 0


def test_a_call_that_is_traced_is_refused():
    stream = gatewise.LSTM(F, H).stream(B)
    x = x_of(B, F)
    with pytest.raises(ArgumentError, match="`stream` must be called directly"):
        torch.func.vmap(stream, in_dims=1, out_dims=1)(x.unsqueeze(1))
    with pytest.raises(ArgumentError, match="`stream` must be called directly"):
        torch.jit.trace(lambda x: stream(x), (x,))

    class Model(torch.nn.Module):
        def forward(self, x):
            return stream(x)

    for strict in (True, False):
        told = "`stream` must be called directly"
        if strict:
            # PyTorch 2.6 and 2.7 take the call for one that is compiled, and then cannot leave its graph.
            told = in_graph(told) if torch.__version__ >= "2.8" else "Stream"
        with pytest.raises(Exception, match=told):
            torch.export.export(Model(), (x,), strict=strict)
    torch.testing.assert_close(stream.states[0], torch.zeros(1, B, H))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_call_that_make_fx_traces_is_refused_and_leaves_the_states(mode, steps_before):
    layer, x = gatewise.LSTM(F, H), x_of()
    stream = layer.stream(B)
    for step in x[:steps_before]:
        stream(step)
    rows = torch.tensor([True, False, True])
    before = stream.states
    for call in (
        lambda x: stream(x),
        lambda x: stream.reset(),
        lambda x: stream.reset(rows),
        lambda x: setattr(stream, "states", (x.new_zeros(1, B, H), x.new_zeros(1, B, H))),
    ):
        with pytest.raises(ArgumentError, match="`stream` must be called directly, got a call that make_fx traces"):
            make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(x[0])
    assert all(type(state) is torch.Tensor for state in stream.states)
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
    found = stream(x[steps_before])
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, outputs(layer, x[: steps_before + 1])[-1])


def test_fake_tensors_are_refused_and_leave_the_states():
    layer, x = gatewise.LSTM(F, H), x_of(B, F)
    stream = layer.stream(B)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, pytest.raises(ArgumentError, match="FakeTensorMode"):
        stream(x)
    with pytest.raises(ArgumentError, match="got a call with a FakeTensor"):
        stream(fake.from_tensor(x))
    with pytest.raises(ArgumentError, match="got a call with a FakeTensor"):
        stream.states = (torch.zeros(1, B, H), fake.from_tensor(torch.zeros(1, B, H)))
    with pytest.raises(ArgumentError, match="got a call with a FakeTensor"):
        stream.reset(fake.from_tensor(torch.ones(B, dtype=torch.bool)))
    found = stream(x)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, outputs(layer, x.unsqueeze(0))[0])


def test_modes_that_only_watch_operators_and_subclasses_of_tensors_are_no_tracing():
    layer, x = gatewise.LSTM(F, H), x_of(2, B, F)
    stream = layer.stream(B)
    with FlopCounterMode(display=False):
        first = stream(x[0])
    second = stream(torch.nn.Parameter(x[1]))
    torch.testing.assert_close(torch.stack([first, second]), outputs(layer, x))


def test_a_compiled_function_may_reset_a_stream():
    layer, x = gatewise.LSTM(F, H), x_of()
    stream, other = layer.stream(B), layer.stream(B)
    rows = torch.tensor([True, False, True])

    def loop(stream, x):
        y = stream(x[0])
        stream.reset(rows)
        y = y + stream(x[1])
        stream.reset()
        return y + stream(x[2])

    torch.testing.assert_close(torch.compile(loop, backend="eager")(stream, x), loop(other, x))
    torch.testing.assert_close(stream.states, other.states)


def test_rows_are_reset_on_the_device_to_which_the_layer_moved():
    layer = gatewise.LSTM(F, H)
    stream, rows = layer.stream(B), torch.tensor([True, False, True])
    layer.to("meta")
    with pytest.raises(DeviceError, match="`rows` must be on meta like the weights, got one on cpu"):
        stream.reset(rows)
    layer.to_empty(device="cpu")
    stream(x_of(B, F))
    layer.to("meta")
    with pytest.raises(DeviceError, match="`rows` must be on meta like the weights, got one on cpu"):
        stream.reset(rows)
    stream.reset(rows.to("meta"))
    assert all(state.device.type == "meta" for state in stream._states[0])
    assert stream(x_of(B, F).to("meta")).device.type == "meta"


def weights_as_plain_tensors(layer):
    for name, value in list(layer.named_parameters()):
        delattr(layer, name)
        setattr(layer, name, value.detach())


class Split(torch.nn.Module):
    """A parametrization by a rounded tensor of another dtype than the weight's, and the remainder."""

    def forward(self, rounded, remainder):
        return rounded.float() + remainder

    def right_inverse(self, weight):
        return weight.bfloat16(), weight - weight.bfloat16()


def weights_of_another_parameter(layer):
    for name in [name for name, _ in layer.named_parameters()]:
        parametrize.register_parametrization(layer, name, Split(), unsafe=True)
    assert next(layer.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("change", [weights_as_plain_tensors, weights_of_another_parameter])
@each_layer
def test_states_are_those_of_the_weights_that_calls_use(make, change):
    layer, x = make(), x_of()
    change(layer)
    stream = layer.stream(B)
    with torch.no_grad():
        expected, after = layer(x)
        torch.testing.assert_close(stream.states, layer(x[:0])[1])
    torch.testing.assert_close(steps(stream, x), expected)
    torch.testing.assert_close(stream.states, after)
    stream.states = stream.states
    assert all(state.dtype == torch.float32 for state in stream._states[0])
    stream.reset(torch.ones(B, dtype=torch.bool))
    torch.testing.assert_close(stream(x[0]), expected[0])


WRONG_WEIGHTS = {
    "bias_ih_l0": torch.zeros(4 * H, dtype=torch.float64),
    "bias_hh_l1": torch.zeros(4 * H, device="meta"),
    "weight_hh_l0": torch.zeros(4 * H, H + 1),
    "weight_ih_l0": torch.zeros(4 * H, F + 1),
    "weight_hh_l1": torch.zeros(4 * H, H, dtype=torch.float64),
    # PyTorch's operators would broadcast these.
    "bias_hh_l0 of one row": torch.zeros(1),
    "bias_ih_l1 of one row": torch.zeros(1),
    "weight_ih_l1 of one row": torch.zeros(1, H),
    "bias_ih_l0 of one column": torch.zeros(4 * H, 1),
}


@pytest.mark.parametrize(
    ("wrong", "kind"), each_value([*itertools.product(WRONG_WEIGHTS, ["LSTM", "Recurrent"])]), ids=str
)
def test_weights_that_do_not_fit_together_get_the_error_of_the_layer(kind, wrong):
    layer = gatewise.LSTM(F, H, 2) if kind == "LSTM" else gatewise.Recurrent(LSTM(), F, H, 2)
    stream, x = layer.stream(B), x_of()
    stream(x[0])
    name, _, _ = wrong.partition(" ")
    before, right = stream.states, getattr(layer, name)
    setattr(layer, name, torch.nn.Parameter(WRONG_WEIGHTS[wrong]))
    with pytest.raises((ShapeError, DtypeError, DeviceError)) as expected:
        layer(x[1:2])
    with pytest.raises(expected.type) as found:
        stream(x[1])
    assert str(found.value) == str(expected.value).replace("`input`", "`x`")
    setattr(layer, name, right)
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.zeros(H, dtype=torch.float64), torch.zeros(H, device="meta")], ids=str)
@pytest.mark.parametrize("calls_before", [0, 1])
def test_parameters_of_cells_that_do_not_fit_get_the_error_of_the_layer(calls_before, value):
    layer = gatewise.Recurrent(PeepholeLSTM(), F, H)
    stream, x = layer.stream(B), x_of()
    for step in x[:calls_before]:
        stream(step)
    before = stream.states
    layer.p_o_l0 = torch.nn.Parameter(value)
    with pytest.raises((DtypeError, DeviceError)) as expected:
        layer(x[1:2])
    with pytest.raises(expected.type) as found:
        stream(x[1])
    assert str(found.value) == str(expected.value)
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)


def test_an_error_of_a_step_whose_weights_fit_is_raised_as_it_is(monkeypatch):
    stream = gatewise.LSTM(F, H).stream(B)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("gatewise.nn.stream.one_step", fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        stream(x_of(B, F))


@pytest.mark.gpu
@each_layer
def test_steps_on_a_gpu_are_a_call(make):
    layer, x = make(device="cuda", dtype=torch.float64), x_of(dtype=torch.float64).cuda()
    stream = layer.stream(B)
    torch.testing.assert_close(steps(stream, x), outputs(layer, x))
    states = stream.states
    layer.cpu()
    torch.testing.assert_close(stream(x[0].cpu()), outputs(layer, x[:1].cpu(), on_cpu(states))[0])
    layer.cuda()
    stream(x[0])
    stream.reset(torch.tensor([True, False, True], device="cuda"))
    with pytest.raises(DeviceError, match="`rows` must be on cuda"):
        stream.reset(torch.tensor([True, False, True]))
    with pytest.raises(DeviceError, match="`x` must be on cuda"):
        stream(x[0].cpu())


def test_a_step_that_fails_leaves_the_states():
    layer, x = gatewise.LSTM(F, H), x_of()
    stream = layer.stream(B)
    steps(stream, x[:2])
    before = stream.states
    with pytest.raises(ShapeError):
        stream(x[2, :1])
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)


def test_a_cell_is_looked_up_in_every_call():
    layer = gatewise.Recurrent(LSTM(), F, H)
    stream, x = layer.stream(B), x_of()
    steps(stream, x)
    layer.zoneout = {"c": 0.4}
    stream.reset()
    torch.testing.assert_close(steps(stream, x), outputs(layer.eval(), x))


def test_weights_are_checked_again_when_their_shapes_change_in_place():
    layer, x = gatewise.LSTM(F, H), x_of()
    stream, whole = layer.stream(B), layer.bias_hh_l0.data
    stream(x[0])
    before = stream.states
    layer.bias_hh_l0.data = whole[:1]
    for _ in range(2):
        with pytest.raises(ShapeError, match=re.escape("`weights` must be shaped [32] in layer 0, got [1]")):
            stream(x[1])
    layer.bias_hh_l0.data = whole
    torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
    torch.testing.assert_close(stream(x[1]), outputs(layer, x[:2])[1])
