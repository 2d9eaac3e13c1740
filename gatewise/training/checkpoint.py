"""Files of named tensors: written in one piece or not at all, read without running anything they contain.

The format is safetensors: a JSON header and raw numbers. Pickles are recognised and refused, because loading one may run
any program that is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gatewise.contract.errors import CheckpointError, MissingExtra

_FORMAT = "gatewise"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], kind: str, facts: Mapping[str, Any]) -> None:
    """Write tensors and facts so that `path` holds either the old content or the new, whatever happens meanwhile.

    The content goes to a temporary file in the same folder, is forced to the disk, and then takes the name.

    Args:
        path: Where to.
        tensors: By name; copied to the CPU, made contiguous.
        kind: What the file is, asked for again when it is read.
        facts: Anything that JSON can hold; floating-point numbers come back in the same bits.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written; `path` is as it was.
    """
    save = _safetensors().torch.save
    content = save(
        {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()},
        {"format": _FORMAT, "kind": kind, "facts": json.dumps(facts)},
    )
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file in one piece; see `write_tensors`."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}. What it held before is untouched. Make room or choose another folder."
        ) from error


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
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1):
        raise CheckpointError(
            f"{path} is a pickle (torch.save), which could run any program while it loads. Only safetensors are read; save the "
            "weights with safetensors.torch.save_file instead."
        )
    try:
        with library.safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except library.SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Take another copy, or train again."
        ) from error
    if metadata.get("format") != _FORMAT or "facts" not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but was not written by gatewise. Give a run folder of gatewise."
        )
    if metadata.get("kind") != kind:
        raise CheckpointError(f"{path} holds a {metadata.get('kind')}, not a {kind}. Give the right file.")
    try:
        return tensors, json.loads(metadata["facts"])
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is damaged: its header is not JSON ({error}). Take another copy.") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors():  # noqa: ANN202 - the type is the optional module itself
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingExtra.for_package("safetensors", "saving and loading models", "train") from None
    return safetensors
