"""The decision that PyTorch makes for its own layer."""

from __future__ import annotations

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.selection import admit

_LIBRARY, _OTHERWISE = "cudnn", "aten"


def decide_as_pytorch(problem: Problem, device: Device) -> Decision:
    """Return the decision of PyTorch's own layer: cuDNN if it can run the call.

    Args:
        problem: The description of the call; lengths become a packed batch, the only form that PyTorch takes.
        device: The device of the call.
    """
    problem = problem.replace(lean=False, resets=False)  # torch.nn.LSTM has no such options
    if problem.layout is not Layout.DENSE:
        problem = problem.replace(layout=Layout.PACKED)
    layer = f"torch.nn.{pytorch_layer(problem.cell).name}"
    verdicts = admit.verdicts(problem, device)
    library = next(verdict for verdict in verdicts if verdict.kernel == _LIBRARY)
    if library.accepted:
        return Decision(problem, device, verdicts, _LIBRARY, f"{layer} takes cuDNN wherever it can")
    return Decision(problem, device, verdicts, _OTHERWISE, f"{layer} without cuDNN")
