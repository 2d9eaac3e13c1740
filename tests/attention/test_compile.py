"""Attention in graphs of `torch.compile`, without a break: a registered operator, forward and back."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gatewise.attention import attend, kernel_names, operators
from gatewise.contract.errors import OutOfMemoryPredicted, ShapeError
from tests.compilers import interprets
from tests.pairwise import each_value, exhaustive, pairwise

T, S, B, H, V = 4, 6, 3, 8, 5
SCORES = ("additive", "normalized", "dot", "general")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case(score="additive", steps=T, source=S, batch=B, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(steps + source)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    queries = H + 1 if score == "general" else H
    tensors = [random(steps, batch, queries), random(source, batch, H), random(source, batch, V)]
    named = {"score": score if score != "normalized" else "additive"}
    if named["score"] == "additive":
        named["v"] = random(H)
    if score == "normalized":
        named |= {"norm_weight": random(H), "norm_bias": random(H)}
    if score == "general":
        named["weight"] = random(queries, H)
    return tensors, named


def gradients(found, tensors, named):
    outputs = found if isinstance(found, tuple) else (found,)
    loss = sum((output * output.cos()).sum() for output in outputs)
    return torch.autograd.grad(loss, [*tensors, *(each for each in named.values() if isinstance(each, torch.Tensor))])


def compiled(**options):
    return torch.compile(attend, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize(
    ("score", "lengths", "need_weights", "dynamic", "kernel"),
    each_value(
        pairwise(SCORES, (None, "tensor", "list"), (False, True), (False, True), ("auto", "reference", "recompute")),
        most=3,
    ),
    ids=str,
)
def test_a_compiled_call_equals_an_eager_one(score, lengths, need_weights, dynamic, kernel):
    tensors, named = case(score)
    given = {None: None, "list": [S, 2, 0], "tensor": torch.tensor([S, 2, 0])}[lengths]
    options = {"need_weights": need_weights, "kernel": kernel, **named}
    found = compiled(dynamic=dynamic)(*tensors, given, **options)
    expected = attend(*tensors, given, **options)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, tensors, named), gradients(expected, tensors, named), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(compiled(dynamic=dynamic)(*tensors, given, **options), expected)


def test_one_graph_serves_all_sizes():
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    for steps, source, batch in ((4, 6, 3), (9, 5, 2), (100, 70, 8), (2, 2, 2)):
        tensors, named = case(steps=steps, source=source, batch=batch)
        lengths = torch.arange(batch) % source
        found, expected = call(*tensors, lengths, **named), attend(*tensors, lengths, **named)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, tensors, named), gradients(expected, tensors, named))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 0, 3),
        *exhaustive((0, 6, 3), (1, 6, 3), (4, 1, 3), (4, 6, 0), (4, 6, 1)),
    ],
)
def test_sizes_of_one_and_none(sizes):
    tensors, named = case(steps=sizes[0], source=sizes[1], batch=sizes[2])
    found, expected = compiled()(*tensors, **named), attend(*tensors, **named)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tensors, named), gradients(expected, tensors, named))


def test_one_step_under_autocast_equals_an_eager_one():
    (query, keys, values), named = case()

    def call(query, keys, values, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(query[0], keys, values, v=v, need_weights=True)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(query, keys, values, named["v"])
    expected = call(query, keys, values, named["v"])
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_a_memory_budget_counts_when_the_graph_runs():
    tensors, named = case()
    call = compiled()
    found, expected = call(*tensors, memory_budget=1e9, **named), attend(*tensors, **named)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tensors, named), gradients(expected, tensors, named))
    with pytest.raises(OutOfMemoryPredicted, match="memory budget"):
        call(*tensors, memory_budget=1.0, **named)


def test_lengths_are_checked_when_the_graph_runs():
    tensors, named = case()
    call = compiled()
    call(*tensors, torch.tensor([1, 2, S]), **named)
    with pytest.raises(ShapeError, match=f"`lengths` must be between 0 and S = {S}, got {S + 1}"):
        call(*tensors, torch.tensor([1, 2, S + 1]), **named)


def test_wrong_arguments_are_refused_while_the_graph_is_traced():
    (query, keys, values), named = case()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"`values` must be of shape \[6, 3, 5\]"):
        compiled()(query, keys, values[:5], **named)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="`v` must be a tensor for the additive score"):
        compiled()(query, keys, values)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="must be one of 'auto', 'fused'"):
        compiled()(query, keys, values, kernel="quick", **named)


@pytest.mark.parametrize("score", [*exhaustive("additive", "dot", "general"), "normalized"])
def test_the_operator_passes_the_checks_of_torch(score):
    tensors, named = case(score)
    rest = [named.get(name) for name in ("v", "weight", "norm_weight", "norm_bias")]
    options = (torch.tensor([S, 2, 0]), *rest, named["score"], "auto", None, True, True)
    torch.library.opcheck(operators.attend_forward, (*tensors, *options))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_the_operator_on_a_gpu_equals_an_eager_call(score, dtype, kernel):
    if interprets():
        pytest.skip("Triton interprets its programs")
    tensors, named = case(score, 64, 48, 32, dtype, "cuda")
    lengths = torch.arange(32, device="cuda") + 10
    call = torch.compile(attend, fullgraph=True)
    found = call(*tensors, lengths, kernel=kernel, need_weights=True, **named)
    expected = attend(*tensors, lengths, kernel=kernel, need_weights=True, **named)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, tensors, named), gradients(expected, tensors, named), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_one_graph_of_a_gpu_serves_all_sizes_under_autocast(score):
    if interprets():
        pytest.skip("Triton interprets its programs")
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def call(query, keys, values, lengths, named):
        with torch.autocast("cuda", torch.bfloat16):
            return attend(query, keys, values, lengths, **named)

    for steps, source, batch in ((4, 6, 3), (90, 50, 2), (100, 70, 64), (2, 2, 2)):
        tensors, named = case(score, steps, source, batch, device="cuda")
        lengths = torch.arange(batch, device="cuda") % source
        found = call(*tensors, lengths, named)
        with torch.autocast("cuda", torch.bfloat16):
            expected = attend(*tensors, lengths, **named)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)
        for one, other in zip(gradients(found, tensors, named), gradients(expected, tensors, named), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_lengths_in_a_list_and_one_step_on_a_gpu():
    if interprets():
        pytest.skip("Triton interprets its programs")
    (query, keys, values), named = case(device="cuda")
    call = torch.compile(attend, fullgraph=True)
    found = call(query[0], keys, values, [S, 2, 0], need_weights=True, **named)
    expected = attend(query[0], keys, values, [S, 2, 0], need_weights=True, **named)
    torch.testing.assert_close(found, expected)
