"""accelerate: the layers that it replaces, the attributes that it keeps, and its messages."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import gatewise
from gatewise.cells import CappedLSTM, CoupledLSTM
from gatewise.nn import (
    GRU,
    LSTM,
    RNN,
    GRUCell,
    LSTMCell,
    Recurrent,
    RNNCell,
    Swap,
    accelerate,
    planned_swaps,
    restore,
)
from tests.pairwise import each_value


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.encoder = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.stages = nn.ModuleList([nn.LSTM(8, 5, proj_size=3), nn.LSTM(3, 3)])
        self.also = self.stages[1]
        self.head = nn.Linear(3, 2)

    def forward(self, tokens):
        y, _ = self.encoder(self.embed(tokens))
        y = y.transpose(0, 1)
        for stage in self.stages:
            y, _ = stage(y)
        return self.head(self.also(y)[0])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger()


@pytest.fixture
def tokens():
    return torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))


def lstms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.LSTM | LSTM)]


def test_every_lstm_is_exchanged_and_results_stay(model, tokens):
    expected = model(tokens)
    assert accelerate(model) is model
    assert [type(module) for module in lstms(model)] == [LSTM] * 3
    torch.testing.assert_close(model(tokens), expected)


def test_is_the_public_function():
    assert gatewise.accelerate is accelerate


def test_a_shared_layer_stays_shared(model):
    accelerate(model)
    assert model.also is model.stages[1]


def test_parameters_are_the_very_same_objects_in_the_same_order(model):
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    state = copy.deepcopy(model.state_dict())
    accelerate(model)
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_an_optimizer_made_before_trains_it(model, tokens):
    twin = copy.deepcopy(model)
    losses = []
    for network, convert in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
        if convert:
            accelerate(network)
        for _ in range(5):
            optimizer.zero_grad()
            loss = network(tokens).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)


def test_a_model_that_is_an_lstm_stays_the_same_object():
    layer = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    expected = layer(x)
    assert accelerate(layer) is layer
    assert type(layer) is LSTM
    torch.testing.assert_close(layer(x), expected)


def test_the_layers_stay_the_same_objects_with_the_same_attributes(model):
    before = lstms(model)
    attributes = [dict(vars(layer)) for layer in before]
    accelerate(model)
    for layer, one, kept in zip(before, lstms(model), attributes, strict=True):
        assert layer is one
        assert {**vars(layer)} == {**kept, "_accelerated": True}
        assert all(vars(layer)[name] is value for name, value in kept.items())


def test_again_changes_nothing(model):
    accelerate(model)
    before = lstms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerate(model) is model
    assert all(a is b for a, b in zip(lstms(model), before, strict=True))
    layer = LSTM(3, 4)
    assert accelerate(layer) is layer


def test_a_parametrized_layer_that_ran_before_can_be_copied_and_keeps_no_graph():
    layer, x = nn.LSTM(3, 4), torch.randn(2, 2, 3)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    expected, _ = layer(x)
    accelerate(layer)
    assert all(weight.grad_fn is None for weight in layer._flat_weights)
    torch.testing.assert_close(copy.deepcopy(layer)(x)[0], expected)


@pytest.mark.parametrize("training", [True, False])
def test_options_training_flag_and_frozen_weights_stay(training):
    layer = nn.LSTM(3, 4, 2, bias=False, batch_first=True, dropout=0.25, bidirectional=True, proj_size=2)
    layer.train(training)
    layer.weight_hh_l1.requires_grad_(False)
    layer.note = "kept"
    before = repr(layer)
    found = accelerate(nn.Sequential(layer))[0]
    assert repr(found) == before
    assert found.training is training
    assert found.kernel == "auto"
    assert found.note == "kept"
    assert not found.weight_hh_l1.requires_grad
    assert found.weight_hh_l0.requires_grad


def test_hooks_stay_and_their_handles_still_remove_them():
    layer = nn.LSTM(3, 4)
    seen = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append(("before", type(module)))),
        layer.register_forward_hook(
            lambda module, args, kwargs, y: seen.append(("after", type(module))), with_kwargs=True
        ),
        layer.register_full_backward_hook(lambda module, dx, dy: seen.append(("backward", type(module)))),
        layer.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(("save", type(module)))),
        layer.register_load_state_dict_pre_hook(lambda module, *rest: seen.append(("load", type(module)))),
    ]
    model = nn.Sequential(layer)
    del layer
    accelerate(model)
    x = torch.randn(5, 2, 3, requires_grad=True)

    def exercise():
        model[0](x)[0].sum().backward()
        model.load_state_dict(model.state_dict())

    exercise()
    assert seen == [(name, LSTM) for name in ("before", "after", "backward", "save", "load")]
    for handle in handles:
        handle.remove()
    exercise()
    assert len(seen) == 5


class Custom(nn.LSTM):
    def forward(self, x, hx=None):
        return nn.LSTM.forward(self, 2 * x, hx)


class Checking(nn.LSTM):
    def check_input(self, input, batch_sizes):
        pass


class WithProperty(nn.GRU):
    @property
    def kernel(self):
        raise RuntimeError("is not read")


class Registered(nn.LSTM):
    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)


class Base(nn.RNNBase):
    def __init__(self):
        super().__init__("LSTM", 3, 4)

    def forward(self, x):
        return x


def left_alone():
    patched = nn.LSTM(3, 4)
    patched.forward = lambda x, hx=None: (x, None)
    parametrised = Custom(3, 4)
    parametrizations.weight_norm(parametrised, "weight_hh_l0")
    script = next(torch.jit.script(nn.Sequential(nn.LSTM(3, 4))).children())
    return {
        "subclass": (
            Custom(3, 4),
            "is a subclass, Custom, with a forward of its own that does not call super().forward; "
            "derive it from gatewise.LSTM and call super().forward",
        ),
        "parametrised": (parametrised, "is a subclass, ParametrizedCustom, with a forward of its own"),
        "checks": (Checking(3, 4), "is a subclass, Checking, with its own check_input, which would not be called"),
        "patched": (patched, "has a forward of its own"),
        "complex": (nn.LSTM(3, 4, dtype=torch.complex64), "has complex weights, for which gatewise has no kernels"),
        "script": (script, "is TorchScript; accelerate the model before torch.jit.script"),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("case", ["subclass", "parametrised", "checks", "patched", "complex", "script"])
def test_what_is_left_alone_is_said_once_with_its_reason(case):
    layer, reason = left_alone()[case]
    model = nn.ModuleDict({"odd": layer, "odd_again": layer, "plain": nn.LSTM(3, 4)})
    with pytest.warns(UserWarning, match="leaves torch.nn.LSTM unchanged") as caught:
        accelerate(model)
    assert len(caught) == 1
    assert f"odd, odd_again: stays: it {reason}" in str(caught[0].message)
    assert "plain" not in str(caught[0].message)
    assert caught[0].filename == __file__
    assert model["odd"] is layer
    assert type(model["plain"]) is LSTM


def with_buffer():
    layer = nn.RNN(3, 4)
    layer.register_buffer("memory", torch.zeros(4))
    layer.weight_dropout = 0.5
    return layer


def with_module():
    layer = nn.GRU(3, 4)
    layer.stream = nn.Linear(3, 3)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_module, "has a module, parameter or buffer named stream, which is a method of gatewise's layers"),
        (lambda: WithProperty(3, 4), "has attributes of its own named kernel, which is an option of gatewise's layers"),
        (with_buffer, "has attributes of its own named memory and weight_dropout, which are options of gatewise's"),
    ],
)
def test_attributes_that_are_named_as_options_are_left_alone(make, reason):
    layer = make()
    kind = type(layer)
    with pytest.warns(UserWarning, match="leaves") as caught:
        accelerate(layer)
    assert f"stays: it {reason}" in str(caught[0].message)
    assert type(layer) is kind


def test_a_cell_may_have_attributes_that_are_options_of_layers_only():
    cell = nn.GRUCell(3, 4)
    cell.memory = "its own"
    cell.stream = nn.Linear(3, 3)
    assert type(accelerate(cell, verbose=False)) is GRUCell


def test_options_that_were_set_stay_with_a_layer_that_is_restored():
    layer = accelerate(nn.LSTM(3, 4), verbose=False)
    layer.kernel = "eager"
    assert type(restore(layer, verbose=False)) is nn.LSTM
    assert accelerate(layer, verbose=False).kernel == "eager"
    assert type(layer) is LSTM


def test_a_class_that_cannot_be_derived_from_is_left_alone_and_the_others_change():
    model = nn.Sequential(nn.LSTM(3, 4), Registered(3, 4), nn.GRU(3, 4))
    with pytest.warns(UserWarning, match=r"1: stays: it is a subclass, Registered, that cannot be derived from: .*key"):
        accelerate(model, verbose=False)
    assert [type(layer) for layer in model] == [LSTM, Registered, GRU]


def test_a_class_of_a_program_is_freed_with_the_one_made_for_it():
    class Local(nn.LSTM):
        pass

    layer, other = accelerate(Local(3, 4), verbose=False), accelerate(Local(3, 4), verbose=False)
    assert type(layer) is type(other)
    freed = weakref.ref(Local)
    del layer, other, Local
    gc.collect()
    assert freed() is None


def test_a_root_that_is_left_alone_is_returned():
    layer = Custom(3, 4)
    with pytest.warns(UserWarning, match="the model itself: stays: it is a subclass, Custom"):
        assert accelerate(layer) is layer


def test_plan_changes_nothing_and_lists_everything(model):
    model.custom = Custom(3, 4)
    plan = planned_swaps(model)
    assert [type(module) for module in lstms(model)] == [nn.LSTM] * 3 + [Custom]
    assert plan[0] == Swap(("encoder",), model.encoder)
    assert [swap.names for swap in plan] == [("encoder",), ("stages.0",), ("stages.1", "also"), ("custom",)]
    assert [bool(swap.obstacle) for swap in plan] == [False, False, False, True]
    assert str(plan[2]) == "stages.1, also: becomes gatewise.LSTM"


def test_the_result_copies_and_pickles(model, tokens):
    accelerate(model)
    expected = model(tokens)
    torch.testing.assert_close(copy.deepcopy(model)(tokens), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(tokens), expected)


def test_a_model_without_lstm_is_returned_unchanged():
    model = nn.Sequential(nn.Linear(3, 4), nn.RNN(4, 4))
    assert accelerate(model) is model
    assert planned_swaps(model) == ()


def test_meta_model():
    model = accelerate(nn.Sequential(nn.LSTM(3, 4, device="meta")))
    assert type(model[0]) is LSTM
    assert model[0].weight_ih_l0.is_meta


def test_something_else_than_a_module_is_refused():
    with pytest.raises(gatewise.ArgumentError, match=r"`model` must be a torch\.nn\.Module, got list\. Give the model"):
        accelerate([nn.LSTM(3, 4)])


def test_what_was_exchanged_and_what_was_left_is_printed(model, capsys):
    model.custom = Custom(3, 4)
    with pytest.warns(UserWarning, match="custom"):
        accelerate(model)
    assert capsys.readouterr().out.splitlines() == [
        "accelerate: 3 of 4 torch.nn.LSTM replaced",
        "  encoder: becomes gatewise.LSTM",
        "  stages.0: becomes gatewise.LSTM",
        "  stages.1, also: becomes gatewise.LSTM",
        "  custom: stays: it is a subclass, Custom, with a forward of its own that does",
        "    not call super().forward; derive it from gatewise.LSTM and call",
        "    super().forward",
    ]


def test_that_nothing_was_exchanged_is_printed_too(model, capsys):
    accelerate(model)
    capsys.readouterr()
    accelerate(model)
    assert capsys.readouterr().out.splitlines() == [
        "accelerate: no torch.nn.LSTM, GRU or RNN to replace",
        "  encoder: is gatewise.LSTM already",
        "  stages.0: is gatewise.LSTM already",
        "  stages.1, also: is gatewise.LSTM already",
    ]
    accelerate(nn.Linear(3, 4))
    assert capsys.readouterr().out == "accelerate: no torch.nn.LSTM, GRU or RNN to replace\n"


def test_it_can_be_silent_but_not_about_what_it_left(model, capsys):
    model.custom = Custom(3, 4)
    with pytest.warns(UserWarning, match="custom"):
        accelerate(model, verbose=False)
    assert capsys.readouterr().out == ""


class Mixed(nn.Module):
    """One layer of each class."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 4, num_layers=2, bidirectional=True, dropout=0.5)
        self.also = self.gru
        self.lstm = nn.LSTM(8, 4)
        self.rnn = nn.RNN(4, 4, nonlinearity="relu")
        self.gru_cell, self.lstm_cell = nn.GRUCell(4, 4), nn.LSTMCell(4, 4)
        self.rnn_cell = nn.RNNCell(4, 4, nonlinearity="relu")

    def forward(self, x):
        y, h = self.gru(x)
        z, _ = self.rnn(self.lstm(y)[0])
        return self.lstm_cell(self.rnn_cell(self.gru_cell(z[-1], h[0])))


def test_all_layers_and_cells_are_exchanged_and_results_stay(capsys):
    model, x = Mixed().eval(), torch.randn(5, 3, 6)
    model.gru.weight_ih_l0.requires_grad_(False)
    expected, parameters, state = model(x), list(model.parameters()), model.state_dict()
    assert accelerate(model) is model
    parts = model.gru, model.lstm, model.rnn, model.gru_cell, model.lstm_cell, model.rnn_cell
    assert [type(part) for part in parts] == [GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell]
    assert model.also is model.gru
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == state.keys()
    assert (model.gru.dropout, model.gru.training, model.gru.kernel) == (0.5, False, "auto")
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    printed = capsys.readouterr().out.splitlines()
    names = ("GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell")
    assert printed[0] == f"accelerate: {', '.join(f'1 of 1 torch.nn.{name}' for name in names)} replaced"
    assert printed[1] == "  gru, also: becomes gatewise.GRU"
    assert planned_swaps(model) == ()
    assert (model.rnn.nonlinearity, model.rnn.mode, model.rnn_cell.nonlinearity) == ("relu", "RNN_RELU", "relu")
    assert gatewise.explain(model.rnn, (5, 3, 4)).problem.cell.name == "rnn_relu"


def test_state_dicts_of_other_layers_load_both_ways():
    theirs, other = Mixed().eval(), Mixed().eval()
    ours, x = accelerate(Mixed(), verbose=False).eval(), torch.randn(5, 3, 6)
    ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(other(x), theirs(x))


def test_an_exchanged_gru_trains_moves_and_follows_its_parameters():
    model, x = nn.Sequential(nn.GRU(3, 4)), torch.randn(5, 2, 3)
    accelerate(model, verbose=False)
    model.double()
    model(x.double())[0].sum().backward()
    assert all(weight.grad.dtype == torch.float64 for weight in model.parameters())
    model[0].weight_hh_l0 = nn.Parameter(torch.zeros(12, 4).double())
    twin = nn.GRU(3, 4).double()
    twin.load_state_dict(model[0].state_dict())
    torch.testing.assert_close(model(x.double()), twin(x.double()))


def test_cells_and_layers_of_other_classes_are_reported_too(capsys):
    model = nn.ModuleDict({"cell": nn.GRUCell(3, 4), "base": Base(), "ours": gatewise.Recurrent(CappedLSTM(), 3, 4)})
    with pytest.warns(UserWarning, match="base: stays: it is a subclass, Base, with a forward of its own"):
        accelerate(model)
    assert capsys.readouterr().out.splitlines() == [
        "accelerate: 1 of 1 torch.nn.GRUCell, 0 of 1 torch.nn.RNNBase replaced",
        "  cell: becomes gatewise.GRUCell, whose single steps PyTorch's own operator",
        "    computes as before",
        "  base: stays: it is a subclass, Base, with a forward of its own",
        "  ours: is gatewise.Recurrent already",
    ]


class Counting(nn.GRU):
    """A subclass without a forward of its own."""

    def __init__(self, size):
        super().__init__(size, size)
        self.calls = 0

    def __call__(self, *given):
        self.calls += 1
        return super().__call__(*given)


def test_a_subclass_without_its_own_forward_keeps_its_class_and_methods(capsys):
    layer, x = Counting(3), torch.randn(5, 2, 3)
    expected = layer(x)
    accelerate(layer, verbose=False)
    assert isinstance(layer, Counting)
    assert isinstance(layer, GRU)
    accelerate(layer)
    assert "the model itself: is gatewise.GRU already" in capsys.readouterr().out
    assert type(layer).__name__ == "Counting"
    torch.testing.assert_close(layer(x, None), expected)
    assert gatewise.verify(layer, x).layers[0].decision.chosen == "aten"
    assert layer.calls == 3
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert other.calls == 3
        torch.testing.assert_close(other(x), expected)


class OfAnyLength(nn.RNNBase):
    """What a program's layers share, with an argument that PyTorch's have not got."""

    def forward(self, x, hx=None, lengths=None):
        y, state = super().forward(x, hx=hx)
        return y if lengths is None else y * (torch.arange(len(y))[:, None] < lengths)[..., None], state


class LSTMOfAnyLength(OfAnyLength, nn.LSTM):
    pass


def decorated(function):
    @functools.wraps(function)
    def called(*given, **options):
        return function(*given, **options)

    return called


class Halved(LSTMOfAnyLength):
    @decorated
    def forward(self, x, hx=None, lengths=None):
        return super(Halved, self).forward(x / 2, hx, lengths=lengths)  # noqa: UP008 - as older programs say it


@pytest.mark.parametrize("kind", [LSTMOfAnyLength, Halved])
def test_super_in_a_subclass_with_its_own_forward_calls_gatewise(kind, monkeypatch):
    layer, x, lengths = kind(3, 4), torch.randn(5, 2, 3), torch.tensor([5, 2])
    expected = layer(x, lengths=lengths)
    accelerate(layer, verbose=False)
    forward, calls = LSTM.forward, []
    monkeypatch.setattr(LSTM, "forward", lambda *given, **options: calls.append(1) or forward(*given, **options))
    torch.testing.assert_close(layer(x, lengths=lengths), expected)
    assert len(calls) == 1
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x, lengths=lengths), expected)
    assert len(calls) == 3
    restore(layer, verbose=False)
    torch.testing.assert_close(layer(x, lengths=lengths), expected)
    assert len(calls) == 3


class Skipping(Custom):
    """A subclass whose `forward` calls one that does not call PyTorch's by `super`."""

    def forward(self, x, hx=None):
        return super().forward(x, hx)


def test_a_subclass_of_one_that_does_not_call_super_is_left_alone():
    with pytest.warns(UserWarning, match="Skipping, with a forward of its own that does not call super"):
        accelerate(Skipping(3, 4), verbose=False)


class ByReduce(nn.GRU):
    """A subclass that says itself how it is made again, without its attributes."""

    def __reduce__(self):
        return made_with_weights, (type(self), self.input_size, self.hidden_size, self.state_dict())


def made_with_weights(kind, input_size, hidden_size, state):
    layer = kind(input_size, hidden_size)
    layer.load_state_dict(state)
    return layer


class ByItsClass(nn.GRU):
    def __reduce__(self):
        return ByItsClass, (self.input_size, self.hidden_size), self.__getstate__()


class ByClassMethod(nn.GRU):
    @classmethod
    def made(cls, *sizes):
        return cls(*sizes)

    def __reduce__(self):
        return type(self).made, (self.input_size, self.hidden_size), self.__getstate__()


class ByKeywords(nn.GRU):
    def __new__(cls, *given, label):
        made = super().__new__(cls)
        made.label = label
        return made

    def __init__(self, *given, label="mine"):
        super().__init__(*given)

    def __getnewargs_ex__(self):
        return (), {"label": "mine"}


class ByArguments(nn.GRU):
    def __new__(cls, *given):
        if not given:
            raise TypeError("a size must be given")
        return super().__new__(cls)

    def __getnewargs__(self):
        return (self.input_size,)


def made_again(*sizes):
    return ByFunction(*sizes)


class ByFunction(nn.LSTM):
    def __reduce__(self):
        return made_again, (self.input_size, self.hidden_size), self.__getstate__()


class ByPartial(nn.GRU):
    def __reduce__(self):
        return functools.partial(ByPartial, self.input_size, hidden_size=self.hidden_size), (), self.__getstate__()


class ByPartialOfMethod(ByClassMethod):
    def __reduce__(self):
        return functools.partial(type(self).made, self.input_size), (self.hidden_size,), self.__getstate__()


class ByNestedTuples(nn.GRU):
    def __reduce__(self):
        return made_of, ((type(self), (self.input_size, self.hidden_size)),), self.__getstate__()


def made_of(plan):
    kind, sizes = plan
    return kind(*sizes)


BY_REDUCE = [ByReduce, ByItsClass, ByClassMethod, ByFunction, ByPartial, ByPartialOfMethod, ByNestedTuples]


@pytest.mark.parametrize(
    ("copied", "kind"),
    each_value(
        [
            *itertools.product(
                [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], [*BY_REDUCE, ByKeywords, ByArguments]
            )
        ]
    ),
)
def test_a_subclass_that_says_how_it_is_pickled(kind, copied):
    layer, x = kind(3, 4, **({"label": "mine"} if kind is ByKeywords else {})), torch.randn(5, 2, 3)
    expected = layer(x)
    accelerate(layer, verbose=False)
    other = copied(layer)
    assert type(other) is type(layer)
    torch.testing.assert_close(other(x), expected)
    assert getattr(other, "label", "mine") == "mine"
    restore(other, verbose=False)
    assert type(other) is kind
    torch.testing.assert_close(copied(other)(x), expected)


class WithClones(nn.LSTM):
    def clone(self):
        return type(self)(self.input_size, self.hidden_size)


def test_what_an_accelerated_module_makes_of_its_class_is_restored():
    layer = accelerate(WithClones(3, 4), verbose=False)
    model = nn.Sequential(layer, layer.clone())
    restore(model, verbose=False)
    assert [type(each) for each in model] == [WithClones, WithClones]


class Doubled(nn.LSTM):
    def forward(self, x, hx=None):
        y, state = super().forward(x, hx)
        return 2 * y, state


def test_an_accelerated_subclass_is_traced():
    model, x = nn.Sequential(Doubled(3, 4)), torch.randn(5, 2, 3)
    expected = model(x)[0]
    traced = torch.jit.trace(accelerate(model, verbose=False), (x,))
    torch.testing.assert_close(traced(x)[0], expected)
    assert traced(torch.randn(7, 3, 3))[0].shape == (7, 3, 4)


def test_parametrizations_stay_and_can_be_removed():
    layer, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    expected = layer(x)
    accelerate(layer, verbose=False)
    assert isinstance(layer, LSTM)
    assert parametrize.is_parametrized(layer, "weight_hh_l0")
    torch.testing.assert_close(layer(x), expected)
    layer(x)[0].sum().backward()
    assert layer.parametrizations.weight_hh_l0.original0.grad is not None
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is LSTM
    torch.testing.assert_close(layer(x), expected)
    assert type(restore(layer, verbose=False)) is nn.LSTM


def test_parametrizations_of_a_copy_are_its_own():
    layer = nn.LSTM(3, 4)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    other = copy.deepcopy(layer)
    accelerate(layer, verbose=False)
    assert not isinstance(other, LSTM)
    parametrizations.weight_norm(layer, "weight_ih_l0")
    assert parametrize.is_parametrized(other, "weight_hh_l0")
    assert not parametrize.is_parametrized(other, "weight_ih_l0")


def test_a_compiled_layer_calls_gatewise():
    torch.compiler.reset()
    layer, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    graphs = []
    layer.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    expected = layer(x)
    assert not graphs
    accelerate(layer, verbose=False)
    torch.testing.assert_close(layer(x), expected)
    assert "gatewise" in graphs[0].print_readable(print_output=False)
    torch.compiler.reset()


@pytest.mark.parametrize("change", ["plain", "copied", "saved"])
def test_restore_undoes_it(model, tokens, change, capsys):
    expected = model(tokens)
    accelerate(model, verbose=False)
    if change == "copied":
        model = copy.deepcopy(model)
    if change == "saved":
        model = pickle.loads(pickle.dumps(model))
    layers, state = lstms(model), [dict(vars(layer)) for layer in lstms(model)]
    assert restore(model) is model
    for layer, one, kept in zip(layers, lstms(model), state, strict=True):
        assert layer is one
        assert type(layer) is nn.LSTM
        del kept["_accelerated"]
        assert vars(layer) == kept
        assert all(vars(layer)[name] is value for name, value in kept.items())
    torch.testing.assert_close(model(tokens), expected)
    assert capsys.readouterr().out.splitlines() == [
        "restore: 3 of 3 layers of gatewise restored",
        "  encoder: becomes torch.nn.LSTM again",
        "  stages.0: becomes torch.nn.LSTM again",
        "  stages.1, also: becomes torch.nn.LSTM again",
    ]


def test_restore_brings_back_subclasses_cells_and_parametrizations():
    parametrised = nn.GRU(3, 4)
    parametrizations.weight_norm(parametrised, "weight_hh_l0")
    model = nn.ModuleList([Counting(3), nn.LSTMCell(3, 4), nn.RNN(3, 4), parametrised])
    accelerate(model, verbose=False)
    restore(model, verbose=False)
    assert [type(part) for part in model[:3]] == [Counting, nn.LSTMCell, nn.RNN]
    assert type(parametrised).__bases__ == (nn.GRU,)
    parametrised(torch.randn(5, 2, 3))
    parametrize.remove_parametrizations(parametrised, "weight_hh_l0")
    assert type(parametrised) is nn.GRU


class Derived(LSTM):
    pass


def test_restore_says_why_it_leaves_layers(capsys):
    model = nn.ModuleList([Derived(3, 4), nn.LSTM(3, 4), nn.LSTM(3, 4), nn.GRU(3, 4), Recurrent(CoupledLSTM(), 3, 4)])
    accelerate(model, verbose=False)
    model[1].weight_dropout = 0.5
    model[2].__class__ = type("Sharded", (LSTM,), {})  # as fully_shard does
    with pytest.warns(UserWarning, match="restore leaves layers unchanged:") as caught:
        restore(model)
    left = [
        "  0: stays: its class, Derived, derives from gatewise.LSTM; derive it from torch.nn.LSTM and call accelerate",
        "  1: stays: it has the option weight_dropout, which torch.nn does not have",
        "  2: stays: its class, Sharded, was made after accelerate",
        "  4: stays: it is a gatewise.Recurrent, which torch.nn does not have",
    ]
    assert str(caught[0].message).splitlines()[1:] == left
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["restore: 1 of 5 layers of gatewise restored", "  3: becomes torch.nn.GRU again"]
    assert [type(part).__name__ for part in model] == ["Derived", "LSTM", "Sharded", "GRU", "Recurrent"]
    assert isinstance(model[1], LSTM)
    with pytest.raises(gatewise.ArgumentError, match=r"`model` must be a torch\.nn\.Module, got list"):
        restore([nn.LSTM(3, 4)])


@pytest.mark.parametrize("parametrised", [False, True])
@pytest.mark.parametrize("kind", [LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell])
def test_layers_of_gatewise_become_those_of_pytorch_and_keep_their_options(kind, parametrised, capsys):
    model, x = nn.Sequential(kind(3, 4)), torch.randn(5, 3)
    layer = model[0]
    if not issubclass(kind, nn.RNNCellBase):
        layer.kernel = "eager"
    if parametrised:
        parametrizations.weight_norm(layer, next(name for name, _ in layer.named_parameters() if "hh" in name))
    expected, weights, theirs = model(x), list(model.parameters()), getattr(nn, kind.__name__)
    assert restore(model) is model
    name = kind.__name__
    assert capsys.readouterr().out.splitlines()[1:] == [f"  0: becomes torch.nn.{name}"]
    assert model[0] is layer
    assert isinstance(layer, theirs)
    assert not isinstance(layer, kind)
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    torch.testing.assert_close(model(x), expected)
    accelerate(model, verbose=False)
    assert isinstance(layer, kind)
    assert issubclass(kind, nn.RNNCellBase) or layer.kernel == "eager"


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("others", [set(), {nn.Linear}])
def test_a_restored_model_is_quantized(accelerated, others):
    torch.manual_seed(0)
    kinds = (nn.LSTM, nn.GRU) if accelerated else (LSTM, GRU)
    model = nn.ModuleDict({"lstm": kinds[0](3, 8), "gru": kinds[1](3, 8), "linear": nn.Linear(8, 2)})
    if accelerated:
        accelerate(model, verbose=False)
    x = torch.randn(5, 2, 3)
    expected = model["lstm"](x)[0]
    spec = {nn.LSTM, nn.GRU, *others}
    with warnings.catch_warnings(action="ignore"):  # of PyTorch, that torch.ao moves
        quantized = torch.ao.quantization.quantize_dynamic(restore(model, verbose=False), spec)
    kinds = [type(quantized[name]).__module__ for name in ("lstm", "gru", "linear")]
    assert all("quantized.dynamic" in kind for kind in kinds[: 2 + len(others)])
    torch.testing.assert_close(quantized["lstm"](x)[0], expected, rtol=0.1, atol=0.05)
