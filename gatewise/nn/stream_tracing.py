"""The refusal of calls of a stream that a transformation of PyTorch traces."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.tracing import is_compiling, is_exporting


def refuse_traced(got: str, advice: str = "Call the layer itself, with its states as inputs and outputs.") -> NoReturn:
    """Raise the error of a stream that is called in a way that its states do not allow.

    Args:
        got: The description of the call.
        advice: The way to do it instead.

    Raises:
        ArgumentError: In any case.
    """
    raise ArgumentError(sentence("stream", "called directly", got, advice))


def refuse_if_traced(*given: object) -> None:
    """Refuse a call that a transformation of PyTorch traces: the states would be values of the trace afterwards.

    PyTorch's compiler traces assignments to attributes too; it may trace `reset`.

    Args:
        given: The tensors of the call.

    Raises:
        ArgumentError: The call is traced, or a tensor is a `FakeTensor`.
    """
    if torch.compiler.is_compiling() and is_compiling():
        if is_exporting():
            refuse_traced("a call that torch.export traces")
        return
    if torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
        refuse_traced("a call that torch.jit or torch.func traces")
    if torch._C._len_torch_dispatch_stack():  # other modes only watch the operators, as that of a profiler does
        modes = torch._C._TorchDispatchModeKey
        if any(torch._C._get_dispatch_mode(mode) for mode in (modes.PROXY, modes.FAKE, modes.FUNCTIONAL)):
            refuse_traced("a call that make_fx traces or that FakeTensorMode computes")
    for one in given:
        if type(one) is not Tensor and isinstance(one, Tensor) and is_fake(one):
            refuse_traced("a call with a FakeTensor")
