"""The way that `gatewise train nmt` uses by default: attention and memory are planned within a memory budget."""

from __future__ import annotations

import torch

from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.precision import Precision
from gatewise.contract.device import Device
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Plan, Planner, Shape, apply
from gatewise.planning.budget import AUTO
from gatewise.planning.translation.step import CUBLAS
from gatewise.training.options import TrainingOptions


def training_options(case: TranslationCase, precision: Precision) -> TrainingOptions:
    """Return the training options of a case."""
    arithmetic = "bfloat16" if precision.autocast else "tf32" if precision.tf32 else "float32"
    return TrainingOptions(
        optimizer="adam", learning_rate=case.learning_rate, clip=case.clip, precision=arithmetic, schedule="constant"
    )


def apply_plan(
    model: Seq2Seq,
    case: TranslationCase,
    precision: Precision,
    device: torch.device,
    budget: int | None,
    processes: int = 1,
) -> Plan:
    """Make the memory plan for a model's training steps within a budget, and apply it to the model.

    Args:
        model: The model of the case.
        case: The batches of one process.
        precision: The precision of the computation.
        device: The device.
        budget: The budget in bytes; None for the memory of the device.
        processes: The number of processes that train together.

    Raises:
        OutOfMemoryPredicted: No plan fits into the budget.
    """
    plan = _planner(model, case, precision, device, processes).plan(_batching(case), _text(budget))
    apply(plan, model)
    return plan


def largest_predicted(
    model: Seq2Seq, case: TranslationCase, precision: Precision, device: torch.device, budget: int
) -> int:
    """Return the largest batch for which a plan fits into a budget; 0 if there is none."""
    return _planner(model, case, precision, device).largest(_batching(case), _text(budget))


def predicted_bytes(plan: Plan) -> int:
    """Return the predicted peak without the workspace of cuBLAS, which is allocated before any way is measured."""
    return plan.peak_bytes - dict(plan.choice.step.at_rest).get(CUBLAS, 0)


def ways_of(plan: Plan) -> str:
    """Return a line with the ways of all parts that have several."""
    parts = [part.name for part in plan.choice.step.parts if len(part.ways) > 1]
    return ", ".join(f"{part}: {plan.way(part).name}" for part in parts)


def _planner(
    model: Seq2Seq, case: TranslationCase, precision: Precision, device: torch.device, processes: int = 1
) -> Planner:
    return Planner(model, training_options(case, precision), Device.probe(device), processes)


def _batching(case: TranslationCase) -> Batching:
    return Batching("batch", case.batch, lambda rows: [Shape(case.source, case.target, rows)])


def _text(budget: int | None) -> str:
    return AUTO if budget is None else f"{budget}B"
