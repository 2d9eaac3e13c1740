"""The operations of a step with normalizations and log-sigmoids as one operation each, and their code."""

import torch

from gatewise.cells import SLSTM, Cell, LayerNormGRU, LayerNormLSTM, standardized
from gatewise.derivation.normalized import Normalization, counted_twice, normalized
from gatewise.derivation.stages import stages_of
from gatewise.derivation.sweep import sweep_of


def normalizations(cell):
    return [one for one in normalized(cell) if isinstance(one, Normalization)]


class Other(Cell):
    """A cell whose step resembles a log-sigmoid, but is none."""

    gates = ("a",)
    states = ("m", "n")

    def step(self, gate, state):
        size = torch.maximum(gate.a, -gate.a)
        return (gate.a - size) / 3 - torch.log(1 + torch.exp(-size)), {"m": state.n, "n": gate.a}


class Twice(Cell):
    """A cell with a value that a normalization has twice."""

    gates = ("a", "b")

    def step(self, gate, state):
        return torch.tanh(standardized(gate.a, gate.a)[0] + gate.b), {}


def test_sums_with_a_common_mean_are_one_normalization():
    apart, of_hidden, of_cell = normalizations(LayerNormLSTM())
    assert apart.values == ("i_input", "f_input", "g_input", "o_input")
    assert apart.together
    assert apart.centered
    assert of_hidden.values == ("i_recurrent", "f_recurrent", "g_recurrent", "o_recurrent")
    assert len(of_cell.values) == 1
    assert not of_cell.together


def test_sums_that_are_normalized_alike_are_one_normalization_of_separate_means():
    gates, of_cell = normalizations(LayerNormLSTM.of("tensorflow1"))
    assert gates.values == ("i", "f", "g", "o")
    assert not gates.together
    assert (gates.eps, of_cell.eps) == (1e-12, 1e-12)
    (joint,) = normalizations(LayerNormGRU(centered=False))
    assert joint.values == ("r", "z", "n")
    assert joint.together
    assert not joint.centered


def test_a_log_sigmoid_is_one_operation():
    functions = [one.function for one in normalized(SLSTM()) if not isinstance(one, Normalization)]
    assert functions.count("logsigmoid") == 1
    assert "logsigmoid(" in stages_of(SLSTM()).source
    assert "torch.log(" not in stages_of(SLSTM()).source
    assert "logsigmoid" not in [one.function for one in normalized(Other())]


def test_a_value_that_is_normalized_twice_is_found():
    assert counted_twice(Twice())
    assert not counted_twice(LayerNormLSTM())


def test_the_input_sums_of_a_layer_norm_lstm_are_normalized_ahead_of_the_steps():
    _, ahead, step = stages_of(LayerNormLSTM()).source.split("def ")[1:]
    assert ahead.count("standardized(") == 1
    assert step.count("standardized(") == 2  # that of the recurrent sums, and that of the cell state


def test_a_backward_step_of_a_layer_norm_lstm_calls_few_operators():
    source = sweep_of(LayerNormLSTM()).source
    step = source[source.index("def step(") : source.index("def bulk(")].strip().splitlines()[4:]
    assert len(step) == 6
    assert sum(line.count("standardized_backward(") for line in step) == 2  # the third one is computed for many steps
