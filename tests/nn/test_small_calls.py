"""What a small call on a CPU takes beside PyTorch's operator: calls of Python, and operators of PyTorch.

Time is not asserted; these numbers are what it depends on, and they are the same on every machine.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from gatewise.cells import MGU, SLSTM, CoupledLSTM
from tests.calls import profile
from tests.pairwise import each_value

T, B, H = 9, 4, 5  # steps that oneDNN computes
LENGTHS = torch.tensor([6, 9, 3, 9])


def layers(kind):
    torch.manual_seed(0)
    rival, layer = getattr(nn, kind)(H, H), getattr(gatewise, kind)(H, H)
    layer.load_state_dict(rival.state_dict())
    return layer, rival


def ragged(rival, x):
    packed, final = rival(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))
    return pad_packed_sequence(packed, total_length=T)[0], final


def packed_of(x):
    return pack_padded_sequence(x, LENGTHS, enforce_sorted=False)


def state_of(kind):
    return (torch.ones(1, B, H),) * 2 if kind == "LSTM" else torch.ones(1, B, H)


# For each form of a call: ours, PyTorch's, and the most calls of functions of Python that ours may make.
FORMS = {
    "plain": (lambda layer, x, kind: layer(x), lambda rival, x, kind: rival(x), 15),
    "state": (lambda layer, x, kind: layer(x, state_of(kind)), lambda rival, x, kind: rival(x, state_of(kind)), 17),
    "packed": (lambda layer, x, kind: layer(packed_of(x)), lambda rival, x, kind: rival(packed_of(x)), 24),
    "lengths": (lambda layer, x, kind: layer(x, lengths=LENGTHS), lambda rival, x, kind: ragged(rival, x), 25),
}


def calls_of_python(call):
    """Return how often functions are called, without those of PyTorch that pack and that call a module."""
    found, ignored = [], ("torch/nn/utils/rnn.py", "torch/nn/modules/module.py", "torch/_VF.py", __file__)

    def note(frame, event, argument):
        if event == "call" and not frame.f_code.co_filename.endswith(ignored):
            found.append(frame.f_code.co_qualname)

    profile(call, note)
    return found


# An allocation of zeros is two operators or three, by which function asks for it.
ALLOCATIONS = {"aten::new_zeros", "aten::new_empty", "aten::zeros", "aten::empty", "aten::zero_", "aten::fill_"}


def operators(call):
    with torch.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.events()]
    return [name for name in names if name.startswith("aten::") and name not in ALLOCATIONS]


@pytest.mark.parametrize(
    ("gradients", "kind", "form"),
    each_value([*itertools.product([False, True], ["LSTM", "GRU", "RNN"], FORMS)]),
    ids=str,
)
def test_a_small_call_takes_few_calls_of_python(form, kind, gradients):
    ours, _, limit = FORMS[form]
    layer, x = layers(kind)[0], torch.ones(T, B, H)
    with torch.set_grad_enabled(gradients):
        ours(layer, x, kind)
        found = calls_of_python(lambda: ours(layer, x, kind))
    assert len(found) <= limit, found


@pytest.mark.parametrize(
    ("gradients", "kind", "form"),
    each_value([*itertools.product([False, True], ["LSTM", "GRU", "RNN"], FORMS)]),
    ids=str,
)
def test_a_small_call_takes_no_more_operators_than_pytorchs_layer(form, kind, gradients):
    ours, theirs, _ = FORMS[form]
    layer, rival = layers(kind)
    x = torch.ones(T, B, H)
    with torch.set_grad_enabled(gradients):
        found, expected = operators(lambda: ours(layer, x, kind)), operators(lambda: theirs(rival, x, kind))
    assert len(found) <= len(expected), found


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("cell", "values"), [(MGU(), 1), (CoupledLSTM(), 1), (SLSTM(), 2)])
def test_a_step_of_a_cell_makes_only_its_initial_values_beside_what_it_computes(cell, values, gradients):
    layer, x = gatewise.Recurrent(cell, H, H), torch.ones(1, B, H)
    with torch.set_grad_enabled(gradients):
        layer(x)
        calls, issued = calls_of_python(lambda: layer(x)), operators(lambda: layer(x))
    assert len(calls) <= 26, calls
    assert issued.count("aten::new_full") == values
    assert "aten::select" not in issued[: issued.index("aten::linear")]  # of a state in the states of all layers
    assert issued.count("aten::stack") == (3 if cell.states else 2)
