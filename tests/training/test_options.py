"""Every option changes the training, and is refused if it makes no sense."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from echo_model import Echoes, train

from gatewise.contract.errors import ArgumentError
from gatewise.training import TrainingOptions
from gatewise.training.history import Evaluation

BASE = {"schedule": "constant", "clip": 0.0}

# For each option: two values, and other options that both of them need to have an effect.
CHANGES = {
    "epochs": (2, 3, {}),
    "optimizer": ("sgd", "adamw", {}),
    "learning_rate": (0.02, 0.03, {}),
    "momentum": (0.0, 0.9, {"optimizer": "sgd"}),
    "beta2": (0.999, 0.9, {}),
    "weight_decay": (0.0, 0.1, {}),
    "clip": (0.0, 0.01, {"optimizer": "sgd"}),
    "clip_value": (0.0, 0.01, {"optimizer": "sgd"}),
    "schedule": ("constant", "cosine", {}),
    "warmup_steps": (0, 10, {}),
    "rate_tokens": (8, 16, {}),
    "plateau_factor": (0.25, 0.5, {"schedule": "plateau", "learning_rate": 1.0, "epochs": 6}),
    "plateau_patience": (0, 5, {"schedule": "plateau", "learning_rate": 1.0, "epochs": 6}),
    "average": ("none", "ema", {}),
    "average_decay": (0.9, 0.5, {"average": "ema"}),
    "average_patience": (0, 50, {"average": "tail", "learning_rate": 1.0, "epochs": 6}),
    "average_last": (2, 5, {"average": "last", "epochs": 6}),
    "precision": ("float32", "bfloat16", {}),
    "evaluations_per_epoch": (1, 2, {}),
    "epochs_per_evaluation": (1, 2, {"epochs": 4}),
    "best_by": ("loss", "constant", {"score": lambda: {"constant": 0.0}, "epochs": 6}),
    "patience": (0, 1, {"learning_rate": 1.0, "epochs": 10}),
}
# These options determine when files are written, or are used by the caller; they must not change the weights here.
NEUTRAL = {
    "checkpoint_seconds": (60.0, 0.001),
    "checkpoint_evaluations": (1, 4),
    "checkpoint_steps": (0, 2),
    "seed": (0, 1),
    "cuda_graph": (True, False),
    "exchange_bfloat16": (False, True),  # for several processes: test_exchange.py
    "exchange_rows": (False, True),
    "exchange_factors": (True, False),  # on GPUs
}


def trace(folder, **options):
    """Return all numbers of a run except for times."""
    outcome, model = train(folder, data=Echoes(length=8), **(BASE | {"epochs": 2} | options))
    timeless = {field.name for field in dataclasses.fields(Evaluation)} - {"seconds", "tokens_per_second"}
    history = [tuple(getattr(evaluation, name) for name in sorted(timeless)) for evaluation in outcome.history]
    return history, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function from options to the numbers of their run; runs whose options are the same are one."""
    usual, found = dataclasses.asdict(TrainingOptions()) | {"epochs": 2, "learning_rate": 0.02} | BASE, {}

    def run(options):
        key = frozenset((usual | options).items())
        if key not in found:
            found[key] = trace(tmp_path_factory.mktemp("run"), **options)
        return found[key]

    return run


def test_every_option_is_in_this_file():
    assert CHANGES.keys() | NEUTRAL.keys() == {field.name for field in dataclasses.fields(TrainingOptions)}


@pytest.mark.parametrize("name", CHANGES)
def test_the_option_changes_the_run(run_of, name):
    first, second, others = CHANGES[name]
    assert run_of(others | {name: first})[0] != run_of(others | {name: second})[0]


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_option_changes_no_weight(run_of, name):
    runs = [run_of({name: value}) for value in NEUTRAL[name]]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgdm"}, "`optimizer` must be one of sgd, adam, adamw, got 'sgdm'"),
        ({"schedule": "linear"}, "`schedule` must be one of constant, cosine, plateau, got 'linear'"),
        ({"average": "mean"}, "`average` must be one of none, ema, tail, last, got 'mean'"),
        ({"precision": "float16"}, "`precision` must be one of float32, tf32, bfloat16, got 'float16'"),
        ({"epochs": 0}, "`epochs` must be greater than 0, got 0"),
        ({"epochs": 2.5}, "`epochs` must be an integer, got 2.5"),
        ({"epochs": True}, "`epochs` must be greater than 0, got True"),
        ({"learning_rate": "0.1"}, "`learning_rate` must be greater than 0, got '0.1'"),
        ({"clip": None}, "`clip` must be 0 or more, got None"),
        ({"cuda_graph": "no"}, "`cuda_graph` must be True or False, got 'no'"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a finite number, got nan"),
        ({"learning_rate": float("inf")}, "`learning_rate` must be a finite number, got inf"),
        ({"learning_rate": 0.0}, "`learning_rate` must be greater than 0, got 0.0"),
        ({"epochs": 2**31}, "`epochs` must be at most 2,147,483,647, got 2147483648"),
        (
            {"epochs_per_evaluation": 2, "evaluations_per_epoch": 3},
            "`epochs_per_evaluation` must be 1 with 3 evaluations per epoch, got 2",
        ),
        ({"seed": -1}, "`seed` must be 0 or more, got -1"),
        ({"clip": -1.0}, "`clip` must be 0 or more, got -1.0"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        TrainingOptions(**options)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_a_number_that_no_step_can_use_is_refused(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be a finite number, got inf"):
        TrainingOptions(**{name: float("inf")})
