"""PyTorch functions of a cell's step in stages: what is computed once, ahead of the steps, and in each step.

The functions are generated once for each cell, as Python source that calls PyTorch's operators. They are not meant for
autograd, which records the cell's own step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.cells.statement import before, learned
from gatewise.derivation.normalized import normalized
from gatewise.derivation.pointwise import at_least, larger
from gatewise.derivation.trace import traced
from gatewise.derivation.wide import Given, Stage, Writer, standardized, standardized_backward

Tensors = tuple[Tensor, ...]


class Stages(NamedTuple):
    """The functions of a cell's step.

    Attributes:
        once: A function that computes from the parameters [H] what depends on nothing else.
        ahead: A function that computes for steps what depends on the input sums [..., B, G*H] and on the result of
            `once`. Its result is empty if not all gates have separate sums.
        step: A function that computes a step. Its arguments are the sums of the gates, or the input sums [B, G*H]; the
            recurrent sums of the gates in `apart`, or None; a sequence of the states before the step, the hidden state
            first [B, H]; the masks of the step; the results of `ahead` for the step, and of `once`. It returns the
            states after the step.
        source: The Python source of the functions.
    """

    once: Callable[[Sequence[Tensor]], Tensors]
    ahead: Callable[[Tensor, Tensors], Tensors]
    step: Callable[..., Tensors]
    source: str


@functools.lru_cache(maxsize=256)
def stages_of(cell: Cell, masks: int = 0) -> Stages:
    """Return the functions of a cell's step.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
    """
    step = traced(cell)
    is_ahead = len(cell.apart) == len(cell.gates)
    given = given_values(cell, masks, Stage.AHEAD if is_ahead else Stage.STEP)
    writer = Writer(normalized(cell), given, {step.hidden, *step.after})
    results = [writer.value(name) for name in (step.hidden, *step.after)]
    once, ahead = writer.crossing(Stage.ONCE), writer.crossing(Stage.AHEAD)
    source = "\n".join(
        [
            once_source(cell, masks, writer),
            "def ahead(inputs, own):",
            *unpacked("inputs", len(cell.gates)),
            f"    {listed(once)} = own",
            *writer.lines(Stage.AHEAD),
            f"    return ({listed(ahead)})",
            "",
            "def step(inputs, recurrent, states, masks, ahead, own):",
            *(() if is_ahead else unpacked("inputs", len(cell.gates))),
            *(unpacked("recurrent", len(cell.apart)) if cell.apart else ()),
            f"    {listed(state_variables(cell))} = states",
            f"    {listed(mask_variables(masks))} = masks",
            f"    {listed(ahead)} = ahead",
            f"    {listed(once)} = own",
            *writer.lines(Stage.STEP),
            f"    return ({listed(results)})",
        ]
    )
    made = compiled(source)
    return Stages(made["once"], made["ahead"], made["step"], source)


def given_values(cell: Cell, masks: int, of_inputs: Stage, after: Sequence[str] = ()) -> Given:
    """Return the values that the functions of a cell get as arguments.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
        of_inputs: The stage of the input sums.
        after: The names of values that are given as `after_0`, `after_1` and so on.
    """
    count = len(cell.gates)
    packs, stages = {"inputs": cell.sums[:count]}, {"inputs": of_inputs}
    if cell.apart:
        packs["recurrent"], stages["recurrent"] = cell.sums[count:], Stage.STEP
    names = [learned(name) for name in cell.parameters]
    states = dict(zip(map(before, ("h", *cell.states)), state_variables(cell), strict=True))
    changing = dict(zip(names[len(names) - masks :], mask_variables(masks), strict=True))
    known = {name: f"after_{index}" for index, name in enumerate(after)}
    own = {name: f"own_{index}" for index, name in enumerate(names[: len(names) - masks])}
    values = states | changing | known
    stages |= dict.fromkeys(values.values(), Stage.STEP) | dict.fromkeys(own.values(), Stage.ONCE)
    return Given(packs, values | own, stages)


def once_source(cell: Cell, masks: int, writer: Writer) -> str:
    """Return the source of the function `once`."""
    own = listed([f"own_{index}" for index in range(len(cell.parameters) - masks)])
    lines = writer.lines(Stage.ONCE)
    return "\n".join(
        ["def once(own):", f"    {own} = own", *lines, f"    return ({listed(writer.crossing(Stage.ONCE))})", ""]
    )


def state_variables(cell: Cell) -> list[str]:
    """Return the variables of the states before a step, the hidden state first."""
    return [f"state_{index}" for index in range(1 + len(cell.states))]


def mask_variables(masks: int) -> list[str]:
    """Return the variables of masks."""
    return [f"mask_{index}" for index in range(masks)]


def unpacked(variable: str, lanes: int) -> list[str]:
    """Return the line that views a variable [..., n*H] as a pack of n lanes."""
    # The method `unflatten` is written in Python, and slower than `view`.
    return [f"    {variable} = {variable}.view(*{variable}.shape[:-1], {lanes}, {variable}.shape[-1] // {lanes})"]


def listed(names: Sequence[str]) -> str:
    """Return the source of a tuple of names without its parentheses; it unpacks a tuple, too."""
    return "".join(f"{name}, " for name in names).rstrip() or "()"


def compiled(source: str) -> dict[str, Any]:
    """Return the functions that a source defines, by name."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "larger": larger,
        "at_least": at_least,
        "logsigmoid": torch.nn.functional.logsigmoid,
        "sigmoid_of_opposite": lambda value: torch.sigmoid(-value),
        "standardized": standardized,
        "standardized_backward": standardized_backward,
    }
    exec(compile(source, "<functions of a recurrent cell>", "exec"), namespace)
    return namespace
