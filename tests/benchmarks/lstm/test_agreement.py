"""Wrong results are found, in every tensor."""

from __future__ import annotations

import math

import pytest
import torch

from gatewise import testing
from gatewise.benchmarks.cases import GRU, LSTM, LSTM_TINY, LSTMCase
from gatewise.benchmarks.lstm import agreement
from gatewise.benchmarks.lstm.call import Call, draw
from gatewise.benchmarks.lstm.side import gatewise_side, rival_side
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.cells import cell_named
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, OutputGradients
from tests.pairwise import exhaustive

CPU = torch.device("cpu")


def oracle_of(call: Call) -> dict[str, torch.Tensor]:
    """The call as the test tools' float64 oracle computes it: layer by layer, ragged rows one by one."""
    case = call.case
    problem = Problem(
        case.time,
        case.batch,
        case.hidden_size,
        case.hidden_size,
        num_layers=case.num_layers,
        bidirectional=case.directions == 2,
        layout=Layout.HOST_LENGTHS if case.ragged else Layout.DENSE,
        needs_grad=True,
        cell=cell_named(call.cell),
    )
    c0, dc = (torch.empty(*call.h0.shape[:2], 0) if cell is None else cell for cell in (call.c0, call.dc))
    inputs = Inputs(call.x, call.h0, c0, tuple(call.weights.values()), call.lengths, None, ())
    return testing.named(problem, *testing.oracle(problem, inputs, OutputGradients(call.dy, call.dh, dc)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", LSTM_TINY, ids=lambda case: case.name)
@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_the_truth_is_the_oracle(case: LSTMCase, device: str, cell: str) -> None:
    call = draw(case, torch.device(device), cell=cell)
    truth = {name: tensor.cpu() for name, tensor in agreement.truth(call).items()}
    oracle = {name: tensor for name, tensor in oracle_of(call).items() if tensor.numel()}
    assert set(truth) == set(oracle)
    assert max(agreement.errors(truth, oracle).values()) < 1e-13


@pytest.fixture(scope="module")
def call() -> Call:
    return draw(LSTM_TINY[1], CPU)


@pytest.fixture(scope="module")
def truth(call: Call) -> dict[str, torch.Tensor]:
    return agreement.truth(call)


def judged(call: Call, truth: dict, spoil=lambda found: None, precision: str = "fp32") -> agreement.Agreement:
    chosen = LAYER_PRECISIONS[precision]
    found = gatewise_side(call, chosen.dtype, "eager").evidence(training=True)
    spoil(found)
    rival = rival_side(call, chosen.dtype).evidence(training=True)
    return agreement.agreement(agreement.errors(found, truth), agreement.errors(rival, truth), chosen)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_right_result_agrees(call: Call, truth: dict, precision: str) -> None:
    found = judged(call, truth, precision=precision)
    assert found.agrees, str(found)
    assert "within the allowed" in str(found)
    assert 0.2 < found.over_rival < 5


@pytest.mark.parametrize("precision", ["fp32", *exhaustive("bf16")])
def test_an_error_in_any_tensor_is_found(call: Call, truth: dict, precision: str) -> None:
    for name in truth:
        found = judged(call, truth, lambda tensors, name=name: tensors[name].mul_(1.05), precision)
        assert not found.agrees, name
        assert found.worst == name
        assert str(found).startswith(f"{name} is ")
        assert "more than the allowed" in str(found)


def test_one_number_that_is_none_is_found(call: Call, truth: dict) -> None:
    found = judged(call, truth, lambda tensors: tensors["dh0"].view(-1)[3:4].fill_(math.nan))
    assert not found.agrees
    assert found.worst == "dh0"


def test_a_wrong_shape_is_found(call: Call, truth: dict) -> None:
    found = judged(call, truth, lambda tensors: tensors.update(y=tensors["y"][:-1]))
    assert not found.agrees
    assert found.errors["y"] == math.inf


def test_the_allowance_is_twice_the_rivals_error_and_a_rounding() -> None:
    found = agreement.Agreement({"y": 0.3}, {"y": 0.1}, 0.05)
    assert found.allowed("y") == pytest.approx(0.3)
    assert not agreement.Agreement({"y": 0.31}, {"y": 0.1}, 0.05).agrees


def test_of_two_runs_the_larger_error_counts() -> None:
    found = agreement.larger({"y": 0.1, "h_n": math.nan}, {"y": 0.2, "h_n": 0.1})
    assert found["y"] == 0.2
    assert math.isnan(found["h_n"])


def test_kinds_are_the_worst_of_all_layers_and_directions() -> None:
    errors = {"y": 1.0, "dweight_ih_l0": 2.0, "dweight_ih_l0_reverse": 5.0, "dweight_ih_l11": 3.0, "dbias_hh_l1": 1.5}
    assert agreement.by_kind(errors) == {"y": 1.0, "dweight_ih": 5.0, "dbias_hh": 1.5}
    hidden = agreement.by_kind({"dbias_ih_l0": math.nan, "dbias_ih_l1": 1.0})
    assert math.isnan(agreement.by_kind({"dbias_ih_l0": 1.0, "dbias_ih_l1": math.nan})["dbias_ih"])
    assert math.isnan(hidden["dbias_ih"])


def test_the_ratio_of_errors_is_that_of_the_worst_kind() -> None:
    ours, theirs = {"y": 2.0, "dx": 3.0}, {"y": 2.0, "dx": 2.0}
    assert agreement.Agreement(ours, theirs, 0.1).over_rival == 1.5
