"""`gatewise bench attention`: forward and backward of additive attention, every kernel compared with plain PyTorch.

A case is a source and a number of decoder steps: as many steps as source positions if plain PyTorch fits in memory,
fewer for long sources, and one step, as in a decoder with input feeding. The results of every way are first compared
with float64, on a batch of two, and its loss over a few training steps on the whole batch with that of plain PyTorch,
eager and replayed; a way with wrong results is not timed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from gatewise.attention import attend, kernel_names
from gatewise.attention.call import Inputs
from gatewise.attention.choice import decide
from gatewise.attention.problem import Problem
from gatewise.benchmarks import attention_curve
from gatewise.benchmarks.curve import Rival
from gatewise.benchmarks.record import AGREED, MEASURED, REFUSED, WRONG, Run
from gatewise.contract.device import Device
from gatewise.selection.timing import captured, peak_memory, time_callable
from gatewise.testing.attention import budgets, make_gradients, make_inputs, textbook
from gatewise.testing.budgets import relative_error

BENCHMARK = "attention"
QUICK_BENCHMARK = "attention_quick"  # in a separate file, so that reports do not include quick runs
PLAIN = "plain torch"
BATCH, HIDDEN = 128, 512
SIZES = ((10, 10), (50, 50), (100, 100), (200, 200), (50, 500), (25, 1000), (1, 10), (1, 100), (1, 1000))
QUICK_SIZES = ((5, 7), (1, 7))
_CHECKED_BATCH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionRecord:
    """One way on one case.

    Attributes:
        benchmark: "attention", or "attention_quick" for a quick run.
        steps: T, the number of decoder steps.
        source: S, the number of source positions.
        batch: B, the number of sequences.
        hidden: H, the number of features of queries and keys, and V, that of the values.
        dtype: The name of the dtype.
        way: The name of a kernel, or "plain torch".
        status: "measured", "refused" or "wrong".
        note: The reason if it was not measured; otherwise the agreement with float64.
        run: The run of the record.
        median: The median time of forward and backward in seconds, eager.
        q20: The 20 % quantile in seconds.
        q80: The 80 % quantile in seconds.
        replayed: The median time of the same work in seconds as CUDA graph replay; None on a CPU.
        peak_bytes: The peak memory of one forward and backward in addition to the inputs; None on a CPU.
        error: The relative error that is largest relative to its allowance.
        allowed: The allowance of that error.
    """

    benchmark: str
    steps: int
    source: int
    batch: int
    hidden: int
    dtype: str
    way: str
    status: str
    note: str
    run: Run
    median: float | None = None
    q20: float | None = None
    q80: float | None = None
    replayed: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    allowed: float | None = None

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Parse one line of a file."""
        fields = json.loads(line)
        return cls(**fields | {"run": Run(**fields["run"])})


def plain(inputs: Inputs) -> Tensor:
    """Compute additive attention as users usually write it."""
    assert inputs.v is not None
    scores = (torch.tanh(inputs.query[:, None] + inputs.keys) @ inputs.v).transpose(1, 2)
    if inputs.lengths is not None:
        beyond = torch.arange(inputs.keys.shape[0], device=scores.device) >= inputs.lengths[:, None]
        scores = scores.masked_fill(beyond, -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.bmm(weights.transpose(0, 1), inputs.values.transpose(0, 1)).transpose(0, 1)


def ways() -> dict[str, Callable[[Inputs], Tensor]]:
    """Return the functions that are measured, by name."""

    def on(kernel: str) -> Callable[[Inputs], Tensor]:
        return lambda inputs: attend(*inputs[:4], v=inputs.v, kernel=kernel)

    return {PLAIN: plain} | {name: on(name) for name in reversed(kernel_names())}


def run(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    *,
    quick: bool = False,
    budget: float = 0.2,
    begin: Callable[[str], None] = lambda what: None,
) -> Iterator[AttentionRecord]:
    """Measure every way on every case.

    Args:
        device: The device.
        dtypes: The dtypes.
        quick: Whether sizes are tiny.
        budget: The time of all samples of each way in seconds.
        begin: A function that is called with the name of each case before it starts.

    Yields:
        The records, each as soon as it is complete.
    """
    where = Run.now(device)
    batch, hidden = (2, 16) if quick else (BATCH, HIDDEN)
    for dtype in dtypes:
        for steps, source in QUICK_SIZES if quick else SIZES:
            problem = Problem(steps, source, batch, hidden, hidden, ragged=True, dtype=dtype, needs_grad=True)
            begin(str(problem))
            yield from _case(QUICK_BENCHMARK if quick else BENCHMARK, problem, device, where, budget)


def _case(
    benchmark: str, problem: Problem, device: torch.device, where: Run, budget: float
) -> Iterator[AttentionRecord]:
    found = _agreement(problem, device)
    # All lengths are S, which is the most work and the same for all ways; the mask is applied nevertheless.
    inputs = _leaves(make_inputs(problem, [problem.source] * problem.batch), device)
    above = make_gradients(problem)[0].to(device)
    theirs: Rival | None = None
    for way, compute in ways().items():
        status, note, error, allowed = found[way]
        record = AttentionRecord(
            benchmark=benchmark,
            steps=problem.steps,
            source=problem.source,
            batch=problem.batch,
            hidden=problem.hidden_size,
            dtype=str(problem.dtype).removeprefix("torch."),
            way=way,
            status=status,
            note=note,
            run=where,
            error=error,
            allowed=allowed,
        )
        if status == AGREED:
            theirs = theirs or attention_curve.rival(plain, inputs)
            record = _learning(record, compute, inputs, theirs, device)
        yield record if record.status != AGREED else _measured(record, compute, inputs, above, device, budget)


def _learning(
    record: AttentionRecord, compute: Callable[[Inputs], Tensor], inputs: Inputs, theirs: Rival, device: torch.device
) -> AttentionRecord:
    """Return the record, with the status "wrong" if the loss over a few steps differs from that of plain PyTorch."""
    for replayed in (False, True) if device.type == "cuda" else (False,):
        finding = theirs.beside(attention_curve.losses(compute, inputs, replayed=replayed))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # releases the memory of the graph
        if not finding.agrees:
            how = "replayed" if replayed else "called from Python"
            return dataclasses.replace(record, status=WRONG, note=f"{how}: {finding}")
        note = f"{record.note.partition('; ')[0]}; {finding}"
        record = dataclasses.replace(record, note=note)
    return record


def _measured(
    record: AttentionRecord,
    compute: Callable[[Inputs], Tensor],
    inputs: Inputs,
    above: Tensor,
    device: torch.device,
    budget: float,
) -> AttentionRecord:
    leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compute(inputs), leaves, above)

    step()  # compiles kernels before memory is counted
    peak = peak_memory(step, device)
    timing = time_callable(step, device=device, runs=20, budget=budget)
    replayed = None
    if device.type == "cuda":
        replayed = time_callable(captured(step), device=device, runs=20, budget=budget).median
        torch.cuda.empty_cache()  # releases the memory of the graph, which the next way may need
    return dataclasses.replace(
        record,
        status=MEASURED,
        median=timing.median,
        q20=timing.q20,
        q80=timing.q80,
        replayed=replayed,
        peak_bytes=peak,
    )


def _agreement(problem: Problem, device: torch.device) -> dict[str, tuple[str, str, float | None, float | None]]:
    small = problem.replace(batch=_CHECKED_BATCH)
    lengths = [problem.source, max(1, problem.source // 3)]
    inputs = _leaves(make_inputs(small, lengths), device)
    gradients = make_gradients(small)
    gradients = (gradients[0].to(device), torch.zeros_like(gradients[1], device=device))
    exact = textbook(small, inputs, gradients, torch.float64, "cpu")
    allowed = budgets(small, inputs, gradients, exact, str(device))
    found: dict[str, Any] = {}
    for way, compute in ways().items():
        if way != PLAIN:
            verdict = decide(problem, Device.probe(device)).verdict(way)
            if not verdict.accepted:
                found[way] = (REFUSED, "; ".join(map(str, verdict.refusals)), None, None)
                continue
        names = [name for name, tensor in inputs._asdict().items() if tensor is not None and tensor.requires_grad]
        context = compute(inputs)
        grads = torch.autograd.grad(context, [getattr(inputs, name) for name in names], gradients[0])
        tensors = {"context": context} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
        errors = {name: relative_error(tensor, exact[name]) for name, tensor in tensors.items()}
        worst = max(errors, key=lambda name: errors[name] / allowed[name])
        right = errors[worst] <= allowed[worst]
        note = f"{worst} is {errors[worst]:.1e} from float64, {'within' if right else 'more than'} the allowed"
        found[way] = (AGREED if right else WRONG, f"{note} {allowed[worst]:.1e}", errors[worst], allowed[worst])
    return found


def _leaves(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in inputs._asdict().items()}
    for name, tensor in moved.items():
        if tensor is not None and name != "lengths":
            tensor.requires_grad_()
    return Inputs(**moved)  # type: ignore[arg-type]
