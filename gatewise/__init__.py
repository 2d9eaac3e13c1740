"""A drop-in for `torch.nn.LSTM`, `GRU` and `RNN` that chooses the fastest kernel for each call and says why.

Examples:
    >>> import torch, gatewise
    >>> lstm = gatewise.LSTM(input_size=4, hidden_size=8)
    >>> y, (h_n, c_n) = lstm(torch.randn(5, 2, 4))
    >>> decision = gatewise.explain(lstm, (5, 2, 4))
"""

from types import ModuleType as _ModuleType

from gatewise import _program  # before all other imports, so that Ctrl-C is handled while they run

# isort: split
from gatewise._version import __version__
from gatewise.contract.errors import (
    ArgumentError,
    CheckpointError,
    CorpusError,
    DataError,
    DeviceError,
    DtypeError,
    ExchangeTimeout,
    GatewiseError,
    KernelFault,
    KernelRefused,
    MissingExtra,
    ModifiedInPlace,
    NotFinite,
    OutOfMemoryPredicted,
    ProcessFailed,
    ShapeError,
    SlowerKernelWarning,
    TrainingDiverged,
    UnexpectedKernel,
)

if not _program.LISTING:  # torch takes seconds to import, and the list of commands does not need it
    from gatewise import cells, functional
    from gatewise.cells import Cell
    from gatewise.contract.capture import for_cuda_graph
    from gatewise.contract.data_parallel import for_data_parallel
    from gatewise.contract.decision import Decision
    from gatewise.contract.device import Device
    from gatewise.nn import (
        GRU,
        LSTM,
        RNN,
        GRUCell,
        LSTMCell,
        Recurrent,
        RecurrentCell,
        RNNCell,
        accelerate,
        compare,
        make_graphed_step,
        restore,
        verify,
    )
    from gatewise.selection import kernel_names, use_kernel
    from gatewise.selection.explain import explain

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "ArgumentError",
    "Cell",
    "CheckpointError",
    "CorpusError",
    "DataError",
    "Decision",
    "Device",
    "DeviceError",
    "DtypeError",
    "ExchangeTimeout",
    "GRUCell",
    "GatewiseError",
    "KernelFault",
    "KernelRefused",
    "LSTMCell",
    "MissingExtra",
    "ModifiedInPlace",
    "NotFinite",
    "OutOfMemoryPredicted",
    "ProcessFailed",
    "RNNCell",
    "Recurrent",
    "RecurrentCell",
    "ShapeError",
    "SlowerKernelWarning",
    "TrainingDiverged",
    "UnexpectedKernel",
    "__version__",
    "accelerate",
    "cells",
    "compare",
    "explain",
    "for_cuda_graph",
    "for_data_parallel",
    "functional",
    "kernel_names",
    "make_graphed_step",
    "restore",
    "use_kernel",
    "verify",
]


def __getattr__(name: str) -> _ModuleType:
    # `gatewise.attention` is available without a separate import, and is only imported when it is used.
    if name == "attention":
        import importlib

        return importlib.import_module("gatewise.attention")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
