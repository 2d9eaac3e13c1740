"""Files of named tensors: `.npz` and `.safetensors`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gatewise.contract.errors import DAMAGED_ARCHIVE, ArgumentError, CheckpointError, MissingExtra, sentence
from gatewise.files import replacing, write_bytes
from gatewise.interop.convert import as_tensor
from gatewise.interop.description import Content
from gatewise.interop.layouts import WeightLayout
from gatewise.interop.stacks import Stack, named_tensors

_MOST_EXPANSION = 100
"""The largest factor by which weights are compressed; zeros alone are compressed more."""
_ALWAYS_READ = 2**26
"""The number of bytes that are read whatever their factor is, because they take no time."""


def read_npz(path: Path) -> Content:
    """Return the arrays of a `numpy.savez` file, in the order of the file; non-numeric arrays are left out."""
    try:
        with np.load(path, allow_pickle=False) as content:
            for member in content.zip.infolist():
                refuse_expansion(path, member.filename, member.compress_size, member.file_size)
            members = {name: content[name] for name in content.files}
    except CheckpointError:
        raise
    except DAMAGED_ARCHIVE as error:
        raise CheckpointError(
            f"{path} is truncated or not a file of numpy.savez ({error}). Take another copy."
        ) from error
    # numpy.savez also accepts strings, and NumPy returns other members of a zip archive as bytes.
    arrays = {
        name: member for name, member in members.items() if getattr(member, "dtype", np.dtype("S")).kind in "fiub"
    }
    if not arrays:
        raise CheckpointError(f"{path} is not a file of numpy.savez (no array in it). Take another copy.")
    return Content({name: as_tensor(name, array) for name, array in arrays.items()})


def write_npz(path: Path, stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a file for `numpy.load`."""
    content = numpy_arrays(stacks, layout)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **content)


def numpy_arrays(stacks: Sequence[Stack], layout: WeightLayout) -> dict[str, np.ndarray]:
    """Return the tensors of stacks as NumPy arrays.

    Raises:
        ArgumentError: Their dtype is bfloat16, which NumPy does not have.
    """
    tensors = named_tensors(stacks, layout)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            advice = "Write a .safetensors file, or convert the weights to float32 first."
            raise ArgumentError(sentence(name, "of a dtype that NumPy has", tensor.dtype, advice))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def read_safetensors(path: Path) -> Content:
    """Return the tensors of a `.safetensors` file sorted by name, because the file's own order is arbitrary."""
    library = _safetensors()
    try:
        tensors = library.torch.load(path.read_bytes())
    except KeyError as error:  # of the table of dtypes that PyTorch has
        raise CheckpointError(
            f"{path} holds tensors of the dtype {error}, which cannot be read. Convert that tensor first."
        ) from error
    except library.SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}). Take another copy.") from error
    return Content({name: tensors[name] for name in sorted(tensors, key=natural)})


def write_safetensors(path: Path, stacks: Sequence[Stack], layout: WeightLayout) -> None:
    """Write a file for `safetensors.torch.load_file`."""
    library = _safetensors()
    content = {name: tensor.contiguous() for name, tensor in named_tensors(stacks, layout).items()}
    write_bytes(path, library.torch.save(content, {"layout": layout.name}))


def refuse_expansion(path: Path, part: str, stored: int, size: int) -> None:
    """Raise if a part of a file would become far larger when it is read, as no weights do.

    A few megabytes of compressed zeros would otherwise take minutes and all memory.

    Args:
        path: The path of the file, for the message.
        part: The name of the part.
        stored: The number of its bytes in the file.
        size: The number of its bytes in memory.

    Raises:
        CheckpointError: The part would become more than 100 times as large, and larger than 64 MiB.
    """
    if size > max(_MOST_EXPANSION * stored, _ALWAYS_READ):
        raise CheckpointError(
            f"{path} is damaged or not a file of weights: {part} has {stored:,} bytes in the file and {size:,} when it "
            f"is read, more than {_MOST_EXPANSION} times as many. Take another copy."
        )


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names as numbers: lstm, lstm_2, lstm_10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _safetensors():  # noqa: ANN202 - the type is the optional module itself
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingExtra.for_package("safetensors", "a .safetensors file", "train") from None
    return safetensors
