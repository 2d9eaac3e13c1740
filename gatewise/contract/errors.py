"""The errors that gatewise raises, and the form of their sentences.

    GatewiseError
    ├── ShapeError            (ValueError, RuntimeError)  a rank, size or length does not fit
    ├── DtypeError            (these two and TypeError)   a dtype does not fit
    ├── DeviceError           (ValueError, RuntimeError)  tensors are on incompatible devices
    ├── ArgumentError         (ValueError, TypeError)     any other argument has a wrong type or is out of range
    │   └── FolderError                                   a folder cannot take files, as its disk or its content is now
    ├── KernelRefused         (ValueError)                the named kernel cannot run this problem
    ├── UnexpectedKernel      (RuntimeError)              a call ran on a different kernel than the decision says
    ├── ExchangeTimeout       (RuntimeError)              a CUDA kernel waited too long for data of another thread block
    ├── ModifiedInPlace       (RuntimeError)              a tensor changed between forward and backward pass
    ├── NotFinite             (ArithmeticError)           a loss or gradient is infinite or NaN
    │   ├── KernelFault                                   it is finite with the reference kernels
    │   └── TrainingDiverged                              it is not finite with the reference kernels either
    ├── ProcessFailed         (RuntimeError)              another process of a distributed training failed or exited
    ├── MissingExtra          (ImportError)               an optional dependency is not installed
    ├── OutOfMemoryPredicted  (MemoryError)               the call does not fit in memory, by prediction
    ├── CorpusError           (ValueError)                a text cannot be used for training
    ├── DataError             (ValueError)                sequences cannot be used for training
    └── CheckpointError       (ValueError)                a file is no checkpoint of this model, or cannot be written

Some errors have several built-in base classes because `torch.nn.LSTM` raises one or the other for some of the same
mistakes, so that programs that catch it keep working. A cell with a wrong statement raises
`gatewise.cells.StatementError`, a TypeError.
"""

from __future__ import annotations

import re
import struct
import sys
import tokenize
import zipfile
import zlib


class GatewiseError(Exception):
    """The base class of all errors that gatewise raises."""


class ShapeError(GatewiseError, ValueError, RuntimeError):
    """A rank, a size or a length does not fit."""


class DtypeError(GatewiseError, TypeError, ValueError, RuntimeError):
    """A dtype does not fit."""


class DeviceError(GatewiseError, ValueError, RuntimeError):
    """Tensors are on incompatible devices."""


class ArgumentError(GatewiseError, ValueError, TypeError):
    """An argument has a wrong type or is out of range."""


class FolderError(ArgumentError):
    """A folder cannot take the files of a run: its disk is full or not writable, or it has other files or a run."""


class KernelRefused(GatewiseError, ValueError):
    """The named kernel cannot run this problem, or no kernel has that name.

    The message is the printed `Decision`, which lists the refusals of every kernel.
    """


class SlowerKernelWarning(UserWarning):
    """The warning that options or sizes leave only a slow kernel, which would otherwise run in silence."""


class UnexpectedKernel(GatewiseError, RuntimeError):
    """A call ran on a different kernel than the decision says, or on an unknown one.

    The message names the layer, the kernel of the decision and the kernel that ran; the report of `gatewise.verify`
    follows.
    """


class ExchangeTimeout(GatewiseError, RuntimeError):
    """A thread block of a CUDA kernel waited for data of another one that never arrived.

    The outputs that depend on the data are NaN. As with every error of asynchronous work on a GPU, a later call raises
    the error than the one that caused it.
    """


class ModifiedInPlace(GatewiseError, RuntimeError):
    """A tensor that an explicit backward pass reads was modified in place after the forward pass.

    In calls that autograd differentiates, autograd itself raises a `RuntimeError` for this.
    """


class NotFinite(GatewiseError, ArithmeticError):
    """A loss, a gradient or a state is infinite or NaN, for an unknown reason."""


class KernelFault(NotFinite):
    """A training step that was not finite is finite with the reference kernels, so a kernel computed a wrong result."""


class TrainingDiverged(NotFinite):
    """A training step is not finite with the reference kernels either, so the training diverged."""


class ProcessFailed(GatewiseError, RuntimeError):
    """Another process of a distributed training failed, or exited without an error."""


class MissingExtra(GatewiseError, ImportError):
    """An optional dependency is not installed; the message contains the pip command."""

    @classmethod
    def for_package(cls, package: str, purpose: str, extra: str) -> MissingExtra:
        """Return the error for a missing package, with its purpose and the pip command."""
        return cls(f"{purpose} needs `{package}`, which is not installed. Run: pip install 'gatewise[{extra}]'")


class OutOfMemoryPredicted(GatewiseError, MemoryError):
    """The call does not fit in memory, by prediction; the error is raised before anything runs."""


class CorpusError(GatewiseError, ValueError):
    """A text cannot be used for training: it is missing, empty, not UTF-8, or too short."""


class DataError(GatewiseError, ValueError):
    """Sequences cannot be used for training: a number is missing, there is a gap in time, or a label is unknown."""


class CheckpointError(GatewiseError, ValueError):
    """A file is not a complete checkpoint of this model, or cannot be written."""


MEMORY_SHORTAGE = re.compile(
    r"out of memory|can't allocate memory|Storage size calculation overflowed|_STATUS_ALLOC_FAILED|bad_alloc"
)
"""The texts by which PyTorch, its allocators and libraries report too little memory in a RuntimeError."""

DAMAGED_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, TypeError, AttributeError),
    *(RuntimeError, OverflowError, MemoryError, SyntaxError, tokenize.TokenError, struct.error),
)
"""The errors by which `zipfile` and `numpy.load` report that a zip archive is damaged, or a file is not one."""


def sentence(name: str, expectation: str, got: object, advice: str = "") -> str:
    """Return an error sentence: what is expected, what was given, and what to do.

    Examples:
        >>> sentence("hidden_size", "a positive integer", 0, "Give the number of hidden units.")
        '`hidden_size` must be a positive integer, got 0. Give the number of hidden units.'
    """
    return f"`{name}` must be {expectation}, got {got}.{' ' + advice if advice else ''}"


def callers_level() -> int:
    """Return the `stacklevel` with which a warning names the line of the caller outside of gatewise and PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("gatewise.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
