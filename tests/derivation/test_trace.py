"""The recorded operations of a cell's step, and errors that name the line of an unsupported operation."""

from typing import ClassVar

import pytest
import torch

import gatewise
from gatewise.cells.cell import Cell
from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM
from gatewise.cells.normalization import standardized
from gatewise.cells.statement import StatementError
from gatewise.derivation.pointwise import coefficient_function, pointwise_of
from gatewise.derivation.trace import NotTraceable, traced


def stating(step, **attributes):
    return type("Stated", (Cell,), {"gates": ("a", "b"), "step": step, **attributes})()


def test_the_operations_of_the_lstm():
    step = traced(LSTM())
    assert (step.sums, step.states, step.reads_hidden) == (("i", "f", "g", "o"), ("c",), False)
    assert sorted(operation.function for operation in step.operations) == sorted(
        ["sigmoid"] * 3 + ["tanh"] * 2 + ["mul"] * 3 + ["add"]
    )


def test_gates_with_separate_sums_have_two():
    cell = GRU()
    assert cell.sums == ("r", "z", "n_input", "n_recurrent")
    assert cell.recurrent_sums == (0, 1, 3)
    assert traced(cell).reads_hidden


def test_common_subexpressions_are_computed_once():
    step = traced(stating(lambda self, gate, state: (torch.sigmoid(gate.a) * torch.sigmoid(gate.a) + gate.b, {})))
    assert [operation.function for operation in step.operations] == ["sigmoid", "mul", "add"]


def test_values_that_are_returned_unchanged_get_new_names():
    cell = stating(lambda self, gate, state: (gate.a, {"c": state.c}), states=("c",))
    sums, h, c = torch.randn(2, 6), torch.randn(2, 3), torch.randn(2, 3)
    hidden, after = pointwise_of(cell).step(sums, h, c)
    assert torch.equal(hidden, sums[:, :3])
    assert torch.equal(after, c)


def test_the_lstm_takes_seven_operators():
    source = pointwise_of(LSTM()).source.split("def hidden")[0]
    assert source.count("torch.") + source.count(" * c_before") + source.count("v6 * v7") == 6
    assert "torch.sigmoid(sums).chunk" in source
    assert "torch.addcmul" in source


def without_gradient(self, gate, state):
    with torch.no_grad():
        a = torch.sigmoid(gate.a)
    return a * gate.b, {}


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (without_gradient, "an operation without a gradient, as under torch.no_grad"),
        (lambda self, gate, state: (torch.cumsum(gate.a, 0), {}), "torch.cumsum"),
        (lambda self, gate, state: (gate.a if gate.a else gate.b, {}), "a branch that depends on a value"),
        (lambda self, gate, state: (gate.a * float(gate.b), {}), "a conversion of a value to a Python number"),
        (lambda self, gate, state: (gate.a * "2", {}), "an operand of type str"),
        (lambda self, gate, state: (torch.clamp(gate.a, max=float("inf")), {}), "the number inf"),
    ],
)
def test_unsupported_operations_are_refused_with_their_line(step, what):
    with pytest.raises(NotTraceable, match=r"`Stated\.step` must be composed of") as raised:
        traced(stating(step))
    assert what in str(raised.value)


@pytest.mark.parametrize("attributes", [{"gates": ("v0", "b")}, {"gates": ("a b",)}, {"states": ("h",)}], ids=str)
def test_reserved_names_are_refused(attributes):
    with pytest.raises(StatementError, match=r"`Stated\.(gates|states)` must be named by Python"):
        traced(stating(lambda self, gate, state: (0, {}), **attributes))


def test_numbers_keep_all_their_digits():
    cell = stating(lambda self, gate, state: ((gate.a / 3) * (1 / 7), {}))
    a = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    column = torch.empty(2, 2, 3, dtype=torch.float64)
    sums = torch.cat([a, torch.zeros_like(a)], -1).detach()
    coefficient_function(cell)(sums, None, [column])
    torch.testing.assert_close(column[:, 0], torch.full((2, 3), 1 / 21, dtype=torch.float64), rtol=1e-16, atol=0)


def test_the_line_is_named():
    class Branching(Cell):
        gates = ("a",)

        def step(self, gate, state):
            if gate.a:
                return gate.a, {}
            return -gate.a, {}

    with pytest.raises(NotTraceable, match=r"in line \d+ of .*test_trace.py: if gate.a:"):
        traced(Branching())


def test_a_cell_without_a_source_file_is_refused_with_its_line_too():
    source = """
class Typed(Cell):
    gates = ("a",)

    def step(self, gate, state):
        return torch.erf(gate.a), {}
"""
    names = {"Cell": Cell, "torch": torch, "__name__": "__main__"}
    exec(compile(source, "<input>", "exec"), names)
    with pytest.raises(NotTraceable, match=r"got torch\.erf, in line 6 of <input>\.$"):
        traced(names["Typed"]())


@pytest.mark.parametrize("derived", [False, True], ids=["parameter", "function of it"])
def test_a_sum_and_a_parameter_normalized_together_are_refused_with_their_line(derived):
    class Mixed(Cell):
        gates = ("g",)
        parameters: ClassVar = {"gain": 1.0}

        def step(self, gate, state, parameter):
            gain = parameter.gain
            first, second = standardized(gate.g, gain * 2 if derived else gain)
            return first * second, {}

    line = r"in line \d+ of .*test_trace\.py: first, second = standardized\("
    with pytest.raises(StatementError, match=rf"`Mixed\.step` must normalize parameters apart from gates.* {line}"):
        gatewise.Recurrent(Mixed(), 3, 4)(torch.randn(5, 2, 3))


def test_parameters_are_normalized_by_themselves():
    class Apart(Cell):
        gates = ("g",)
        parameters: ClassVar = {"a": torch.nn.init.normal_, "b": torch.nn.init.normal_}

        def step(self, gate, state, parameter):
            a, b = standardized(parameter.a, parameter.b)
            return standardized(gate.g) * a + b, {}

    assert len(traced(Apart()).statistics) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cell_can_be_traced_where_no_gradients_are_recorded(mode):
    with mode():
        assert traced(stating(lambda self, gate, state: (gate.a, {"c": gate.a * gate.b}), states=("c",))).operations


def test_a_step_returns_values():
    with pytest.raises(NotTraceable, match="got a result of type float"):
        traced(stating(lambda self, gate, state: (1.0, {})))


def test_cells_of_one_class_and_attributes_are_equal():
    assert LSTM() == LSTM()
    assert hash(LSTM()) == hash(LSTM())
    assert LSTM() != GRU()
