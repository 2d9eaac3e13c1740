"""The kinds of weight files, recognised by their names, and `convert_file`, which converts one file to another."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gatewise.contract.errors import ArgumentError, CheckpointError, DtypeError, ShapeError, sentence
from gatewise.files import irregular, refuse_overwriting
from gatewise.interop.convert import arranged
from gatewise.interop.description import Content
from gatewise.interop.files import arrays, hdf5, keras_archive, tensorflow
from gatewise.interop.layouts import WeightLayout, adding_to_forget, layouts_of_conversion, with_heads
from gatewise.interop.search import find_stacks
from gatewise.interop.stacks import Stack


class FileKind(NamedTuple):
    """A kind of file.

    Attributes:
        suffix: The suffix of its file name.
        read: The function that returns the content.
        write: The function that writes stacks in a layout.
        layouts: The layouts that it can hold; None for any.
        ordered: Whether the order of the layers in the file is that of a model.
        not_loaded: The layouts whose system does not load such files.
    """

    suffix: str
    read: Callable[[Path], Content]
    write: Callable[[Path, Sequence[Stack], WeightLayout], None]
    layouts: tuple[str, ...] | None = None
    ordered: bool = False
    not_loaded: tuple[str, ...] = ()


_KERAS = ("keras", "keras-gru", "keras-rnn")

KINDS = (
    FileKind(".safetensors", arrays.read_safetensors, arrays.write_safetensors),
    FileKind(".npz", arrays.read_npz, arrays.write_npz),
    FileKind(".keras", keras_archive.read_keras, keras_archive.write_keras, _KERAS, ordered=True),
    FileKind(".weights.h5", hdf5.read_hdf5, hdf5.write_weights_h5, _KERAS, ordered=True),
    FileKind(".h5", hdf5.read_hdf5, hdf5.write_h5, (*_KERAS, "keras-cudnn", "keras-cudnn-gru"), ordered=True),
    FileKind(
        ".ckpt",
        tensorflow.read_checkpoint,
        tensorflow.write_checkpoint,
        not_loaded=(*_KERAS, "keras-cudnn", "keras-cudnn-gru", "tfa-layer-norm"),
    ),
)
"""All kinds of files; the first one whose suffix matches applies. A TensorFlow checkpoint may have any name."""


class Conversion(NamedTuple):
    """The result of `convert_file`.

    Attributes:
        stacks: The stacks that were written.
        left: The names of the source's tensors that belong to no layer of its layout.
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
    forget_bias: float | None = None,
    heads: int | None = None,
) -> Conversion:
    """Convert the weights of recurrent layers in a file to another file and layout.

    The kind of a file is recognised by its name: `.safetensors`, `.npz`, `.keras`, `.weights.h5`, `.h5`, and TensorFlow
    checkpoints (`.ckpt`, or any name for which an `.index` file exists). The new file is written atomically; no file
    is ever unpickled.

    Args:
        source: The file to read.
        target: The file to write. It is replaced if it exists, and must not be a file of the source.
        source_layout: The layout of the source: the name of a layout, or a `WeightLayout`.
        target_layout: The layout of the target: the name of a layout, or a `WeightLayout`. One of the two may be
            "gatewise"; see `gatewise.interop.convert.convert`.
        layers: The names of the layers to convert; see `gatewise.interop.convert.convert`.
        pair: Whether to combine layers of one direction; see `gatewise.interop.convert.convert`.
        stack: Whether to combine the layers to one stack; see `gatewise.interop.convert.convert`.
        forget_bias: The constant of TensorFlow 1; see `gatewise.interop.convert.convert`.
        heads: The number of heads; see `gatewise.interop.convert.convert`.

    Raises:
        CheckpointError: The source cannot be read, is truncated or of another kind; or the target cannot be written.
        ArgumentError: There is no such layout; the layouts are of different cells; no layer of the source is in its
            layout; or the target cannot hold the layout or the layers, or is the source.
        ShapeError: The shapes of a layer's tensors do not fit each other.
        DtypeError: The weights of a layer are not floating-point numbers of 16, 32 or 64 bits.
        MissingExtra: h5py, safetensors or TensorFlow is required and not installed.
    """
    source, target = Path(source), Path(target)
    source_layout, target_layout = layouts_of_conversion(source_layout, target_layout)
    source_layout, target_layout = adding_to_forget(source_layout, target_layout, forget_bias)
    target_layout = with_heads(target_layout, heads)
    kind = _kind_to_write(target, target_layout)
    for written in _written(target, kind):
        for read in _read(source):
            refuse_overwriting({"the target": written}, {"the source": read})
    content = read_content(source)
    try:
        found = find_stacks(content.tensors, source_layout, layers, content.are_apart)
    except (CheckpointError, DtypeError, ShapeError) as error:
        raise type(error)(f"{source}: {error}") from error
    stacks = arranged(found.stacks, content, source_layout, layers=layers, pair=pair, stack=stack, ordered=kind.ordered)
    kind.write(target, stacks, target_layout)
    return Conversion(stacks, found.left)


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of any kind, by name; see `read_content`."""
    return read_content(path).tensors


def read_content(path: Path) -> Content:
    """Return the tensors of a file of any kind, and what it says of its layers.

    Raises:
        CheckpointError: The file cannot be read, is truncated or of another kind.
    """
    if tensorflow.checkpoint_prefix(path) is not None:
        return tensorflow.read_checkpoint(path)
    kind = _kind(path)
    if kind is None:
        raise CheckpointError(_unknown(path))
    if reason := irregular(path):
        raise CheckpointError(reason)
    try:
        path.open("rb").close()
        return kind.read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error


def _kind_to_write(path: Path, layout: WeightLayout) -> FileKind:
    kind = _kind(path)
    if kind is None:
        raise ArgumentError(_unknown(path, "the target"))
    if kind.layouts is not None and layout.name not in kind.layouts:
        advice = "Write a .safetensors or .npz file instead."
        raise ArgumentError(
            sentence("the layout", f"{' or '.join(kind.layouts)} in a {kind.suffix} file", layout.name, advice)
        )
    if layout.name in kind.not_loaded:
        advice = (
            "Keras finds variables by the objects of a model: write a .weights.h5, .keras, .safetensors or .npz file."
        )
        raise ArgumentError(sentence("the layout", f"one of TensorFlow 1 in a {kind.suffix} file", layout.name, advice))
    return kind


def _written(target: Path, kind: FileKind) -> tuple[Path, ...]:
    return tensorflow.checkpoint_files(target) if kind.write is tensorflow.write_checkpoint else (target,)


def _read(source: Path) -> list[Path]:
    prefix = tensorflow.checkpoint_prefix(source)
    return [source] if prefix is None else list(prefix.parent.glob(f"{glob.escape(prefix.name)}.*"))


def _kind(path: Path) -> FileKind | None:
    return next((kind for kind in KINDS if path.name.endswith(kind.suffix)), None)


def _unknown(path: Path, what: str = "the file") -> str:
    known = ", ".join(kind.suffix for kind in KINDS)
    advice = ""
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        advice = "Pickles are not read: save the state_dict with safetensors.torch.save_file."
    return sentence(what, f"a name that ends in one of {known}", path.name, advice)
