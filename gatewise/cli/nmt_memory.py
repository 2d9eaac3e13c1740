"""The memory of a run of `gatewise train nmt`: planned from its batches before the first step."""

from __future__ import annotations

from gatewise.cli.nmt_data import PairMaterial
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.contract.device import Device
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Plan, Planner, Shape, apply
from gatewise.training.processes import Processes

_NUMBER = 8  # bytes of a token on the device


def plan_memory(recipe: TranslationRecipe, material: PairMaterial, model: Seq2Seq, processes: Processes) -> Plan:
    """Plan how training steps are computed within the budget, and tell the model.

    Args:
        recipe: Gives the budget and how training goes.
        material: The pairs, in batches.
        model: What is trained.
        processes: This process among those that train together; all of them plan the same.

    Raises:
        OutOfMemoryPredicted: Nothing keeps to the budget; the message has the least that does, and how many batch
            tokens would fit.
        ArgumentError: The budget is not one.
        KernelRefused: A kernel that was named cannot train the model.
    """
    batches = material.batches["train"]

    def shapes(batch_tokens: int) -> list[Shape]:
        return [Shape(steps, steps, rows) for steps, rows in batches.largest(batch_tokens)]

    text = sum(sum(each.tokens) for each in material.batches.values()) * _NUMBER
    planner = Planner(
        model,
        recipe.training,
        Device.probe(processes.device),
        processes=processes.count,
        text_bytes=text if processes.device.type == "cuda" else 0,
    )
    longest = max(steps for steps, _ in batches.largest())
    batching = Batching("batch_tokens", recipe.data.batch_tokens, shapes, longest * processes.count)
    plan = planner.plan(batching, recipe.memory_budget)
    apply(plan, model)
    return plan
