"""Conversion of a training run to tensors and facts, and back to the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import MEMORY_SHORTAGE, CheckpointError, sentence
from gatewise.training.averaging import WeightAverage
from gatewise.training.carried import flatten, indices_of, unflatten
from gatewise.training.history import Evaluation
from gatewise.training.processes import Processes
from gatewise.training.randomness import random_states, restore_random_states
from gatewise.training.schedule import Schedule


@dataclasses.dataclass(slots=True)
class Run:
    """The complete state of a training run.

    Attributes:
        model: The model, with the weights.
        optimizer: The optimizer, with the moments.
        schedule: The learning rate schedule.
        average: The average of the weights.
        loss_sum: The sum of the training loss since the last evaluation, in nats, float64 on the device.
        loss_tokens: The number of tokens in that sum.
        epoch: The number of completed epochs.
        batch: The number of completed batches in this epoch.
        step: The number of optimizer steps.
        carried: The model's state after the last batch.
        seconds: The time so far, in seconds.
        segment_seconds: The training time since the last evaluation, in seconds.
        history: All evaluations.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: WeightAverage
    loss_sum: torch.Tensor
    loss_tokens: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    carried: Any = None
    seconds: float = 0.0
    segment_seconds: float = 0.0
    history: list[Evaluation] = dataclasses.field(default_factory=list)


_WHOLE = ("epoch", "batch", "step")
_COUNTERS = ("loss_tokens", "epoch", "batch", "step", "seconds", "segment_seconds")


def capture(
    run: Run, processes: Processes, identity: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the contents of a checkpoint; all processes must call it, and the first one gets the complete result.

    Args:
        run: The run.
        processes: The processes; each has its own random state and carried state.
        identity: Values that must be the same when the run is resumed.

    Returns:
        The tensors by name, and facts as JSON values.
    """
    leaves, shape = flatten(run.carried)
    own = {f"random.{name}": state for name, state in random_states(processes.device).items()}
    own |= {f"carried.{index}": leaf.cpu() for index, leaf in enumerate(leaves)}
    own["loss_sum"] = run.loss_sum.cpu()
    tensors = {
        f"process{rank}.{name}": each for rank, part in enumerate(processes.gather(own)) for name, each in part.items()
    }
    tensors |= {f"model.{name}": tensor for name, tensor in weights_of(run.model).items()}
    tensors |= {f"average.{index}": tensor for index, tensor in enumerate(run.average.values)}
    optimizer = run.optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, slots in optimizer["state"].items():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    facts = {
        "identity": dict(identity),
        "processes": processes.count,
        "carried": shape,
        "optimizer_scalars": scalars,
        "schedule": run.schedule.facts(),
        "average": run.average.facts(),
        "history": [dataclasses.asdict(evaluation) for evaluation in run.history],
        **{name: getattr(run, name) for name in _COUNTERS},
    }
    return tensors, facts


def restore(
    run: Run,
    processes: Processes,
    identity: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    source: object = "the checkpoint",
) -> None:
    """Restore a run from the contents of a checkpoint that `capture` returned.

    Args:
        run: The run.
        processes: The processes; each has its own random state and carried state.
        identity: Values that must be the same as when the checkpoint was made.
        tensors: The tensors of the checkpoint by name.
        facts: The facts of the checkpoint.
        source: Where they come from, such as the path of a file, for error messages.

    Raises:
        CheckpointError: The checkpoint is incomplete, or of another model, data or number of processes.
    """
    with _explained(source):
        _check_same(processes, identity, facts, source)
        load_weights(run.model, {name: tensors[f"model.{name}"] for name in weights_of(run.model)}, source)
        _restore_optimizer(run.optimizer, tensors, facts["optimizer_scalars"])
        for index, value in enumerate(run.average.values):
            value.copy_(tensors[f"average.{index}"])
        run.schedule.restore(facts["schedule"])
        run.average.restore(facts["average"])
        run.history[:] = [_evaluation(entry) for entry in facts["history"]]
        for name, count in _counters(facts).items():
            setattr(run, name, count)
        prefix = f"process{processes.rank}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        run.loss_sum.copy_(own["loss_sum"])
        run.carried = unflatten(
            {index: own[f"carried.{index}"].to(processes.device) for index in indices_of(facts["carried"])},
            facts["carried"],
        )
        random = {name.removeprefix("random."): each for name, each in own.items() if name.startswith("random.")}
        restore_random_states(random, processes.device)


def check(processes: Processes, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], source: object) -> None:
    """Check the contents of a checkpoint as far as this is possible without the model of the run.

    Args:
        processes: The processes.
        tensors: The tensors of the checkpoint by name.
        facts: The facts of the checkpoint.
        source: Where they come from, such as the path of a file, for error messages.

    Raises:
        CheckpointError: The checkpoint is incomplete, or of another number of processes.
    """
    with _explained(source):
        _check_same(processes, {}, facts, source)
        _counters(facts)
        for entry in facts["history"]:
            _evaluation(entry)
        for name in ("optimizer_scalars", "schedule", "average", "carried"):
            facts[name]
        for rank in range(processes.count):
            tensors[f"process{rank}.loss_sum"]


@contextlib.contextmanager
def _explained(source: object) -> Iterator[None]:
    """Say of errors in the block that a checkpoint is damaged or incomplete."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except KeyError as error:
        raise CheckpointError(
            f"{source} is incomplete or of another model: it lacks {error.args[0]}. Start a new run."
        ) from error
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if "CUDA" in str(error) or MEMORY_SHORTAGE.search(str(error)):  # the file may be undamaged
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise CheckpointError(f"{source} is damaged: {reason}. Use another copy, or start a new run.") from error


def _counters(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far a run was at a checkpoint, by the names of the attributes of `Run`."""
    for name in _COUNTERS:
        kinds = (int,) if name in _WHOLE else (int, float)
        if type(facts[name]) not in kinds:
            raise TypeError(sentence(name, "a whole number" if name in _WHOLE else "a number", repr(facts[name])))
    return {name: facts[name] for name in _COUNTERS}


def _check_same(processes: Processes, identity: Mapping[str, Any], facts: Mapping[str, Any], source: object) -> None:
    """Check that a checkpoint was made with these values by as many processes."""
    for name, value in identity.items():
        saved = facts.get("identity", {}).get(name)
        if saved != value:
            raise CheckpointError(
                f"{source} was made with another {name}: {saved} there, {value} here. Resume with the same, or "
                "start a new run in another folder."
            )
    if facts["processes"] != processes.count:
        raise CheckpointError(
            f"{source} was made by {facts['processes']} processes in total, here are {processes.count}. "
            f"Resume with as many; on one machine: torchrun --nproc-per-node {facts['processes']}"
        )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; a shared tensor occurs only once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], source: object = "the checkpoint") -> None:
    """Copy tensors into a model that has exactly these names and shapes.

    Args:
        model: The model.
        tensors: The tensors by name.
        source: Where they come from, such as the path of a file, for error messages.

    Raises:
        CheckpointError: The names or shapes differ; the message has the first difference.
    """
    own = weights_of(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        where = "lacks" if name in own else "has, beyond this model,"
        raise CheckpointError(
            f"{source} is of another model: it {where} {name}. Load it into the model that it was saved from."
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{name} is {list(tensors[name].shape)} there, {list(tensor.shape)} here"
            raise CheckpointError(f"{source} is of another model: {shapes}. Load it into a model of the same sizes.")
        tensor.copy_(tensors[name])


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    numbers = {name: value for name, value in entry.items() if name != "scores"}
    for name, value in {**numbers, **entry["scores"]}.items():
        if value is not None and not isinstance(value, int | float):  # null for one that is not finite
            raise TypeError(sentence(name, "a number", repr(value)))
    # A score that was NaN is null in the file.
    scores = {name: math.nan if score is None else score for name, score in entry["scores"].items()}
    return Evaluation(**{**entry, "scores": scores})


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {int(index): dict(slots) for index, slots in scalars.items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".", 2)
            state.setdefault(int(index), {})[slot] = tensor
    if any(slots.keys() != state[min(state)].keys() for slots in state.values()):
        raise ValueError("it does not hold the same state of the optimizer for every weight")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, slots in state.items():
        for slot, value in slots.items():
            shape = torch.Size() if slot == "step" else weights[index].shape
            if isinstance(value, torch.Tensor) and (value.shape != shape or not value.is_floating_point()):
                raise ValueError(f"optimizer.{index}.{slot} is {value.dtype} {list(value.shape)}, not {list(shape)}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
