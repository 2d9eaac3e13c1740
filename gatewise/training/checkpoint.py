"""Files of named tensors: written in one piece or not at all, read without running anything they contain.

The format is safetensors: a JSON header and raw numbers. Pickles are recognised and refused, because loading one may
run any program that is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.files import write_bytes
from gatewise.training.json_values import finite_values

_HEADER = "gatewise"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of what torch.save writes: a zip archive, or in old versions a bare pickle."""
_AFTER_SHORT_LENGTH = b"\0\0\0\0{"
"""Bytes 4 to 8 of safetensors: the length of the header, whose first bytes may be anything, ends; the header begins."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], kind: str, facts: Mapping[str, Any]) -> None:
    """Write tensors and facts so that `path` holds either the old content or the new, whatever happens meanwhile.

    The content goes to a temporary file, is forced to the disk, and then takes the name; see `gatewise.files`.

    Args:
        path: Where to.
        tensors: By name; copied to the CPU, made contiguous.
        kind: What the file is, asked for again when it is read.
        facts: Anything that JSON can hold; floating-point numbers come back in the same bits, those that are not finite
            as None.

    The same tensors and facts make the same bytes.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written; `path` is as it was.
    """
    save = _safetensors().torch.save
    content = save(
        {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()},
        # A single key: their order in the file is random.
        {_HEADER: json.dumps({"kind": kind, "facts": finite_values(facts)}, allow_nan=False)},
    )
    write_bytes(path, content)


def read_tensors(path: Path, kind: str, device: torch.device | str = "cpu") -> tuple[dict[str, torch.Tensor], Any]:
    """Read what `write_tensors` wrote.

    Args:
        path: The file.
        kind: What it must be.
        device: Where the tensors go.

    Returns:
        The tensors by name, and the facts.

    Raises:
        CheckpointError: The file is missing, a pickle, truncated, not from gatewise, or of another kind.
    """
    library = _safetensors()
    try:
        # One look at the file: a run that is still training may put a new one in its place at any moment.
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    if content.startswith(_PICKLES) and content[4:9] != _AFTER_SHORT_LENGTH:
        raise CheckpointError(
            f"{path} is a pickle (torch.save), which could run any program while it loads. Only safetensors are read: "
            "save the weights with safetensors.torch.save_file instead."
        )
    try:
        tensors = {name: tensor.to(device) for name, tensor in library.torch.load(content).items()}
    except library.SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Take another copy, or train again."
        ) from error
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    if _HEADER not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but was not written by gatewise. Give the folder of a run of gatewise."
        )
    try:
        header = json.loads(metadata[_HEADER])
        found, facts = header["kind"], header["facts"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read. Take another copy.") from error
    if found != kind:
        raise CheckpointError(f"{path} holds a {found}, not a {kind}. Give the right file.")
    return tensors, facts


def _safetensors():  # noqa: ANN202 - the type is the optional module itself
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingExtra.for_package("safetensors", "saving and loading models", "train") from None
    return safetensors
