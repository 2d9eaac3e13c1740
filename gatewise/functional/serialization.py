"""The state between the passes as tensors and JSON values, for a file or another process, and rebuilt from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gatewise._version import __version__
from gatewise.cells import LSTM, cell_named
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, Result, Saved

_FIELDS = [field.name for field in dataclasses.fields(Problem) if field.init]


def take_apart(saved: Saved) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a `Saved` as tensors by name and a dictionary of values that JSON can hold.

    PyTorch's native loop keeps an autograd graph, which no file can hold: once it is rebuilt, its backward pass repeats
    the forward pass. So does a backward pass whose single-use memory was consumed already.

    Args:
        saved: The value that `gatewise.functional.forward` returned.

    Returns:
        The tensors, which share no memory with `saved`, and the other values for `rebuild`.

    Raises:
        ModifiedInPlace: An input or the output was changed since the forward pass.
    """
    saved.check_unmodified()
    inputs, result = saved.inputs, saved.result
    kept = () if saved.keeps_a_graph else result.kept
    tensors = {name: getattr(inputs, name) for name in ("x", "h0", "c0", "lengths", "batch_sizes", "resets")}
    tensors |= {name: getattr(result, name) for name in ("y", "h_n", "c_n")}
    for name, group in (("weight", inputs.weights), ("mask", inputs.masks), ("kept", kept)):
        tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(group)}
    problem = {name: getattr(saved.problem, name) for name in _FIELDS}
    problem |= {"dtype": str(saved.problem.dtype).removeprefix("torch."), "layout": saved.problem.layout.name}
    problem |= {"cell": saved.problem.cell.name}
    facts = {
        "kernel": saved.kernel,
        "problem": problem,
        "counts": {"weight": len(inputs.weights), "mask": len(inputs.masks), "kept": len(kept)},
        "spent": saved.spent or len(kept) < len(result.kept),
        "made_by": _made_by(inputs.x.device),
    }
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return copies, facts


def rebuild(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Saved:
    """Return the `Saved` that `take_apart` was given, on the device of the tensors.

    The tensors that a kernel keeps are valid for one device and one version of the software. With any other, `spent` is
    True and the backward pass repeats the forward pass.

    Args:
        tensors: The tensors from `take_apart`, on one device of any kind.
        facts: The other values from `take_apart`.

    Raises:
        KeyError, TypeError, AttributeError: A value is missing, or is not one that `take_apart` returned.
    """
    problem = dict(facts["problem"])
    problem |= {"dtype": getattr(torch, problem["dtype"]), "layout": Layout[problem["layout"]]}
    problem |= {"cell": cell_named(problem.get("cell", LSTM.name))}
    groups = {
        name: tuple(tensors[f"{name}.{index}"] for index in range(count)) for name, count in facts["counts"].items()
    }
    inputs = Inputs(
        tensors["x"],
        tensors["h0"],
        tensors["c0"],
        groups["weight"],
        tensors.get("lengths"),
        tensors.get("batch_sizes"),
        groups["mask"],
        tensors.get("resets"),
    )
    result = Result(tensors["y"], tensors["h_n"], tensors["c_n"], groups["kept"])
    elsewhere = dict(facts["made_by"]) != _made_by(inputs.x.device)
    return Saved(facts["kernel"], Problem(**problem), inputs, result, spent=bool(facts["spent"]) or elsewhere)


def _made_by(device: torch.device) -> dict[str, Any]:
    probed = Device.probe(device)
    return {
        "device": device.type if device.type == "cpu" else probed.name,
        "gatewise": __version__,
        "torch": torch.__version__,
        "cudnn": probed.cudnn_version,
    }
