"""The part of LSTM layers that run over whole sentences: gates are kept or recomputed."""

from __future__ import annotations

import dataclasses

from gatewise.contract.decision import Decision
from gatewise.contract.errors import KernelRefused
from gatewise.contract.problem import LEAN, NORMAL
from gatewise.nn import LSTM
from gatewise.planning.translation.setting import Setting, parameter_bytes
from gatewise.planning.way import Part, Recomputation, Way
from gatewise.selection import kernel_named
from gatewise.selection.choose import decide_by_prediction
from gatewise.selection.explain import explain

_DOUBT = 2.0  # the extra time of lean passes is predicted and not measured: it is doubled in comparisons


def lstm(name: str, layer: LSTM, steps: int, setting: Setting, *, lengths: bool, dropped: float = 0.0) -> Part:
    """Return the part of an LSTM.

    Args:
        name: The name of the part.
        layer: The layers, all in one call.
        steps: The number of time steps.
        setting: The training step.
        lengths: Whether sequences have lengths.
        dropped: The dropout probability of the input; the output of the dropout is counted in this part.

    Raises:
        KernelRefused: The kernel that the model names cannot run the call.
    """
    batch = setting.shape.batch
    shape = (steps, batch, layer.input_size)
    usual = explain(
        layer,
        shape,
        lengths=lengths,
        device=setting.device,
        dtype=setting.dtype,
        training=True,
        captured=setting.captured,
    )
    if usual.chosen is None:
        raise KernelRefused(f"the kernel {layer.kernel!r} cannot train this model\n\n{usual}")
    problem, given = usual.problem.replace(lean=False), 0
    if dropped:
        numbers = steps * batch * layer.input_size
        given = numbers * setting.dtype.itemsize + setting.mask_bytes(numbers, dropped, setting.dtype.itemsize)
    ways = []
    for memory in (NORMAL, LEAN):
        decision = decide_by_prediction(problem.replace(lean=memory == LEAN), setting.device, layer.kernel)
        if decision.chosen is not None:
            ways.append(_way(memory, decision, layer, setting, given))
    if len(ways) == 2:
        ways[1] = _replayed(ways[1], ways[0])
    return Part(name, tuple(ways), parameter_bytes(layer))


def _way(memory: str, decision: Decision, layer: LSTM, setting: Setting, given: int) -> Way:
    problem, verdict = decision.problem, decision.verdict(decision.chosen or "")
    element = problem.element_bytes
    outputs = problem.time * problem.batch * problem.output_size
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    inputs = problem.time * problem.batch * problem.input_size
    kernel = kernel_named(verdict.kernel)
    kept = sum(spec.nbytes for spec in kernel.kept(problem, setting.device))
    workspace = kernel.workspace_bytes(problem, setting.device)
    casts = setting.cast_bytes(*layer.parameters())
    recurrent = [each for name, each in layer.named_parameters() if name.startswith("weight_hh")]
    # Dropout of weights makes a copy of every recurrent matrix, and a mask.
    given += bool(layer.weight_dropout) * 2 * sum(each.nbytes for each in recurrent)
    return Way(
        memory,
        verdict.kernel if memory == NORMAL else f"{verdict.kernel}, lean: gates recomputed",
        verdict.seconds or 0.0,
        # Outputs, initial and final states, the dropped input, and autocast's copies of the weights.
        kept=kept + (outputs + 2 * states) * element + given + casts,
        forward_scratch=workspace,
        # Gradients of outputs and inputs, and of autocast's copies.
        backward_scratch=workspace + (outputs + inputs) * element + casts,
    )


def _replayed(lean: Way, usual: Way) -> Way:
    # Nearly all of the extra time is matrix products; input, outputs and cell states are kept in either case.
    more = max(0.0, lean.seconds - usual.seconds)
    again = Recomputation(usual.kept - lean.kept, 0, more)
    return dataclasses.replace(lean, seconds=usual.seconds + _DOUBT * more, recomputation=again)
