"""Every kernel: outputs and gradients against float64, whatever the lengths and sizes; what is kept; determinism."""

import itertools
import math

import pytest
import torch

from gatewise.attention.call import ALL as EVERYTHING
from gatewise.attention.call import Needs
from gatewise.attention.choice import ALL, decide
from gatewise.attention.fused import fused
from gatewise.attention.problem import Problem, Score
from gatewise.attention.recompute import recompute, steps_per_chunk
from gatewise.contract.device import Device
from gatewise.testing.attention import budgets, check_kernel, make_gradients, make_inputs, run_kernel, textbook
from gatewise.testing.budgets import relative_error
from gatewise.training.precision import arithmetic
from tests.pairwise import each_value

QUERY = Needs(query=True, source=False)
RAGGED = Problem(5, 7, 4, 31, 9, ragged=True, needs_grad=True)
SHAPES = {
    "ragged, a row of length 1": (RAGGED, [7, 1, 4, 3]),
    "a row of length 0": (RAGGED, [7, 0, 4, 3]),
    "all lengths equal": (RAGGED.replace(ragged=False), None),
    "all lengths equal and given": (RAGGED, [7, 7, 7, 7]),
    "one step": (RAGGED.replace(steps=1), [2, 7, 1, 5]),
    "three features": (RAGGED.replace(hidden_size=3, value_size=1), [7, 1, 4, 3]),
    "one of everything": (Problem(1, 1, 1, 1, 1, needs_grad=True), None),
}
SCORES = {
    "additive": {},
    "additive with layer norm": {"layer_norm": True},
    "dot": {"score": Score.DOT},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The layer norm of one feature is zero whatever the input.
CASES = [
    case
    for case in itertools.product(SHAPES, SCORES, DTYPES, ALL)
    if not (SCORES[case[1]].get("layer_norm") and SHAPES[case[0]][0].hidden_size == 1)
]


def skip_unless_accepted(kernel, problem, device):
    verdict = decide(problem, Device.probe(device)).verdict(kernel.name)
    if not verdict.accepted:
        pytest.skip("; ".join(map(str, verdict.refusals)))


# `make test` runs every pair of values but those of shape and dtype.
@pytest.mark.parametrize(
    ("shape", "score", "dtype", "kernel"),
    each_value(CASES, (0, 1), (0, 3), (1, 2), (1, 3), (2, 3), most=12),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_agrees_with_float64(shape, score, dtype, kernel, device):
    problem, lengths = SHAPES[shape]
    problem = problem.replace(dtype=dtype, **SCORES[score])
    skip_unless_accepted(kernel, problem, device)
    check_kernel(kernel, problem, lengths, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("steps", [1, 3, 37])
def test_agrees_with_float64_at_real_sizes(steps, score, dtype, kernel):
    problem = Problem(steps, 70, 6, 512, 650, ragged=True, needs_grad=True, dtype=dtype, **SCORES[score])
    check_kernel(kernel, problem, [70, 1, 33, 0, 64, 17], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16, 40, 72])
def test_products_in_tf32_err_as_pytorchs_do(length):
    problem = Problem(length, length, 6, 512, 512, ragged=True, needs_grad=True, allow_tf32=True)
    with arithmetic("tf32"):
        check_kernel(fused, problem, [length, length, 1, length // 2, length, 0], "cuda")


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("size", [3.0, 30.0, 300.0])
def test_queries_and_keys_of_any_size(size, kernel, device):
    """Where exponentials of the two overflow, the tanh of their sum need not be 1."""
    problem = RAGGED.replace(source=40, value_size=20)
    skip_unless_accepted(kernel, problem, device)
    inputs, gradients = make_inputs(problem, [40, 1, 4, 33], device=device), make_gradients(problem, device=device)
    far = size * torch.randn(problem.batch, problem.hidden_size, generator=torch.Generator().manual_seed(2)).to(device)
    inputs = inputs._replace(query=inputs.query + far, keys=inputs.keys - far)
    found = run_kernel(kernel, problem, inputs, gradients)
    exact = textbook(problem, inputs, gradients, torch.float64, "cpu")
    allowed = budgets(problem, inputs, gradients, exact, device)
    for name, value in exact.items():
        assert relative_error(found[name], value) <= allowed[name], name


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("steps", "source", "needs"), [(1, 40, QUERY), (1, 40, EVERYTHING), (6, 40, EVERYTHING), (6, 90, EVERYTHING)]
)
def test_gradients_of_scores_add_up_to_zero_to_the_last_bits(steps, source, needs, dtype, device):
    """A bias of the keys sees nothing but their sum, however large the context, whose rounding must not get there."""
    problem = RAGGED.replace(steps=steps, source=source, value_size=20, dtype=dtype)
    skip_unless_accepted(fused, problem, device)
    inputs, gradients = make_inputs(problem, [source, 1, 4, 33], device=device), make_gradients(problem, device=device)
    # With a tanh of zero everywhere, the query's gradient is v times the sum of its scores' gradients, and a key's v
    # times its own.
    inputs = inputs._replace(query=0 * inputs.query, keys=0 * inputs.keys, values=inputs.values + 3)
    result = fused.forward(problem, inputs)
    dquery = fused.backward(problem, inputs, result, gradients[0], None, needs=needs).query.double()
    single = textbook(problem, inputs, (gradients[0], 0 * gradients[1]), torch.float64, "cpu")
    scale = gradients[0].double().cpu().norm(dim=-1) * inputs.v.double().cpu().norm()
    assert single["dkeys"].norm() > 1e-2 * scale.norm() / source
    assert (dquery.cpu().norm(dim=-1) <= 1e-5 * scale).all()


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("score", SCORES)
def test_repeats_its_bits(score, kernel, device):
    problem = RAGGED.replace(**SCORES[score])
    skip_unless_accepted(kernel, problem, device)
    inputs, gradients = make_inputs(problem, [7, 1, 4, 3], device=device), make_gradients(problem, device=device)
    first, second = (run_kernel(kernel, problem, inputs, gradients) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stretches_equal_the_whole(monkeypatch):
    problem = RAGGED.replace(dtype=torch.float64)
    monkeypatch.setattr("gatewise.attention.recompute.WORKSPACE_BYTES", 2 * problem.replace(steps=1).map_bytes)
    assert steps_per_chunk(problem) == 2  # 5 steps: 2, 2, 1
    check_kernel(recompute, problem, [7, 1, 4, 3])


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("score", SCORES)
def test_keeps_what_it_says(score, kernel):
    problem = RAGGED.replace(**SCORES[score])
    skip_unless_accepted(kernel, problem, "cpu")
    inputs = make_inputs(problem, [7, 1, 4, 3])
    for each in (problem, problem.replace(needs_grad=False)):
        kept = kernel.forward(each, inputs, need_weights=False).kept
        specs = kernel.kept(each, Device.named("cpu"))
        assert [(tuple(one.shape), one.dtype) for one in kept] == [(spec.shape, spec.dtype) for spec in specs]
    map_size = problem.pairs * problem.hidden_size
    keeps_the_map = any(math.prod(spec.shape) == map_size for spec in kernel.kept(problem, Device.named("cpu")))
    assert keeps_the_map == (kernel.name == "reference" and problem.additive)


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_inputs_are_left_as_they_were(kernel):
    skip_unless_accepted(kernel, RAGGED, "cpu")
    inputs = make_inputs(RAGGED, [7, 1, 4, 3])
    before = [None if each is None else each.clone() for each in inputs]
    run_kernel(kernel, RAGGED, inputs, make_gradients(RAGGED))
    assert all(a is None or torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_strides_do_not_matter(kernel):
    skip_unless_accepted(kernel, RAGGED, "cpu")
    inputs, gradients = make_inputs(RAGGED, [7, 1, 4, 3]), make_gradients(RAGGED)
    batch_first = inputs._replace(
        query=inputs.query.transpose(0, 1).contiguous().transpose(0, 1),
        keys=inputs.keys.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        values=torch.cat([inputs.values, inputs.values], -1)[..., 9:],
    )
    found, expected = (run_kernel(kernel, RAGGED, each, gradients) for each in (batch_first, inputs))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("kernel", "criterion"),
    [(kernel, criterion) for kernel in ALL for criterion in kernel.criteria()],
    ids=lambda each: getattr(each, "name", None) or each.quantity,
)
def test_every_refusal_says_what_and_why(kernel, criterion):
    device = Device.named("h200")
    assert decide(RAGGED, device, kernel.name).chosen == kernel.name
    problem, device = criterion.violation(RAGGED, device)
    decision = decide(problem, device, kernel.name)
    assert decision.chosen is None
    assert f"{criterion.quantity} is" in " ".join(str(decision).split())


def test_fused_is_chosen_on_a_gpu_and_not_in_the_interpreter():
    problem = Problem(50, 50, 128, 512, 512, ragged=True, needs_grad=True)
    assert decide(problem, Device.named("h200")).chosen == "fused"
    assert decide(problem, Device.named("cpu").replace(triton=True)).chosen == "reference"
    assert decide(problem, Device.named("h200").replace(triton=False)).chosen == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("steps", [1, 9])
def test_replays_from_a_cuda_graph_with_other_lengths(steps, kernel):
    problem = Problem(steps, 40, 6, 64, 48, ragged=True, needs_grad=True, dtype=torch.bfloat16)
    inputs, gradients = make_inputs(problem, [40] * 6, device="cuda"), make_gradients(problem, device="cuda")
    run_kernel(kernel, problem, inputs, gradients)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_kernel(kernel, problem, inputs, gradients)
    inputs.lengths.copy_(torch.tensor([40, 1, 0, 17, 33, 5]))
    graph.replay()
    for name, tensor in run_kernel(kernel, problem, inputs, gradients).items():
        assert torch.equal(found[name], tensor)
