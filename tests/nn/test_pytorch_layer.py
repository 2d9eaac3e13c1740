"""The layers are those of PyTorch for programs that look at the class, derive from it, or use and assign attributes."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import get_args, get_overloads, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import gatewise
from tests.pairwise import each_value

LAYERS = {
    "LSTM": (nn.LSTM, gatewise.LSTM, {}),
    "projected LSTM": (nn.LSTM, gatewise.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, gatewise.GRU, {}),
    "RNN": (nn.RNN, gatewise.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "LSTMCell": (nn.LSTMCell, gatewise.LSTMCell, {}),
    "GRUCell": (nn.GRUCell, gatewise.GRUCell, {}),
    "RNNCell": (nn.RNNCell, gatewise.RNNCell, {"nonlinearity": "relu"}),
}
FORM = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.25}
X = torch.linspace(-1, 1, 60).view(5, 4, 3)


def twins(name: str, **form):
    kind, ours, options = (LAYERS | CELLS)[name]
    made = []
    for each in (kind, ours):
        torch.manual_seed(0)
        made.append(each(3, 4, **options, **form))
    return made


def same(found, expected) -> None:
    """Check that two attributes have equal values."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        same([*found.values()], [*expected.values()])
    else:
        assert found == expected


@pytest.mark.parametrize("name", LAYERS | CELLS)
def test_they_are_instances_of_the_classes_of_pytorch(name):
    theirs, ours = twins(name)
    base = nn.RNNCellBase if name in CELLS else nn.RNNBase
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, base)


@pytest.mark.parametrize(
    ("form", "name"), each_value([*itertools.product([{}, FORM, {"bias": False}], LAYERS | CELLS)]), ids=str
)
def test_every_attribute_of_pytorchs_layer_has_its_value(name, form):
    if name in CELLS:
        form = {key: value for key, value in form.items() if key == "bias"}
    theirs, ours = twins(name, **form)
    compared = 0
    for attribute in dir(theirs):
        expected, found = getattr(theirs, attribute), getattr(ours, attribute)
        if attribute == "_flat_weight_refs":
            referred = [id(reference()) for reference in found]
            assert referred == [*map(id, ours.parameters())]
        elif callable(expected):
            assert callable(found)
        elif not attribute.startswith("__"):
            same(found, expected)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", *CELLS])
def test_sizes_may_be_integers_of_numpy(name):
    sizes = np.array([3, 4])
    options = {} if name in CELLS else {"num_layers": np.int64(2)}
    options |= {"proj_size": np.int8(2)} if name == "LSTM" else {}
    layer = getattr(gatewise, name)(*sizes, **options)
    plain = getattr(nn, name)(3, 4, **{option: int(value) for option, value in options.items()})
    assert repr(layer) == repr(plain)
    plain.load_state_dict(layer.state_dict())
    x = X[0] if name in CELLS else X
    same(layer(x), plain(x))


def test_numbers_of_blocks_and_sequences_may_be_integers_of_numpy():
    cell = gatewise.cells.SLSTM()
    for options in ({"heads": np.int64(2)}, {"recurrent_rank": np.int8(3)}):
        layer, one_step = gatewise.Recurrent(cell, 3, 4, **options), gatewise.RecurrentCell(cell, 3, 4, **options)
        plain = gatewise.Recurrent(cell, 3, 4, **{option: int(value) for option, value in options.items()})
        assert repr(layer) == repr(plain)
        assert [type(each) for each in (layer.heads, one_step.heads, one_step.recurrent_rank)] == [int, int, int]
    stream = gatewise.LSTM(3, 4).stream(np.int64(2))
    assert type(stream.batch) is int
    assert stream(torch.zeros(2, 3)).shape == (2, 4)


@pytest.mark.parametrize("name", LAYERS)
def test_the_methods_of_pytorchs_layer_work(name):
    theirs, ours = twins(name, **FORM)
    packed = pack_padded_sequence(X, torch.tensor([4, 3, 2, 2, 1]), batch_first=True)
    state = torch.randn(theirs.get_expected_hidden_size(X, None)), torch.randn(4, 5, 4)
    order = torch.tensor([4, 2, 3, 0, 1])
    hidden = state if isinstance(theirs, nn.LSTM) else state[0]
    for layer in (theirs, ours):
        layer.check_input(X, None)
        layer.check_input(packed.data, packed.batch_sizes)
        layer.check_forward_args(X, hidden, None)
        layer.check_hidden_size(state[0], layer.get_expected_hidden_size(packed.data, packed.batch_sizes))
        layer.flatten_parameters()
        with pytest.raises(RuntimeError, match=r"must be equal to input_size\. Expected 3, got 2"):
            layer.check_input(X[..., :2], None)
    if isinstance(theirs, nn.LSTM):
        assert ours.get_expected_cell_size(X, None) == theirs.get_expected_cell_size(X, None)
    same(ours.permute_hidden(hidden, order), theirs.permute_hidden(hidden, order))
    assert ours.extra_repr().removesuffix(", nonlinearity=relu") == theirs.extra_repr()
    for layer in (theirs, ours):
        torch.manual_seed(1)
        layer.reset_parameters()
    same([*ours.parameters()], [*theirs.parameters()])
    same(ours.eval()(X), theirs.eval()(X))


def replace_by_name(layer):
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * -2)


def replace_in_the_dictionary(layer):
    layer._parameters["weight_hh_l0"] = nn.Parameter(layer.weight_hh_l0.detach() * -2)


def replace_by_a_computed_tensor(layer):
    weight = layer.weight_hh_l0
    del layer.weight_hh_l0
    layer.weight_hh_l0_raw = nn.Parameter(weight.detach())
    layer.weight_hh_l0 = layer.weight_hh_l0_raw * -2


def replace_one_listed_tensor(layer):
    layer._flat_weights[1] = layer._flat_weights[1].detach() * -2


def replace_the_list(layer):
    layer._flat_weights = [weight.detach() * -2 for weight in layer._flat_weights]


def replace_the_list_and_a_name(layer):
    replace_the_list(layer)
    replace_by_name(layer)


def delete_a_name(layer):
    del layer.weight_hh_l0  # PyTorch's layer goes on with the tensor in its list


def replace_by_a_buffer(layer):
    weight = layer.weight_hh_l0.detach() * -2
    del layer.weight_hh_l0
    layer.register_buffer("weight_hh_l0", weight)


def load_by_assignment(layer):
    layer.load_state_dict({name: value * -2 for name, value in layer.state_dict().items()}, assign=True)


CHANGES = [
    replace_by_name,
    replace_in_the_dictionary,
    replace_by_a_computed_tensor,
    replace_one_listed_tensor,
    replace_the_list,
    replace_the_list_and_a_name,
    delete_a_name,
    replace_by_a_buffer,
    load_by_assignment,
]


@pytest.mark.parametrize(("change", "name"), each_value([*itertools.product(CHANGES, LAYERS)]))
def test_weights_that_a_program_assigns_are_used_and_shown(name, change):
    theirs, ours = twins(name)
    before = ours(X)
    for layer in (theirs, ours):
        change(layer)
    found, expected = ours(X), theirs(X)
    same(found, expected)
    same([*ours._flat_weights], [*theirs._flat_weights])
    if change is not delete_a_name:
        assert not torch.equal(found[0], before[0])
        same(ours.all_weights, theirs.all_weights)


@pytest.mark.parametrize("change", [replace_by_name, replace_by_a_computed_tensor, load_by_assignment])
@pytest.mark.parametrize("name", LAYERS)
def test_listed_tensors_that_a_program_assigns_are_used_after_a_call_with_replaced_weights(name, change):
    theirs, ours = twins(name)
    for layer in (theirs, ours):
        change(layer)
    before = ours(X)
    same(before, theirs(X))
    for layer in (theirs, ours):
        replace_the_list(layer)
    found = ours(X)
    same(found, theirs(X))
    assert not torch.equal(found[0], before[0])


def test_references_that_a_conversion_has_left_out_keep_no_weight():
    _, ours = twins("LSTM")
    before = ours(X)
    ours._flat_weight_refs = []  # as after a conversion that failed midway
    replace_in_the_dictionary(ours)
    assert not torch.equal(ours(X)[0], before[0])


# A compiled call finds its weights as the call above does, with each change.
COMPILED = {replace_in_the_dictionary, replace_by_a_computed_tensor}


@pytest.mark.parametrize(
    "change",
    [change if change in COMPILED else pytest.param(change, marks=pytest.mark.exhaustive) for change in CHANGES],
)
def test_a_compiled_call_uses_them_too(change):
    torch.compiler.reset()
    theirs, ours = twins("GRU")
    for layer in (theirs, ours):
        change(layer)
    same(torch.compile(ours, backend="eager", fullgraph=True)(X), theirs(X))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("LSTM", "batch_first", False),
        ("LSTM", "dropout", 0.0),
        ("GRU", "batch_first", False),
        ("GRU", "dropout", 0.0),
        ("RNN", "mode", "RNN_TANH"),
    ],
)
def test_options_that_a_program_assigns_act(name, attribute, value):
    theirs, ours = twins(name, **FORM)
    before = ours.eval()(X)[1]
    for layer in (theirs, ours):
        layer.train(attribute == "dropout")
        setattr(layer, attribute, value)
    found = ours(X)
    same(found, theirs(X))
    assert attribute == "dropout" or not torch.equal(found[1][0].reshape(-1), before[0].reshape(-1))


@pytest.mark.parametrize(("attribute", "value"), [("num_layers", 1), ("bidirectional", False), ("bias", False)])
def test_sizes_that_no_longer_fit_the_weights_are_an_error_as_in_pytorch(attribute, value):
    for layer in twins("GRU", **FORM):
        setattr(layer, attribute, value)
        with pytest.raises(RuntimeError):
            layer(X)


def test_computed_weights_of_a_call_are_not_kept():
    _, ours = twins("LSTM")
    parametrizations.weight_norm(ours, "weight_hh_l0")
    for layer in (ours, ours.double()):
        layer(X.to(layer.bias_hh_l0.dtype))
        assert all(weight.is_leaf for weight in layer._flat_weights)
        copied = copy.deepcopy(layer)
        same(copied(X.double().to(layer.bias_hh_l0.dtype)), layer(X.to(layer.bias_hh_l0.dtype)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_replica_of_data_parallel_uses_the_weights_of_its_device(name):
    _, ours = twins(name)
    replica = ours._replicate_for_data_parallel()
    copies = [weight.detach() * -2 for weight in ours.parameters()]
    replica._parameters = {}
    for weight, copied in zip(ours._flat_weights_names, copies, strict=True):
        setattr(replica, weight, copied)  # as torch.nn.DataParallel does
    before = ours(X)
    same(replica(X), torch.func.functional_call(ours, dict(zip(ours._flat_weights_names, copies, strict=True)), (X,)))
    same(ours(X), before)


class Scaled(gatewise.LSTM):
    """A program's own layer."""

    def __init__(self, *sizes, scale, **options):
        super().__init__(*sizes, **options)
        self.scale = scale

    def forward(self, x, hx=None, scale=None):
        y, state = super().forward(x * (scale or self.scale), hx)
        return y, state


def test_a_subclass_with_its_own_forward():
    layer, plain = Scaled(3, 4, scale=2.0), nn.LSTM(3, 4)
    plain.load_state_dict(layer.state_dict())
    same(layer(X), plain(2 * X))
    same(layer(X, scale=3.0), plain(3 * X))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is Scaled
        same(other(X), layer(X))


@pytest.mark.parametrize("name", LAYERS | CELLS)
def test_they_add_only_names_that_the_documentation_has(name):
    """Any other name may be one of a class of a program that derives from PyTorch's."""
    theirs, ours = twins(name)
    documented = set() if name in CELLS else {"kernel", "memory", "weight_dropout", "reverse", "stream"}
    assert {*dir(ours)} - {*dir(theirs)} == {"__prepare_scriptable__"} | documented


@pytest.mark.parametrize("name", LAYERS)
def test_the_type_of_the_output_is_that_of_the_input(name):
    """So that programs which call `super().forward` are typed with gatewise's layers as with PyTorch's."""
    forms = [get_type_hints(form) for form in get_overloads(LAYERS[name][1].forward)]
    found = [(form["input"], get_args(form["return"])[0]) for form in forms]
    assert found == [(torch.Tensor, torch.Tensor), (PackedSequence, PackedSequence)]


class OwnStep(gatewise.LSTMCell):
    """A cell of a program, with a method of a name that programs use."""

    def _step(self, x, state):
        return super().forward(x, state)

    def forward(self, input, hx=None):
        return self._step(2 * input, hx)


def test_a_subclass_of_a_cell_with_its_own_step():
    ours, theirs = OwnStep(3, 4), nn.LSTMCell(3, 4)
    theirs.load_state_dict(ours.state_dict())
    same(ours(X[0]), theirs(2 * X[0]))


class Flipping(gatewise.LSTM):
    """A layer of a program with an attribute that is named as an option of gatewise's layers is."""

    def __init__(self, *sizes, reverse=False):
        super().__init__(*sizes)
        self.reverse = reverse

    def forward(self, x, hx=None):
        y, state = super().forward(x.flip(0) if self.reverse else x, hx)
        return y.flip(0) if self.reverse else y, state


def test_an_option_is_not_taken_from_an_attribute_of_a_subclass():
    same(Flipping(3, 4)(X)[0].shape, torch.Size([5, 4, 4]))
    for layer in (Flipping(3, 4, reverse=True), pickle.loads(pickle.dumps(Flipping(3, 4, reverse=True)))):
        with pytest.raises(gatewise.ArgumentError, match=r"`reverse` must be an argument of the constructor of .*LSTM"):
            layer(X)


@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU, gatewise.RNN])
def test_options_may_be_assigned_to_layers_and_given_to_subclasses(kind):
    layer, given = kind(3, 4), type("Derived", (kind,), {})(3, 4, reverse=True, weight_dropout=0.5)
    given.load_state_dict(layer.state_dict())
    layer.reverse, given.weight_dropout = True, 0.0
    same(given(X), layer(X))
    given.reverse, given.weight_dropout = False, 0.25
    assert given(X)[0].shape == (5, 4, 4)


@pytest.mark.parametrize("name", ["kernel", "memory", "weight_dropout", "reverse"])
@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU, gatewise.RNN])
def test_a_class_with_an_attribute_that_is_named_as_an_option_is_refused(kind, name):
    derived = type("Derived", (kind,), {name: property(lambda self: 0)})
    with pytest.raises(gatewise.ArgumentError, match=rf"`{name}` must be left to gatewise\.{kind.__name__}.*Rename it"):
        derived(3, 4)


def program():
    """A program that builds its model when it is called, in the ways in which programs use `torch.nn`."""

    class Lengths(nn.RNNBase):
        """A layer with lengths, above the class that computes it in the order of methods."""

        def forward(self, x, hx=None, lengths=None):
            if lengths is None:
                return super().forward(x, hx)
            packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=False)
            y, state = super().forward(packed, hx=hx)
            assert isinstance(y, PackedSequence)
            return pad_packed_sequence(y, batch_first=self.batch_first)[0], state

    class Encoder(Lengths, nn.LSTM):
        pass

    class Own(nn.GRU):
        def __init__(self, size):
            super().__init__(size, size, bidirectional=True)

        def forward(self, x):
            return super().forward(x)[0]

    class Base(nn.RNNBase):
        def __init__(self, *sizes):
            super().__init__("RNN_TANH", *sizes)

        def forward(self, x):
            h = x.new_zeros(1, x.shape[1], self.hidden_size)
            return torch.rnn_tanh(x, h, self._flat_weights, True, 1, 0.0, self.training, False, False)[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder(3, 6, 1, True, True)
            self.own, self.base, self.plain = Own(6), Base(12, 2), nn.RNN(2, 2, 1, "relu", batch_first=True)
            self.cell = nn.LSTMCell(2, 2)
            for module in self.modules():
                if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
                    nn.init.orthogonal_(module.weight_hh_l0)

        def forward(self, x):
            y, _ = self.encoder(x, lengths=torch.tensor([4, 2, 3, 1, 4]))
            y, _ = self.plain(self.base(self.own(y)))
            return self.cell(y[:, -1])

    torch.manual_seed(0)
    return Model()


def test_a_program_whose_torch_nn_is_exchanged_builds_the_same_model(monkeypatch):
    expected = program()
    for name in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"):
        monkeypatch.setattr(nn, name, getattr(gatewise, name))
    model = program()
    classes = gatewise.LSTM, gatewise.GRU, nn.RNNBase, gatewise.RNN, gatewise.LSTMCell
    assert all(isinstance(part, kind) for part, kind in zip(model.children(), classes, strict=True))
    same(dict(model.state_dict()), dict(expected.state_dict()))
    same(model(X), expected(X))
    assert gatewise.verify(model, X).agrees
