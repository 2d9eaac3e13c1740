"""`gatewise.explain` of a stream: the decision for a step of it, without making the call."""

from __future__ import annotations

import dataclasses

from gatewise.contract.criterion import Refusal
from gatewise.contract.decision import Decision, Verdict
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work, read_again
from gatewise.contract.problem import Problem
from gatewise.selection import cost
from gatewise.selection.one_step import NOT_CAPTURED, algorithm_on_cpu, held_bytes, refusals_of, state_dtype
from gatewise.selection.preference import AUTO, Preference

ONE_STEP = "one_step"
_SUMMARY = "a step of a stream: operators of PyTorch on a CPU, one launch for each layer on a GPU"


def with_step(decision: Decision, wanted: Preference, structured: bool) -> Decision:
    """Return the decision for a step of a stream.

    Args:
        decision: The decision for the call of one step that computes the step if the stream's own way does not.
        wanted: The user's preference.
        structured: Whether the recurrent matrices have blocks or factors.
    """
    problem, device = decision.problem, decision.device
    own = _verdict(problem, device, wanted, structured)
    verdicts = own, *decision.verdicts
    if not own.accepted and problem.captured and device.kind == "cuda":
        return dataclasses.replace(decision, verdicts=verdicts, chosen=None, reason=NOT_CAPTURED, passed_over="")
    if not own.accepted:
        return dataclasses.replace(decision, verdicts=verdicts)
    return dataclasses.replace(decision, verdicts=verdicts, chosen=ONE_STEP, reason="a step of a stream")


def _verdict(problem: Problem, device: Device, wanted: Preference, structured: bool) -> Verdict:
    refusals = () if device.kind == "cpu" else refusals_of(problem, device)
    if wanted.kernel != AUTO:
        refusals = (Refusal("kernel", repr(wanted.kernel), "none that is named"), *refusals)
    if refusals:
        return Verdict(ONE_STEP, _SUMMARY, refusals=refusals)
    size, layers = problem.element_bytes, problem.num_layers
    weights = read_again(problem.parameter_count * size, 1, device)
    if device.kind == "cpu":
        algorithm = algorithm_on_cpu(problem, structured)
        work = Work(matmul_flops=problem.matmul_flops, operators=layers) + weights
    else:
        algorithm = "one launch for each layer"
        work = Work(launches=layers, operators=1) + weights
    return Verdict(
        ONE_STEP,
        _SUMMARY,
        algorithm=algorithm,
        work=work,
        seconds=cost.seconds(ONE_STEP, work, problem, device),
        memory=lambda: _states_bytes(problem, device) + size * problem.batch * problem.output_size,
    )


def _states_bytes(problem: Problem, device: Device) -> int:
    if device.kind != "cpu":
        return held_bytes(problem)
    features = problem.num_layers * (problem.output_size + problem.states_size)
    return features * problem.batch * state_dtype(problem.dtype).itemsize
