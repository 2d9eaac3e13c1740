"""The memory plan of a run of `gatewise train nmt`, made from its batches before the first step."""

from __future__ import annotations

from gatewise.cli.nmt_data import PairMaterial
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.contract.device import Device
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Plan, Planner, Shape, apply
from gatewise.training.processes import Processes


def plan_memory(recipe: TranslationRecipe, material: PairMaterial, model: Seq2Seq, processes: Processes) -> Plan:
    """Make the memory plan for the training steps within the budget, and apply it to the model.

    Args:
        recipe: The recipe, with the budget and the training options.
        material: The pairs, in batches.
        model: The model to train.
        processes: The processes of the distributed training; all of them make the same plan.

    Raises:
        OutOfMemoryPredicted: No plan fits into the budget; the message has the smallest budget that suffices, and the
            number of batch tokens that would fit.
        ArgumentError: The budget is not a size.
        KernelRefused: A named kernel cannot train the model.
    """
    batches = material.batches["train"]

    def shapes(batch_tokens: int) -> list[Shape]:
        return [Shape(steps, steps, rows) for steps, rows in batches.largest(batch_tokens)]

    planner = Planner(
        model,
        recipe.training,
        Device.probe(processes.device),
        processes=processes.count,
        text_bytes=batches.bytes_on_device if processes.device.type == "cuda" else 0,
    )
    longest = max(steps for steps, _ in batches.largest())
    batching = Batching("batch_tokens", recipe.data.batch_tokens, shapes, longest * processes.count)
    plan = planner.plan(batching, recipe.memory_budget)
    apply(plan, model)
    return plan
