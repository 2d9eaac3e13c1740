"""A step in a file: weights, state, batch and random states, so that it can be repeated anywhere."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import CheckpointError
from gatewise.training.carried import flatten, indices_of, unflatten
from gatewise.training.checkpoint import read_tensors, write_tensors
from gatewise.training.processes import Processes
from gatewise.training.snapshot import weights_of

STEP = "step"


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """What a step of one process began with, apart from the weights.

    Attributes:
        batch: A named tuple of tensors and JSON values.
        state: What was carried into it.
        random: The random states; see `gatewise.training.randomness`.
    """

    batch: Any
    state: Any
    random: dict[str, torch.Tensor]


def write_step(
    path: Path, model: nn.Module, own: RecordedStep | None, processes: Processes, facts: Mapping[str, Any]
) -> None:
    """Write a step of all processes; every process must call it, the first one writes.

    Args:
        path: The file to write.
        model: Its weights are those before the step.
        own: The step of this process; None where it has nothing to show.
        processes: This process among its fellows.
        facts: What else to say: JSON values.

    Raises:
        CheckpointError: The file cannot be written.
    """
    parts = processes.gathered(None if own is None else _part(own))
    if not processes.first:
        return
    tensors = {f"model.{name}": each for name, each in weights_of(model).items()}
    forms: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        if part is not None:
            tensors |= {f"process{rank}.{name}": each for name, each in part[0].items()}
            forms[str(rank)] = part[1]
    write_tensors(path, tensors, STEP, {**facts, "steps": forms})


def read_step(
    path: Path, device: torch.device, kinds: Iterable[type] = ()
) -> tuple[dict[int, RecordedStep], dict[str, torch.Tensor], Any]:
    """Read what `write_step` wrote.

    Args:
        path: The file.
        device: The device that batch and state go to.
        kinds: Named tuples that a batch may be, found by name; a batch of another kind becomes a plain named tuple.

    Returns:
        The step of each process that has one, by rank; the weights by name; the facts.

    Raises:
        CheckpointError: The file is missing, or not such a file.
    """
    tensors, facts = read_tensors(path, STEP)
    try:
        steps = {
            int(rank): _whole(form, _below(f"process{rank}.", tensors), device, {kind.__name__: kind for kind in kinds})
            for rank, form in facts["steps"].items()
        }
    except KeyError as error:
        raise CheckpointError(f"{path} is incomplete: it lacks {error}. Take another copy.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written by gatewise: {error}. Take another copy."
        ) from error
    return steps, _below("model.", tensors), facts


def _part(step: RecordedStep) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    leaves, shape = flatten(step.state)
    tensors = {f"state.{index}": _copy(leaf) for index, leaf in enumerate(leaves)}
    tensors |= {f"random.{name}": state for name, state in step.random.items()}
    names = getattr(step.batch, "_fields", None)
    if names is None:  # a batch of another kind, which only its own data can make again
        return tensors, {"state": shape, "batch": None}
    fields = {name: getattr(step.batch, name) for name in names}
    tensors |= {f"batch.{name}": _copy(each) for name, each in fields.items() if isinstance(each, torch.Tensor)}
    others = {name: None if isinstance(each, torch.Tensor) else each for name, each in fields.items()}
    return tensors, {"state": shape, "batch": {"kind": type(step.batch).__name__, "fields": others}}


def _whole(
    form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device, kinds: Mapping[str, type]
) -> RecordedStep:
    leaves = {index: tensors[f"state.{index}"].to(device) for index in indices_of(form["state"])}
    batch = None
    if form["batch"] is not None:
        kind, fields = form["batch"]["kind"], form["batch"]["fields"]
        there = {name.removeprefix("batch."): each.to(device) for name, each in tensors.items() if "batch." in name}
        values = [there.get(name, other) for name, other in fields.items()]
        # The file says which fields there are, but no name in it is imported.
        batch = (kinds.get(kind) or collections.namedtuple("Batch", fields))(*values)
    return RecordedStep(batch, unflatten(leaves, form["state"]), _below("random.", tensors))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Parts of a batch may be views of one text, which a file of tensors refuses.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
