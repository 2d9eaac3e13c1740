"""Memory as a plan: what a training step keeps, what it computes again, and whether it fits, before it runs.

    planner = Planner(model, training, device)
    plan = planner.plan(batching, "8GB")      # or "auto"; raises OutOfMemoryPredicted with the largest batch that fits
    print(plan)
    apply(plan, model)

A step is a list of parts, each with ways to compute it; a way states what it keeps from forward to backward, what it
works in, and its time. `peak` adds them up in the order of a step, `echo` says which recomputation is worth its while,
`choose` takes the fastest combination within a budget. The parts of a translation model are in `translation`.
"""

from gatewise.planning.choose import Shape
from gatewise.planning.plan import Plan
from gatewise.planning.planner import Batching, Planner
from gatewise.planning.translation.apply import apply

__all__ = ["Batching", "Plan", "Planner", "Shape", "apply"]
