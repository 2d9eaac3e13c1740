"""The part of attention: its feature map is kept, recomputed, or never stored."""

from __future__ import annotations

from gatewise.attention import Problem, Score, explain
from gatewise.attention.choice import AUTO, kernel_named, seconds
from gatewise.attention.kernel import Gathering
from gatewise.attention.plain import accumulation_dtype
from gatewise.contract.decision import Decision
from gatewise.contract.errors import KernelRefused
from gatewise.planning.translation.decoder import kept_bytes
from gatewise.planning.translation.setting import Setting, parameter_bytes
from gatewise.planning.way import Part, Recomputation, Way

REFERENCE = "reference"
FUSED = "fused"


def attention(setting: Setting) -> Part:
    """Return the part of attention, including the layer that combines the context with the decoder's output.

    Raises:
        KernelRefused: The kernel that the model names cannot run the call.
    """
    layer = setting.model.attention
    problem = problem_of(setting)
    names = _names(problem, setting) if layer.kernel == AUTO else [layer.kernel]
    ways: list[Way] = []
    for name in names:
        decision = explain(problem, setting.device, name)
        if decision.chosen is None:
            raise KernelRefused(f"the attention kernel {name!r} cannot train this model\n\n{decision}")
        ways.append(_way(name, decision, setting, ways[0] if ways else None))
    gradients = parameter_bytes(layer, setting.model.attended)
    return Part("attention", tuple(ways), gradients, with_below=setting.model.input_feeding)


def problem_of(setting: Setting) -> Problem:
    """Return the attention problem of all decoder steps of a batch."""
    layer, shape = setting.model.attention, setting.shape
    score = Score(layer.score)
    return Problem(
        shape.target,
        shape.source,
        shape.batch,
        layer.hidden_size if score is Score.ADDITIVE else layer.source_size,
        layer.source_size,
        score=score,
        query_size=layer.query_size if score is Score.GENERAL else 0,
        layer_norm=layer.layer_norm,
        ragged=True,
        dtype=setting.dtype,
        needs_grad=True,
        allow_tf32=setting.rounds_float32,
    )


def _names(problem: Problem, setting: Setting) -> list[str]:
    """Return the kernel that keeps everything, the automatic choice, and the other kernels that can run the call.

    If two of them are the same kernel, the automatic choice comes first: for other sizes, and when the model
    translates, it remains automatic.
    """
    decision = explain(problem, setting.device)
    # On a CPU `fused` runs in Triton's interpreter, which is for tests: its steps would take minutes.
    left_out = {REFERENCE, FUSED} if setting.device.kind == "cpu" else {REFERENCE}
    accepted = [verdict.kernel for verdict in decision.verdicts if verdict.accepted and verdict.kernel not in left_out]
    first = [AUTO, REFERENCE] if decision.chosen == REFERENCE else [REFERENCE, AUTO]
    return first + accepted


def _way(name: str, decision: Decision, setting: Setting, usual: Way | None) -> Way:
    chosen = decision.verdict(decision.chosen or "")
    problem, kernel = problem_of(setting), kernel_named(chosen.kernel)
    work = kernel.work(problem, setting.device)
    own = sum(spec.nbytes for spec in kernel.kept(problem, setting.device))
    around, backward = (_fed if setting.model.input_feeding else _whole)(setting, problem, chosen.kernel, own)
    works_in = _workspace_bytes(setting, problem, chosen.kernel, work.workspace_bytes)
    again = None
    if usual is not None and chosen.kernel != REFERENCE:
        # Recomputation needs the queries, which keeping the map would spare; the keys are kept in either case.
        element, steps = setting.dtype.itemsize, setting.shape.target * setting.shape.batch
        again = Recomputation(usual.kept - around, own + steps * problem.hidden_size * element)
    return Way(
        name,
        chosen.kernel,
        seconds(work, problem, setting.pace),
        kept=around + own,
        forward_scratch=works_in,
        backward_scratch=backward + (chosen.peak_bytes or 0) - own - work.workspace_bytes + works_in,
        recomputation=again,
    )


def _workspace_bytes(setting: Setting, problem: Problem, name: str, stated: int) -> int:
    """Return the workspace of a kernel; with input feeding, that of one step and of the accumulated gradients."""
    kernel = kernel_named(name)
    if not (setting.model.input_feeding and isinstance(kernel, Gathering) and kernel.gathers(problem)):
        return stated
    keys = problem.source * problem.batch * problem.hidden_size * accumulation_dtype(problem.dtype).itemsize
    return kernel.work(problem.replace(steps=1), setting.device).workspace_bytes + keys


def _fed(setting: Setting, problem: Problem, kernel: str, own: int) -> tuple[int, int]:
    """Return, for input feeding, what is kept beyond the kernel's own, and the extra workspace of the backward pass."""
    element, hidden = setting.dtype.itemsize, setting.model.hidden_size
    source = setting.shape.source * setting.shape.batch * element
    keys = source * problem.hidden_size * problem.additive
    kept = kept_bytes(setting, kernel, of_attention=True) - own
    # The gradient of the encoder's outputs, through the context's half of W_a; and a tensor of the loop, [T, B, H].
    return kept + keys, source * problem.value_size + setting.shape.target * setting.shape.batch * hidden * element


def _whole(setting: Setting, problem: Problem, kernel: str, own: int) -> tuple[int, int]:
    """Return the same for one call over all steps, including the layer that combines context and hidden state."""
    model, shape = setting.model, setting.shape
    element, hidden, width = setting.dtype.itemsize, model.hidden_size, problem.hidden_size
    rows, source = shape.target * shape.batch, shape.source * shape.batch
    projected = (rows + source) * width * element * problem.additive
    # The context, its concatenation with the decoder's output, the tanh of the combination, and the dropout mask.
    outputs = rows * (2 * problem.value_size + 2 * hidden) * element
    outputs += setting.mask_bytes(rows * hidden, model.dropout.p, element)
    casts = setting.cast_bytes(*model.attention.parameters(), *model.attended.parameters())
    # The gradients of the combination after and before its tanh, and of the concatenation.
    return projected + outputs + casts, rows * (3 * hidden + problem.value_size) * element + casts
