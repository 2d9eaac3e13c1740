"""Files of named tensors, which are written atomically, and read without executing any code in them.

The format is safetensors: a JSON header and raw numbers. Pickles are detected and refused, because loading one can run
any program that it contains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.files import irregular, replacing
from gatewise.training.json_values import finite_values

_HEADER = "gatewise"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of a file written by torch.save: a zip archive, or a bare pickle in old versions."""
_AFTER_SHORT_LENGTH = b"\0\0\0\0{"
"""Bytes 4 to 8 of a safetensors file: the upper bytes of the header's length, and the first byte of the header."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], kind: str, facts: Mapping[str, Any]) -> None:
    """Write tensors and facts atomically, so that `path` has either the old or the new content after any failure.

    The content is written to a temporary file and flushed to the disk; the file is then renamed. See `gatewise.files`.

    Args:
        path: The file to write.
        tensors: The tensors by name; they are copied to the CPU and made contiguous.
        kind: The kind of the file, which is checked when it is read.
        facts: Metadata as JSON values; floating-point numbers keep their bits, except that numbers that are not finite
            are read as None.

    The same tensors and facts give the same bytes.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written; `path` is unchanged.
    """
    library = _safetensors()
    content = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    # A single key, because safetensors writes several keys in random order.
    metadata = {_HEADER: json.dumps({"kind": kind, "facts": finite_values(facts)}, allow_nan=False)}
    with replacing(path) as temporary:
        try:
            # Written from the memory of the tensors, without a copy of the whole file.
            library.torch.save_file(content, temporary, metadata)
        except library.SafetensorError as error:
            raise OSError(str(error)) from error  # `replacing` says which file cannot be written


def read_tensors(path: Path, kind: str, device: torch.device | str = "cpu") -> tuple[dict[str, torch.Tensor], Any]:
    """Read a file that `write_tensors` wrote.

    Args:
        path: The file.
        kind: The expected kind of the file.
        device: The device of the tensors.

    Returns:
        The tensors by name, and the facts.

    Raises:
        CheckpointError: The file is missing, no regular file, a pickle, truncated, not gatewise's, or of another kind.
    """
    library = _safetensors()
    if reason := irregular(path):
        raise CheckpointError(reason)
    try:
        # Read at once: a run that is still training can replace the file at any time.
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
    except KeyError as error:  # of the table of dtypes that PyTorch has
        raise CheckpointError(
            f"{path} holds tensors of the dtype {error}, which cannot be read. Use another copy, or train again."
        ) from error
    except library.SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Use another copy, or train again."
        ) from error
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    if _HEADER not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but was not written by gatewise. Give the folder of a run of gatewise."
        )
    try:
        header = json.loads(metadata[_HEADER])
        found, facts = header["kind"], header["facts"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read. Use another copy.") from error
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
