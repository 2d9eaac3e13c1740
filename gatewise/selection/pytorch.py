"""What PyTorch's own layer runs, as a decision."""

from __future__ import annotations

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import admit

_LIBRARY, _OTHERWISE = "cudnn", "aten"


def decide_as_pytorch(problem: Problem, device: Device) -> Decision:
    """Return the decision that PyTorch's own layer makes: cuDNN wherever it takes the call.

    Args:
        problem: The call; lengths become a packed batch, which is all that PyTorch knows of them.
        device: Where it runs.
    """
    problem = problem.replace(lean=False)  # it keeps what it keeps
    if problem.layout is not Layout.DENSE:
        problem = problem.replace(layout=Layout.PACKED)
    layer = f"torch.nn.{problem.cell.name.upper()}"
    verdicts = admit.verdicts(problem, device)
    library = next(verdict for verdict in verdicts if verdict.kernel == _LIBRARY)
    if library.accepted:
        return Decision(problem, device, verdicts, _LIBRARY, f"{layer} takes cuDNN wherever it can")
    return Decision(problem, device, verdicts, _OTHERWISE, f"{layer} without cuDNN")
