"""Every error that gatewise raises on purpose, and the one form of their sentences.

    GatewiseError
    ├── ShapeError            (ValueError, RuntimeError)  a rank, size or length does not fit
    ├── DtypeError            (TypeError, ValueError)     a dtype does not fit
    ├── DeviceError           (ValueError, RuntimeError)  tensors on devices that do not go together
    ├── ArgumentError         (ValueError, TypeError)     any other argument of a wrong type or out of its range
    ├── KernelRefused         (ValueError)                a kernel that was named cannot run this problem
    ├── UnexpectedKernel      (RuntimeError)              a real call ran on another kernel than decided
    ├── ModifiedInPlace       (RuntimeError)              a tensor changed between forward and backward
    ├── NotFinite             (ArithmeticError)           a loss or gradient is infinite or no number
    │   ├── KernelFault                                   it is finite on the reference implementation
    │   └── TrainingDiverged                              it is not finite on the reference implementation either
    ├── ProcessFailed         (RuntimeError)              another of several processes failed, or ended
    ├── MissingExtra          (ImportError)               an optional dependency is not installed
    ├── OutOfMemoryPredicted  (MemoryError)               the call would not fit, said before it runs
    ├── CorpusError           (ValueError)                text that cannot be trained on
    ├── DataError             (ValueError)                sequences that cannot be trained on
    └── CheckpointError       (ValueError)                a file that is not a checkpoint of this model, or not written

Where an error has two built-in bases, that is because `torch.nn.LSTM` raises the second for some of the same mistakes:
a program that catches it keeps working.
"""

from __future__ import annotations


class GatewiseError(Exception):
    """The base of every error that gatewise raises on purpose."""


class ShapeError(GatewiseError, ValueError, RuntimeError):
    """A rank, a size or a length does not fit."""


class DtypeError(GatewiseError, TypeError, ValueError):
    """A dtype does not fit."""


class DeviceError(GatewiseError, ValueError, RuntimeError):
    """Tensors are on devices that do not go together."""


class ArgumentError(GatewiseError, ValueError, TypeError):
    """An argument is of a wrong type or out of its range."""


class KernelRefused(GatewiseError, ValueError):
    """A kernel that was named cannot run this problem, or no kernel has that name.

    The message is the printed `Decision`: every kernel, and each reason it refused for.
    """


class UnexpectedKernel(GatewiseError, RuntimeError):
    """A real call ran on another kernel than was decided, or on none that is known.

    The message says which layer, what was decided and what ran, and is followed by the report of `gatewise.verify`.
    """


class ModifiedInPlace(GatewiseError, RuntimeError):
    """A tensor that an explicit backward pass reads was changed in place since the forward pass.

    Autograd raises a `RuntimeError` for the same in a differentiable call.
    """


class NotFinite(GatewiseError, ArithmeticError):
    """A loss, a gradient or a state is infinite or no number, and it is not known why."""


class KernelFault(NotFinite):
    """A step that was not finite is finite on the reference implementation: what computed it is at fault."""


class TrainingDiverged(NotFinite):
    """A step is not finite on the reference implementation either: the weights have grown too large."""


class ProcessFailed(GatewiseError, RuntimeError):
    """Another one of the processes that train together failed, or ended without a word."""


class MissingExtra(GatewiseError, ImportError):
    """An optional dependency is not installed; the message has the pip command."""

    @classmethod
    def for_package(cls, package: str, purpose: str, extra: str) -> MissingExtra:
        """Say what is missing, what for, and how to get it."""
        return cls(f"{purpose} needs `{package}`, which is not installed. Run: pip install 'gatewise[{extra}]'")


class OutOfMemoryPredicted(GatewiseError, MemoryError):
    """The call would not fit in memory; said before anything runs."""


class CorpusError(GatewiseError, ValueError):
    """A text cannot be trained on: missing, empty, not UTF-8, or too short."""


class DataError(GatewiseError, ValueError):
    """Sequences cannot be trained on: a missing number, a gap in time, a label that is not known."""


class CheckpointError(GatewiseError, ValueError):
    """A file is not a whole checkpoint of this model, or cannot be written."""


def sentence(name: str, expectation: str, got: object, advice: str = "") -> str:
    """Return the one form of error sentences: what must be, what is, and what to do.

    Example:
        >>> sentence("hidden_size", "a positive integer", 0, "Give the number of hidden units.")
        '`hidden_size` must be a positive integer, got 0. Give the number of hidden units.'
    """
    return f"`{name}` must be {expectation}, got {got}.{' ' + advice if advice else ''}"
