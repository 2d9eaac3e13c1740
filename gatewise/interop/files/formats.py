"""The kinds of files, told by their names; and `convert_file`, which goes from one file to another."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gatewise.contract.errors import ArgumentError, CheckpointError, sentence
from gatewise.files import refuse_overwriting
from gatewise.interop.convert import arranged
from gatewise.interop.files import arrays, hdf5, keras_archive, tensorflow
from gatewise.interop.layouts import WeightLayout, layout_named
from gatewise.interop.search import find_stacks
from gatewise.interop.stacks import Stack


class FileKind(NamedTuple):
    """One kind of file.

    Attributes:
        suffix: What its name ends with.
        read: Returns the tensors by name.
        write: Writes stacks in a layout.
        layouts: Which layouts it can hold; None for any.
    """

    suffix: str
    read: Callable[[Path], dict[str, Tensor]]
    write: Callable[[Path, Sequence[Stack], WeightLayout], None]
    layouts: tuple[str, ...] | None = None


KINDS = (
    FileKind(".safetensors", arrays.read_safetensors, arrays.write_safetensors),
    FileKind(".npz", arrays.read_npz, arrays.write_npz),
    FileKind(".keras", keras_archive.read_keras, keras_archive.write_keras, ("keras",)),
    FileKind(".weights.h5", hdf5.read_hdf5, hdf5.write_weights_h5, ("keras",)),
    FileKind(".h5", hdf5.read_hdf5, hdf5.write_h5, ("keras", "keras-cudnn")),
    FileKind(".ckpt", tensorflow.read_checkpoint, tensorflow.write_checkpoint),
)
"""Every kind of file; the first whose suffix fits counts. A TensorFlow checkpoint may have any name."""


class Conversion(NamedTuple):
    """What `convert_file` did.

    Attributes:
        stacks: What was written.
        left: Tensors of the source that belong to no LSTM.
    """

    stacks: tuple[Stack, ...]
    left: tuple[str, ...]


def convert_file(
    source: Path | str,
    target: Path | str,
    source_layout: str | WeightLayout,
    target_layout: str | WeightLayout,
    *,
    layers: Sequence[str] = (),
    pair: bool = False,
    stack: bool = False,
) -> Conversion:
    """Write the LSTM weights of one file to another, in another layout.

    The kinds of the files are told by their names: `.safetensors`, `.npz`, `.keras`, `.weights.h5`, `.h5`, and
    TensorFlow checkpoints (`.ckpt`, or any name beside which there is an `.index`). The new file appears whole or not
    at all; no file is ever unpickled.

    Args:
        source: The file to read.
        target: The file to write; replaced when it exists, and not a file of the source.
        source_layout: Of the source, by name or as a value of your own.
        target_layout: Of the target.
        layers: As in `gatewise.interop.convert.convert`.
        pair: As there.
        stack: As there.

    Raises:
        CheckpointError: The source cannot be read, is truncated or of another kind; the target cannot be written.
        ArgumentError: No such layout; no LSTM in it; a target that cannot hold the layout or the layers, or that is the
            source.
        MissingExtra: h5py, safetensors or TensorFlow is needed and not installed.
    """
    source, target = Path(source), Path(target)
    source_layout, target_layout = layout_named(source_layout), layout_named(target_layout)
    kind = _kind_to_write(target, target_layout)
    for written in _written(target, kind):
        for read in _read(source):
            refuse_overwriting({"the target": written}, {"the source": read})
    found = find_stacks(read_file(source), source_layout)
    stacks = arranged(found.stacks, layers=layers, pair=pair, stack=stack)
    kind.write(target, stacks, target_layout)
    return Conversion(stacks, found.left)


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of any kind by name.

    Raises:
        CheckpointError: It cannot be read, is truncated or of another kind.
    """
    if tensorflow.checkpoint_prefix(path) is not None:
        return tensorflow.read_checkpoint(path)
    kind = _kind(path)
    if kind is None:
        raise CheckpointError(_unknown(path))
    try:
        path.open("rb").close()
        return kind.read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error


def _kind_to_write(path: Path, layout: WeightLayout) -> FileKind:
    kind = _kind(path)
    if kind is None:
        raise ArgumentError(_unknown(path))
    if kind.layouts is not None and layout.name not in kind.layouts:
        advice = "Write a .safetensors or .npz file instead."
        raise ArgumentError(
            sentence("the layout", f"{' or '.join(kind.layouts)} in a {kind.suffix} file", layout.name, advice)
        )
    return kind


def _written(target: Path, kind: FileKind) -> tuple[Path, ...]:
    return tensorflow.checkpoint_files(target) if kind.write is tensorflow.write_checkpoint else (target,)


def _read(source: Path) -> list[Path]:
    prefix = tensorflow.checkpoint_prefix(source)
    return [source] if prefix is None else list(prefix.parent.glob(f"{glob.escape(prefix.name)}.*"))


def _kind(path: Path) -> FileKind | None:
    return next((kind for kind in KINDS if path.name.endswith(kind.suffix)), None)


def _unknown(path: Path) -> str:
    known = ", ".join(kind.suffix for kind in KINDS)
    advice = ""
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        advice = "Pickles are not read: save the state_dict with safetensors.torch.save_file."
    return sentence("the file", f"one of {known}", path.name, advice)
