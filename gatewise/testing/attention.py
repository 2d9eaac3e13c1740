"""Cases, the float64 oracle and the check for attention kernels; the budgets are those of `gatewise.testing.budgets`.

The oracle is textbook attention for one sequence at a time, truncated to its length, so that it needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatewise.attention.call import EPSILON, Inputs, Result
from gatewise.attention.kernel import Kernel
from gatewise.attention.problem import Problem, Score
from gatewise.testing.budgets import relative_error
from gatewise.testing.check import Disagreement

_NUDGES = 3
_PARAMETERS = ("v", "weight", "norm_weight", "norm_bias")


def make_inputs(problem: Problem, lengths: list[int] | None = None, *, device: str = "cpu", seed: int = 0) -> Inputs:
    """Return random inputs with mean zero; scores are of order one, so that weights are neither equal nor saturated.

    Args:
        problem: The problem, which determines the sizes and the dtype.
        lengths: The source lengths; None for all S.
        device: The device of the inputs.
        seed: The seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(problem.dtype).to(device)

    hidden, batch = problem.hidden_size, problem.batch
    query_size = problem.query_size or hidden
    scale = 1.0 if problem.additive else hidden**-0.25
    return Inputs(
        query=normal(problem.steps, batch, query_size, scale=scale),
        keys=normal(problem.source, batch, hidden, scale=scale),
        values=normal(problem.source, batch, problem.value_size),
        lengths=None if lengths is None else torch.tensor(lengths, device=device),
        v=normal(hidden, scale=2 * hidden**-0.5) if problem.additive else None,
        weight=normal(query_size, hidden, scale=query_size**-0.5) if problem.score is Score.GENERAL else None,
        norm_weight=1 + normal(hidden, scale=0.3) if problem.layer_norm else None,
        norm_bias=normal(hidden, scale=0.3) if problem.layer_norm else None,
    )


def make_gradients(problem: Problem, *, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random gradients of context and weights, with mean zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = (problem.steps, problem.batch)
    context, weights = (
        torch.randn((*rows, size), generator=generator, dtype=torch.float64).to(problem.dtype).to(device)
        for size in (problem.value_size, problem.source)
    )
    return context, weights


def textbook(
    problem: Problem, inputs: Inputs, gradients: tuple[Tensor, Tensor] | None, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Return context, weights and the gradient of every input, by name, computed by autograd sequence by sequence.

    Args:
        problem: The description of the call; its dtype is ignored.
        inputs: The inputs in any dtype, on any device; they are converted first.
        gradients: The gradients of context and weights; None computes no gradients.
        dtype: The dtype of the computation.
        device: The device of the computation.
    """
    with torch.enable_grad():
        leaves = {
            name: tensor.detach().to(device, dtype).clone().requires_grad_(gradients is not None)
            for name, tensor in inputs._asdict().items()
            if tensor is not None and name != "lengths"
        }
        lengths = [problem.source] * problem.batch if inputs.lengths is None else inputs.lengths.tolist()
        contexts, weights = [], []
        for row, length in enumerate(lengths):
            context, share = _row(problem, leaves, row, length)
            contexts.append(context)
            weights.append(torch.nn.functional.pad(share, (0, problem.source - length)))
        outputs = {"context": torch.stack(contexts, 1), "weights": torch.stack(weights, 1)}
        found = {name: tensor.detach() for name, tensor in outputs.items()}
        if gradients is not None:
            above = [gradient.detach().to(device, dtype) for gradient in gradients]
            grads = torch.autograd.grad(
                list(outputs.values()), list(leaves.values()), above, materialize_grads=True, allow_unused=True
            )
            found |= {f"d{name}": gradient for name, gradient in zip(leaves, grads, strict=True)}
    return found


def run_kernel(kernel: Kernel, problem: Problem, inputs: Inputs, gradients: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the results of a kernel, named as in `textbook`; not for the general score, which kernels do not see."""
    with torch.no_grad():
        result = kernel.forward(problem, inputs, need_weights=True)
        assert result.weights is not None
        found = {"context": result.context, "weights": result.weights}
        grads = kernel.backward(problem, inputs, Result(result.context, None, result.kept), *gradients, None)
    return found | {f"d{name}": tensor for name, tensor in grads._asdict().items() if tensor is not None}


def budgets(
    problem: Problem, inputs: Inputs, gradients: tuple[Tensor, Tensor], exact: dict[str, Tensor], device: str
) -> dict[str, float]:
    """Return the allowed error of every tensor; the rule is that of `gatewise.testing.budgets`."""
    wide = problem.dtype == torch.float64
    precision = torch.float32 if wide else problem.dtype
    unit = torch.finfo(precision).eps
    scale = torch.finfo(problem.dtype).eps / unit
    errors, bands = dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
    for draw in range(_NUDGES + 1):
        moved, above = (inputs, gradients) if draw == 0 else _nudged(inputs, gradients, unit, draw)
        there = exact if draw == 0 else textbook(problem, moved, above, torch.float64, "cpu")
        theirs = textbook(problem, moved, above, precision, device)
        for name, value in exact.items():
            errors[name] = max(errors[name], scale * relative_error(theirs[name], there[name]))
            bands[name] = max(bands[name], scale * relative_error(there[name], value))
    return {name: 2 * (errors[name] + bands[name] + scale * unit) for name in exact}


def check_kernel(
    kernel: Kernel, problem: Problem, lengths: list[int] | None = None, device: str = "cpu", *, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Compare context, weights and every gradient of a kernel with float64.

    Args:
        kernel: The kernel to test.
        problem: The problem; it must need a gradient, and its score must be additive or dot.
        lengths: The source lengths; None for all S.
        device: The device on which the kernel runs.
        seed: The seed of the random data.

    Returns:
        The error and the budget of every tensor, by name.

    Raises:
        Disagreement: An error exceeds its budget.
    """
    inputs, gradients = make_inputs(problem, lengths, device=device, seed=seed), make_gradients(problem, device=device)
    return compare(problem, inputs, gradients, run_kernel(kernel, problem, inputs, gradients), device)


def compare(
    problem: Problem, inputs: Inputs, gradients: tuple[Tensor, Tensor], found: dict[str, Tensor], device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """Compare tensors that were computed in any way with float64; see `check_kernel`."""
    exact = textbook(problem, inputs, gradients, torch.float64, "cpu")
    if set(found) != set(exact):
        raise Disagreement(f"{problem}: computed {sorted(found)}, expected {sorted(exact)}")
    allowed = budgets(problem, inputs, gradients, exact, device)
    measured = {name: (relative_error(found[name], exact[name]), allowed[name]) for name in exact}
    wrong = [
        f"{name}: error {error:.2e}, budget {most:.2e}" for name, (error, most) in measured.items() if error > most
    ]
    if wrong:
        raise Disagreement("\n".join([str(problem), *wrong]))
    return measured


def _row(problem: Problem, leaves: dict[str, Tensor], row: int, length: int) -> tuple[Tensor, Tensor]:
    query, keys, values = leaves["query"][:, row], leaves["keys"][:length, row], leaves["values"][:length, row]
    if problem.score is Score.GENERAL:
        query = query @ leaves["weight"]
    if problem.additive:
        total = query[:, None] + keys[None]
        if problem.layer_norm:
            norm: Callable[..., Tensor] = torch.nn.functional.layer_norm
            total = norm(total, total.shape[-1:], leaves["norm_weight"], leaves["norm_bias"], EPSILON)
        scores = total.tanh() @ leaves["v"]
    else:
        scores = query @ keys.T
    weights = torch.softmax(scores, -1)
    return weights @ values, weights


def _nudged(
    inputs: Inputs, gradients: tuple[Tensor, Tensor], unit: float, seed: int
) -> tuple[Inputs, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return tensor.detach().to("cpu", torch.float64) * (1 + unit * signs)

    names = [name for name in ("query", "keys", "values", *_PARAMETERS) if getattr(inputs, name) is not None]
    changed = {name: moved(getattr(inputs, name)) for name in names}
    return inputs._replace(**changed), (moved(gradients[0]), moved(gradients[1]))
