"""Choices among a kernel's own ways on an H200 stay those that its speed was recorded with.

A line of `choices.jsonl` is a call, T, B, H, layers, directions, precision, training, and what was chosen for it before
the weights of the rankings became data: the shapes of `gatewise bench lstm`, and a thousand drawn at random. Tilings of
backward passes, and of forward passes by warpgroups, are those by the weights that were fitted to
`benchmarks/results/tilings.jsonl`, and so are all of wide layers.
"""

import json
from pathlib import Path

import pytest

from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.sizes import layer_pairs, memory
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tiling_choice import tiling
from gatewise.kernels.stepwise.plan import product_layout_of

H200 = Device.named("h200")
CHOICES = [json.loads(line) for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines()]


def problem_of(choice):
    time, batch, hidden_size, layers, directions, name, training = choice["sizes"]
    precision = LAYER_PRECISIONS[name]
    return Problem(
        time,
        batch,
        hidden_size,
        hidden_size,
        num_layers=layers,
        bidirectional=directions == 2,
        dtype=precision.dtype,
        needs_grad=training,
        allow_tf32=name == "tf32",
    )


def fields(cut):
    if cut is None:
        return None
    placed = [cut.units, cut.rows, cut.warps, cut.resident, cut.split]
    several = [cut.eights] if cut.eights > 1 else []
    shared = [f"{cut.resident_blocks} in a multiprocessor"] if cut.distributed else []
    return [*placed, cut.groups, cut.together, cut.directions, cut.chunk, cut.ahead, *several, *shared]


PROBLEMS = [(problem_of(choice), choice) for choice in CHOICES]
PARTS = [pytest.param(part, marks=pytest.mark.exhaustive if part else ()) for part in range(10)]  # every tenth line


def test_there_are_a_thousand():
    assert len(CHOICES) > 1200


def passes(problem):
    return (False, True) if problem.needs_grad else (False,)


def tilings(problem):
    sizes = problem.hidden_size, problem.batch, problem.num_directions, H200
    number = problem.element_bytes, exact_products(problem)
    return [fields(tiling(*sizes, backward, *number)) for backward in passes(problem)]


def pairs(problem):
    if problem.num_layers == 1:
        return []
    return [fields(layer_pairs.stacked_cut(problem, H200, backward=backward)) for backward in passes(problem)]


def form(problem):
    chosen = product_layout_of(problem, H200)
    return [chosen.column_major, chosen.transposed_forward, chosen.transposed_backward, chosen.split_k]


def lean(problem):
    return [list(steps) for steps in memory.lean_cut(problem.replace(lean=True))] if problem.needs_grad else None


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("name", "choose"), [("tilings", tilings), ("pairs", pairs), ("form", form), ("lean", lean)])
def test_it_is_what_it_was(name, choose, part):
    changed = [str(problem) for problem, choice in PROBLEMS[part::10] if choose(problem) != choice.get(name)]
    assert not changed
