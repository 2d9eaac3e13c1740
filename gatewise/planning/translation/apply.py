"""Application of a memory plan to a translation model."""

from __future__ import annotations

from gatewise.models import Seq2Seq
from gatewise.planning.plan import Plan
from gatewise.planning.translation.decoder import AGAIN
from gatewise.planning.translation.output import rows_of


def apply(plan: Plan, model: Seq2Seq) -> None:
    """Make a model compute its training steps as planned.

    Args:
        plan: A plan for this model.
        model: The model; its parameters are not changed.
    """
    for place, layer in enumerate(model.encoder, 1):
        layer.memory = plan.way(f"encoder {place}").name  # type: ignore[assignment]
    if model.input_feeding:
        model.recompute_gates = plan.way("decoder").name == AGAIN
    else:
        model.decoder.memory = plan.way("decoder").name  # type: ignore[assignment]
    model.attention.kernel = plan.way("attention").name
    model.output_rows = rows_of(plan.way("output").name)
