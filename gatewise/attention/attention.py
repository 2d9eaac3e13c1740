"""The public functions of the package: `attend`, `forward`, `backward` and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.attention import explicit, operators
from gatewise.attention.call import Gradients, Inputs, Result, Saved
from gatewise.attention.choice import AUTO, decide
from gatewise.attention.problem import Problem, Score
from gatewise.attention.validate import check_tensors, prepare
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import ShapeError, sentence
from gatewise.contract.tracing import is_compiling, is_exporting
from gatewise.contract.transforms import is_transformed


@overload
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    score: str | Score = "additive",
    v: Tensor | None = None,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kernel: str = AUTO,
    memory_budget: float | None = None,
    need_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    score: str | Score = "additive",
    v: Tensor | None = None,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kernel: str = AUTO,
    memory_budget: float | None = None,
    need_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    score: str | Score = "additive",
    v: Tensor | None = None,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kernel: str = AUTO,
    memory_budget: float | None = None,
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention: the mean of the values, weighted by the softmax of the scores of each query.

    The function is differentiable any number of times; for a second derivative the call is repeated in PyTorch
    operators that store everything. The same operators compute calls inside of transforms of `torch.func`, such as
    `grad` and `vmap`, calls in forward mode, and calls of meta tensors, whose results are meta tensors. Under
    `torch.compile` the call is one operator of the graph, which is differentiable once. For the additive score the
    function is equivalent to the PyTorch code below; kernels other than "reference" do not store its [T, S, B, H]
    tensors for all decoder steps:

        total = query[:, None] + keys                                # with norm_weight: layer_norm(total, ...)
        scores = (torch.tanh(total) @ v).transpose(1, 2)             # [T, B, S]
        scores = scores.masked_fill(torch.arange(S) >= lengths[:, None], -torch.inf)
        weights = torch.softmax(scores, -1)
        context = torch.einsum("tbs,sbv->tbv", weights, values)

    Args:
        query: The queries of all decoder steps [T, B, H], or of one step [B, H]; Q features instead of H for "general".
        keys: The keys of all source positions [S, B, H], shared by all steps.
        values: The values of all source positions [S, B, V]; often the encoder's outputs.
        lengths: The source lengths [B], integers in [0, S], on any device. Lengths on the CPU are checked; lengths on a
            GPU, or inside of transforms of `torch.func`, are not read, but clamped to that range. None means that all
            lengths are S. Positions beyond a length are masked: they do not influence the result, even if they are NaN,
            and their gradients are zero. A sequence of length 0 has zero weights, a zero context and zero gradients.
        score: "additive" for v . tanh(query + key), "dot" for query . key, "general" for (query weight) . key.
        v: The vector of the additive score [H]; only for "additive".
        weight: The matrix of the general score [Q, H]; only for "general".
        norm_weight: The weight of a layer norm of query + key [H]; only for "additive". None means no layer norm.
        norm_bias: The bias of the layer norm [H]; required with norm_weight.
        kernel: One of `gatewise.attention.kernel_names()`, which raises if it cannot run the call; or "auto" for the
            kernel with the least predicted time.
        memory_budget: The maximum predicted memory in bytes, beyond the inputs, of a kernel chosen by "auto"; None for
            no limit.
        need_weights: Whether to return the attention weights too; they are differentiable.

    Returns:
        The context [T, B, V] ([B, V] for one step) and, with need_weights, the weights [T, B, S] ([B, S]).

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: The dtypes differ or are not floating point; under autocast all tensors are cast to its dtype.
        DeviceError: The tensors are on different devices.
        ArgumentError: A parameter of the score is missing, or belongs to another score; or an argument is no tensor.
        KernelRefused: The named kernel cannot run this call; the message is the decision.
        OutOfMemoryPredicted: No kernel fits into the memory budget.

    Numerics:
        For the 16-bit dtypes the kernel "fused" keeps scores, softmax and sums in float32. The other kernels round the
        feature map to the dtype, as PyTorch does, and keep the softmax in float32.

    Source:
        Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, section 3 and
        A.1.2; Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", 2015, section 3.1.

    Examples:
        >>> import torch
        >>> from gatewise.attention import attend
        >>> query, keys, values = torch.randn(5, 2, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 3)
        >>> attend(query, keys, values, [7, 4], v=torch.randn(8)).shape
        torch.Size([5, 2, 3])
        >>> context, weights = attend(query[0], keys, values, [7, 4], score="dot", need_weights=True)
        >>> weights.shape, weights[1, 4:].tolist()
        (torch.Size([2, 7]), [0.0, 0.0, 0.0])
    """
    check_tensors({"query": query, "keys": keys, "values": values, "v": v, "weight": weight})
    check_tensors({"norm_weight": norm_weight, "norm_bias": norm_bias})
    one_step = _is_one_step(query)
    tensors = (query[None] if one_step else query, keys, values, v, weight, norm_weight, norm_bias)
    if not keys.is_meta and torch.is_autocast_enabled(keys.device.type):
        dtype = torch.get_autocast_dtype(keys.device.type)
        # Autocast does not change float64 tensors either.
        tensors = tuple(each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in tensors)
    differentiable = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if torch.compiler.is_dynamo_compiling() and not keys.is_meta and not is_transformed() and not is_exporting():
        flags = {"need_weights": need_weights, "needs_grad": differentiable}
        context, weights = operators.traced(tensors, lengths, score, kernel, memory_budget, **flags)
        return _returned(context, weights, one_step=one_step, need_weights=need_weights)
    problem, inputs = prepare(tensors, lengths, score, differentiable)
    if keys.is_meta or is_transformed() or (not is_compiling() and forward_ad._current_level >= 0):
        context, weights = explicit.run_operators(problem, inputs, kernel, memory_budget)
    elif differentiable:
        context, weights = _Attend.apply(
            problem, kernel, memory_budget, need_weights, inputs.lengths, *inputs[:3], *inputs[4:]
        )
    else:
        result, _ = explicit.run_forward(
            problem, inputs, need_weights=need_weights, kernel=kernel, memory_budget=memory_budget
        )
        context, weights = result.context, result.weights
    return _returned(context, weights, one_step=one_step, need_weights=need_weights)


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    score: str | Score = "additive",
    v: Tensor | None = None,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kernel: str = AUTO,
    memory_budget: float | None = None,
    need_weights: bool = False,
    needs_grad: bool = True,
) -> tuple[Tensor, Tensor | None, Saved]:
    """Run the forward pass outside autograd and return the state that its backward pass needs.

    Args: The same as for `attend`, except that the query must be [T, B, H], with T = 1 for one step; and
        needs_grad: Whether a backward pass may follow; if False, no state is kept for it.

    Returns:
        The context [T, B, V], the weights [T, B, S] or None, and the opaque `Saved` for `backward`.
    """
    tensors = (query, keys, values, v, weight, norm_weight, norm_bias)
    problem, inputs = prepare(tensors, lengths, score, needs_grad)
    result, saved = explicit.run_forward(
        problem, inputs, need_weights=need_weights, kernel=kernel, memory_budget=memory_budget
    )
    return result.context, result.weights, saved


backward = explicit.run_backward
new_sums = explicit.new_sums


def explain(problem: Problem, device: Device | torch.device | str = "cpu", kernel: str = AUTO) -> Decision:
    """Return the decision for a problem: for every kernel its predicted time and memory, or why it cannot run.

    Args:
        problem: The sizes, dtype and flags of the call.
        device: A device of this machine, or the name of a device that need not be present, such as "h200".
        kernel: The name of a kernel, or "auto".

    Returns:
        The decision, which prints as a table; kernels that cannot run are listed in it and raise no error.

    Raises:
        KernelRefused: No kernel has that name.

    Examples:
        >>> from gatewise.attention import Problem, explain
        >>> print(explain(Problem(50, 50, 128, 512, 512, needs_grad=True), "h200"))  # doctest: +ELLIPSIS
        problem  additive attention, T 50, S 50, B 128, H 512, V 512, float32, training
        ...
    """
    if isinstance(device, str) and device.lower() in Device.names() and device != "cpu":
        device = Device.named(device)
    return decide(problem, device if isinstance(device, Device) else Device.probe(device), kernel)


class _Attend(torch.autograd.Function):
    """The autograd function: the backward pass runs on the kernel that ran the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        kernel: str,
        memory_budget: float | None,
        need_weights: bool,
        lengths: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(*tensors[:3], lengths, *tensors[3:])  # type: ignore[arg-type]
        result, saved = explicit.run_forward(
            problem, inputs, need_weights=need_weights, kernel=kernel, memory_budget=memory_budget
        )
        ctx.call = saved.kernel, problem
        ctx.save_for_backward(*inputs, result.context, *result.kept)
        ctx.set_materialize_grads(False)
        return result.context, result.weights

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dcontext: Tensor | None, dweights: Tensor | None
    ) -> tuple:
        kernel, problem = ctx.call
        tensors = ctx.saved_tensors
        inputs, (context, *kept) = Inputs(*tensors[: len(Inputs._fields)]), tensors[len(Inputs._fields) :]
        if dcontext is None and dweights is None:
            return (None,) * 12
        wanted = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled() and not is_compiling():  # as with `create_graph`
            found = explicit.run_differentiable_backward(problem, inputs, (dcontext, dweights), wanted)
            return (None,) * 5 + found
        dcontext = torch.zeros_like(context) if dcontext is None else dcontext
        saved = Saved(kernel, problem, inputs, Result(context, None, tuple(kept)))
        gradients: Gradients = explicit.run_backward(saved, dcontext, dweights)
        return (None,) * 5 + tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))


def _returned(
    context: Tensor, weights: Tensor | None, *, one_step: bool, need_weights: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if one_step:
        context, weights = context[0], None if weights is None else weights[0]
    return (context, weights) if need_weights else context  # type: ignore[return-value]


def _is_one_step(query: Tensor) -> bool:
    if query.dim() not in (2, 3):
        raise ShapeError(sentence("query", "[T, B, H], or [B, H] for one step", f"shape {list(query.shape)}"))
    return query.dim() == 2
