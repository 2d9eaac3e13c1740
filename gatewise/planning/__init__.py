"""Memory plans for training: what a step keeps, what it recomputes, and whether it fits, before it runs.

    planner = Planner(model, training, device)
    plan = planner.plan(batching, "8GB")      # or "auto"; raises OutOfMemoryPredicted with the largest batch that fits
    print(plan)
    apply(plan, model)

A training step is a list of parts, each with several ways to compute it. A way states the memory that it keeps from
forward to backward, its workspace, and its time. `peak` computes the peak memory of a step from its parts, `echo`
decides which recomputation is worthwhile, and `choose` selects the fastest combination within a budget. The parts of a
translation model are in `translation`.
"""

from gatewise.planning.choose import Shape
from gatewise.planning.plan import Plan
from gatewise.planning.planner import Batching, Planner
from gatewise.planning.translation.apply import apply

__all__ = ["Batching", "Plan", "Planner", "Shape", "apply"]
