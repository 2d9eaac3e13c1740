"""The cuDNN algorithm that PyTorch requests: the rules as a table."""

import pytest
import torch

from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.cudnn.criteria import PERSISTENT_CRITERIA, algorithm, why_not_persistent

HALF = Problem(time=100, batch=64, input_size=512, hidden_size=512, dtype=torch.float16)
PERSISTENT, SMALL, STANDARD = "PERSIST_STATIC", "PERSIST_STATIC_SMALL_H", "STANDARD"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PERSISTENT),
        ({"dtype": torch.bfloat16}, STANDARD),
        ({"dtype": torch.float32}, STANDARD),
        ({"dtype": torch.float64, "hidden_size": 64}, STANDARD),
        ({"dtype": torch.float32, "hidden_size": 192}, SMALL),
        ({"dtype": torch.float32, "hidden_size": 193}, STANDARD),
        ({"batch": 60}, STANDARD),
        ({"batch": 128}, PERSISTENT),
        ({"batch": 136}, STANDARD),
        ({"hidden_size": 1024}, PERSISTENT),
        ({"hidden_size": 1152}, STANDARD),
        ({"input_size": 500}, STANDARD),
        ({"num_layers": 2}, STANDARD),
        ({"bidirectional": True}, STANDARD),
        ({"proj_size": 64, "hidden_size": 128}, STANDARD),
        ({"layout": Layout.PACKED}, STANDARD),
        ({"cell": GRU()}, STANDARD),
        ({"cell": GRU(), "hidden_size": 192}, SMALL),
        ({"cell": RNN()}, PERSISTENT),
        ({"cell": RNN("relu"), "hidden_size": 384, "dtype": torch.float32}, SMALL),
        ({"cell": RNN("relu"), "hidden_size": 385, "dtype": torch.float32}, STANDARD),
        ({"cell": RNN(), "hidden_size": 256, "dtype": torch.float32, "needs_grad": True}, SMALL),
        (
            {"cell": RNN(), "hidden_size": 257, "dtype": torch.float32, "needs_grad": True},
            f"{SMALL} forward, {STANDARD} backward",
        ),
        ({"cell": RNN(), "hidden_size": 896, "batch": 88}, PERSISTENT),
        ({"cell": RNN(), "hidden_size": 896, "batch": 96}, STANDARD),
        ({"cell": RNN(), "hidden_size": 768, "batch": 128}, PERSISTENT),
        ({"hidden_size": 896, "batch": 96}, PERSISTENT),
    ],
)
def test_on_an_h200(changes, expected):
    assert algorithm(HALF.replace(**changes), Device.named("h200")) == expected


def test_forward_and_backward_are_chosen_apart():
    problem = HALF.replace(hidden_size=160, input_size=160, needs_grad=True)
    assert algorithm(problem, Device.named("h200")) == f"{SMALL} forward, {STANDARD} backward"


@pytest.mark.parametrize(
    ("name", "expected"), [("a10", STANDARD), ("l4", STANDARD), ("t4", STANDARD), ("a100", PERSISTENT)]
)
def test_other_gpus(name, expected):
    assert algorithm(HALF, Device.named(name)) == expected


@pytest.mark.parametrize(
    ("time", "batch", "expected"),
    [
        (100, 64, PERSISTENT),
        (100, 80, STANDARD),
        (30, 128, STANDARD),
        (10, 32, PERSISTENT),
        (9, 32, STANDARD),
        (20, 8, PERSISTENT),
    ],
)
def test_volta_has_a_table_of_its_own(time, batch, expected):
    assert algorithm(HALF.replace(time=time, batch=batch), Device.named("v100")) == expected


@pytest.mark.parametrize("cell", [GRU(), RNN()], ids=repr)
def test_on_volta_other_cells_run_on_what_an_lstm_does(cell):
    assert algorithm(HALF.replace(cell=cell), Device.named("v100")) == PERSISTENT
    assert algorithm(HALF.replace(cell=RNN(), hidden_size=1024, batch=96), Device.named("v100")) == PERSISTENT


def test_each_unmet_demand_of_a_persistent_algorithm_is_named():
    problem = HALF.replace(dtype=torch.bfloat16, batch=60, hidden_size=500, needs_grad=True)
    refusals = why_not_persistent(problem, Device.named("h200"))
    assert [refusal.quantity for refusal in refusals[SMALL]] == ["hidden_size"]
    assert [refusal.quantity for refusal in refusals[PERSISTENT]] == ["dtype", "hidden_size", "batch"]
    assert str(refusals[PERSISTENT][0]) == "dtype is bfloat16, allowed: float16"


def test_nothing_is_unmet_where_a_persistent_algorithm_runs():
    assert why_not_persistent(HALF, Device.named("h200")) == {}
    half_of_it = HALF.replace(hidden_size=160, input_size=160, needs_grad=True)
    unmet = why_not_persistent(half_of_it, Device.named("h200"))[SMALL]
    assert str(unmet[0]) == "hidden_size is 160, allowed: at most 192 (forward), 128 (backward)"
    assert why_not_persistent(half_of_it.replace(needs_grad=False), Device.named("h200")) == {}


def test_the_limits_of_an_rnn_are_named():
    problem = HALF.replace(cell=RNN(), hidden_size=896, batch=96, needs_grad=True)
    unmet = why_not_persistent(problem, Device.named("h200"))
    assert [str(one) for one in unmet[SMALL]] == ["hidden_size is 896, allowed: at most 384 (forward), 256 (backward)"]
    assert [one.quantity for one in unmet[PERSISTENT]] == ["batch"]
    assert "below 96 for an rnn from 896 units" in unmet[PERSISTENT][0].allowed


@pytest.mark.parametrize("cell", [LSTM(), RNN()], ids=repr)
@pytest.mark.parametrize("name", [SMALL, PERSISTENT])
def test_breaking_any_one_demand_loses_the_algorithm(name, cell):
    device = Device.named("h200")
    problem = HALF if name == PERSISTENT else HALF.replace(dtype=torch.float32, hidden_size=64)
    problem = problem.replace(cell=cell)
    assert algorithm(problem, device) == name
    for criterion in PERSISTENT_CRITERIA[name]:
        assert criterion.check(problem, device) is None
        violated = criterion.violation(problem, device)
        assert criterion.check(*violated) is not None, criterion.quantity
        assert algorithm(*violated) != name, criterion.quantity
