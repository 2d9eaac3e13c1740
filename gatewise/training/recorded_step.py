"""Files that record a training step with weights, state, batch and random states, for repeating it elsewhere."""

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
    """The inputs of a step in one process, other than the weights.

    Attributes:
        batch: The batch, a named tuple of tensors and JSON values.
        state: The state from the previous batch.
        random: The random states; see `gatewise.training.randomness`.
    """

    batch: Any
    state: Any
    random: dict[str, torch.Tensor]


def write_step(
    path: Path, model: nn.Module, own: RecordedStep | None, processes: Processes, facts: Mapping[str, Any]
) -> None:
    """Write a step of all processes; all processes must call it, and the first one writes.

    Args:
        path: The file.
        model: The model, with the weights before the step.
        own: The step of this process; None if it has no part in the failure.
        processes: The processes of the distributed training.
        facts: Further information, as JSON values.

    Raises:
        CheckpointError: The file cannot be written.
    """
    parts = processes.gather(None if own is None else _part(own))
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
    """Read a file that `write_step` wrote.

    Args:
        path: The file.
        device: The device for batch and state.
        kinds: The named tuple types that a batch can have, found by name; a batch of an unknown type becomes a plain
            named tuple.

    Returns:
        The step of each process that has one, by rank; the weights by name; the facts.

    Raises:
        CheckpointError: The file is missing, or is not such a file.
    """
    tensors, facts = read_tensors(path, STEP)
    try:
        steps = {
            int(rank): _whole(form, _below(f"process{rank}.", tensors), device, {kind.__name__: kind for kind in kinds})
            for rank, form in facts["steps"].items()
        }
    except KeyError as error:
        raise CheckpointError(f"{path} is incomplete: it lacks {error}. Use another copy.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written by gatewise: {error}. Use another copy."
        ) from error
    return steps, _below("model.", tensors), facts


def _part(step: RecordedStep) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    leaves, shape = flatten(step.state)
    tensors = {f"state.{index}": _copy(leaf) for index, leaf in enumerate(leaves)}
    tensors |= {f"random.{name}": state for name, state in step.random.items()}
    names = getattr(step.batch, "_fields", None)
    if names is None:  # not a named tuple, so that it can be recreated only from its own data
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
        # The file names the fields, but nothing is imported by a name in it.
        batch = (kinds.get(kind) or collections.namedtuple("Batch", fields))(*values)
    return RecordedStep(batch, unflatten(leaves, form["state"]), _below("random.", tensors))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Parts of a batch can be views of one text, which safetensors cannot store.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
