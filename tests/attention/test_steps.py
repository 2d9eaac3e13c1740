"""A decoder's loop: context, query's gradient at each step, and the source's gradients once, against float64."""

import itertools

import pytest
import torch

import gatewise
from gatewise import attention
from gatewise.attention import plain
from gatewise.attention.choice import ALL, decide
from gatewise.attention.problem import Problem, Score
from gatewise.contract.device import Device
from gatewise.testing.attention import compare, make_gradients, make_inputs
from tests.compilers import runs_triton
from tests.pairwise import each_value

KERNELS = [
    "reference",
    "recompute",
    pytest.param("fused", marks=pytest.mark.skipif(not runs_triton(), reason="needs Triton that runs here")),
]
RAGGED = Problem(5, 7, 4, 31, 9, ragged=True, needs_grad=True)
SHAPES = {
    "ragged, a row of length 1": (RAGGED, [7, 1, 4, 3]),
    "a row of length 0": (RAGGED, [7, 0, 4, 3]),
    "all lengths equal": (RAGGED.replace(ragged=False), None),
    "one step": (RAGGED.replace(steps=1), [2, 7, 1, 5]),
    "three features": (RAGGED.replace(hidden_size=3, value_size=1), [7, 1, 4, 3]),
    "values wider than keys": (RAGGED.replace(hidden_size=8, value_size=70, source=33), [33, 1, 32, 17]),
    "one of everything": (Problem(1, 1, 1, 1, 1, needs_grad=True), None),
}
SCORES = {"additive": {}, "additive with layer norm": {"layer_norm": True}, "dot": {"score": Score.DOT}}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def in_loops(*kernels):
    """Return each kernel with all shapes, scores and dtypes; `make test` runs every pair but those of shape and dtype.

    The layer norm of one feature is left out: it is zero whatever the input.
    """
    cases = [
        case
        for case in itertools.product(SHAPES, SCORES, DTYPES, kernels)
        if not (SCORES[case[1]].get("layer_norm") and SHAPES[case[0]][0].hidden_size == 1)
    ]
    return each_value(cases, (0, 1), (0, 3), (1, 2), (1, 3), (2, 3))


def begin(problem, inputs, kernel="auto", **options):
    return attention.new_steps(
        problem.steps,
        inputs.keys,
        inputs.values,
        inputs.lengths,
        score=problem.score,
        v=inputs.v,
        norm_weight=inputs.norm_weight,
        norm_bias=inputs.norm_bias,
        kernel=kernel,
        **options,
    )


def run(problem, inputs, dcontexts, kernel, gathering=False, **options):
    """Run a decoder's loop forward and backward."""
    steps = begin(problem, inputs, kernel, **options)
    for step in range(problem.steps):
        steps.queries[step].copy_(inputs.query[step])
        attention.attend_step(steps, step)
    dquery = torch.full_like(inputs.query, torch.nan)
    gathered = attention.new_gathering(steps) if gathering else None
    if gathering:
        assert (gathered is not None) == (kernel == "recompute" and problem.additive)
    for step in reversed(range(problem.steps)):
        attention.query_gradient_step(steps, step, dcontexts[step], out=dquery[step], gathered=gathered)
    found = attention.source_gradients(steps, dcontexts, gathered=gathered)
    assert found.query is None
    found = {f"d{name}": tensor for name, tensor in found._asdict().items() if tensor is not None}
    return {"context": steps.contexts, "dquery": dquery} | found


def agrees(problem, lengths, kernel, device="cpu", gathering=False):
    verdict = decide(problem, Device.probe(device)).verdict(kernel)
    if not verdict.accepted:
        pytest.skip("; ".join(map(str, verdict.refusals)))
    inputs = make_inputs(problem, lengths, device=device)
    dcontexts, dweights = make_gradients(problem, device=device)
    found = run(problem, inputs, dcontexts, kernel, gathering)
    # The loop gives no weights; those of the whole-sequence call stand in for them.
    result = next(each for each in ALL if each.name == kernel).forward(problem, inputs, need_weights=True)
    compare(problem, inputs, (dcontexts, torch.zeros_like(dweights)), found | {"weights": result.weights}, device)


@pytest.mark.parametrize(("shape", "score", "dtype", "kernel"), in_loops("reference", "recompute", "fused"), ids=str)
def test_a_loop_agrees_with_float64(shape, score, dtype, kernel, device):
    problem, lengths = SHAPES[shape]
    agrees(problem.replace(dtype=dtype, **SCORES[score]), lengths, kernel, device)


@pytest.mark.parametrize(("shape", "score", "dtype", "kernel"), in_loops("reference", "recompute"), ids=str)
def test_a_loop_that_gathers_agrees_with_float64(shape, score, dtype, kernel, device):
    problem, lengths = SHAPES[shape]
    agrees(problem.replace(dtype=dtype, **SCORES[score]), lengths, kernel, device, gathering=True)


def test_what_is_gathered_makes_no_map_at_the_end(monkeypatch):
    inputs, (dcontexts, _) = make_inputs(RAGGED, [7, 1, 4, 3]), make_gradients(RAGGED)
    maps, replay = [], plain.replay
    monkeypatch.setattr(plain, "replay", lambda *given: maps.append(given) or replay(*given))
    run(RAGGED, inputs, dcontexts, "recompute")
    without = len(maps)
    run(RAGGED, inputs, dcontexts, "recompute", gathering=True)
    assert without == 2 * RAGGED.steps + 1
    assert len(maps) - without == 2 * RAGGED.steps


def test_gradients_of_two_gathered_loops_add_up_and_nan_stays_out_of_what_was_not_looked_at():
    inputs, (dcontexts, _) = make_inputs(RAGGED, [7, 1, 4, 3]), make_gradients(RAGGED)
    whole = run(RAGGED, inputs, dcontexts, "recompute")
    sums = None
    for part in (slice(0, 2), slice(2, 5)):
        steps = begin(RAGGED.replace(steps=part.stop - part.start), inputs, "recompute", queries=inputs.query[part])
        gathered = attention.new_gathering(steps)
        for step in range(part.stop - part.start):
            attention.attend_step(steps, step)
            attention.query_gradient_step(steps, step, dcontexts[part][step], gathered=gathered)
        sums = sums or attention.new_sums(steps)
        attention.source_gradients(steps, dcontexts[part], into=sums, gathered=gathered)
    for name in ("keys", "values", "v"):
        torch.testing.assert_close(getattr(sums, name), whole[f"d{name}"])
    inputs.query[1, 1] = torch.nan
    found = run(RAGGED, inputs, dcontexts, "recompute", gathering=True)
    assert found["dkeys"][0, 1].isnan().all()
    assert not found["dkeys"][1:, 1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_a_loop_agrees_with_float64_at_real_sizes(score, dtype, kernel):
    problem = Problem(7, 70, 6, 512, 650, ragged=True, needs_grad=True, dtype=dtype, **SCORES[score])
    agrees(problem, [70, 1, 33, 0, 64, 17], kernel, "cuda", gathering=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_buffers_of_the_caller_are_written_and_may_be_parts_of_wider_ones(kernel):
    inputs, (dcontexts, _) = make_inputs(RAGGED, [7, 1, 4, 3]), make_gradients(RAGGED)
    wide = torch.full((5, 4, 40), torch.nan)
    steps = begin(RAGGED, inputs, kernel, queries=wide[..., 9:], contexts=wide[..., :9])
    expected = run(RAGGED, inputs, dcontexts, kernel)
    for step in range(5):
        wide[step, :, 9:] = inputs.query[step]
        assert attention.attend_step(steps, step).data_ptr() == wide[step].data_ptr()
    torch.testing.assert_close(wide, torch.cat([expected["context"], inputs.query], -1))
    both = torch.cat([torch.full_like(dcontexts, torch.nan), dcontexts], -1)[..., 9:]
    assert torch.equal(attention.query_gradient_step(steps, 2, both[2]), expected["dquery"][2])
    found = attention.source_gradients(steps, both)
    for name in ("keys", "values", "v"):
        assert torch.equal(getattr(found, name), expected[f"d{name}"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_two_loops_add_up(kernel):
    inputs, (dcontexts, _) = make_inputs(RAGGED, [7, 1, 4, 3]), make_gradients(RAGGED)
    whole = run(RAGGED, inputs, dcontexts, kernel)
    sums = None
    for part in (slice(0, 2), slice(2, 5)):
        steps = begin(RAGGED.replace(steps=part.stop - part.start), inputs, kernel, queries=inputs.query[part])
        for step in range(part.stop - part.start):
            attention.attend_step(steps, step)
        sums = sums or attention.new_sums(steps)
        attention.source_gradients(steps, dcontexts[part], into=sums)
    for name in ("keys", "values", "v"):
        torch.testing.assert_close(getattr(sums, name), whole[f"d{name}"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_kept_without_gradients(kernel):
    inputs = make_inputs(RAGGED, [7, 1, 4, 3])
    steps = begin(RAGGED, inputs, kernel, needs_grad=False)
    assert steps.result.kept == ()
    steps.queries.copy_(inputs.query)
    expected = attention.attend(inputs.query[1], *inputs[1:4], v=inputs.v, kernel=kernel)
    torch.testing.assert_close(attention.attend_step(steps, 1), expected)
    with pytest.raises(gatewise.ArgumentError, match="needs_grad"):
        attention.query_gradient_step(steps, 1, torch.zeros(4, 9))


K, V, W = torch.zeros(7, 2, 3), torch.zeros(7, 2, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: attention.new_steps(5, K, V, score="general"), gatewise.ArgumentError, "use 'dot'"),
        (
            lambda: attention.new_steps(0, K, V, v=W),
            gatewise.ArgumentError,
            "`steps` must be a positive integer, got 0",
        ),
        (lambda: attention.new_steps(5, K[:0], V[:0], v=W), gatewise.ShapeError, "`keys` must be"),
        (lambda: attention.new_steps(5, K, V, v=W, queries=K), gatewise.ShapeError, "`queries` must be of T = 5"),
        (lambda: attention.new_steps(5, K, V, v=W, contexts=V), gatewise.ShapeError, "`contexts` must be of shape"),
        (
            lambda: attention.new_steps(5, K, V, v=W, contexts=torch.zeros(5, 4, 2).transpose(1, 2)),
            gatewise.ArgumentError,
            "`contexts` must be contiguous in its last dimension, got stride 2",
        ),
        (lambda: attention.attend_step(attention.new_steps(5, K, V, v=W), 5), gatewise.ShapeError, "between 0 and 4"),
        (
            lambda: attention.query_gradient_step(attention.new_steps(5, K, V, v=W), 0, V),
            gatewise.ShapeError,
            "`dcontext` must be of shape",
        ),
        (
            lambda: attention.source_gradients(attention.new_steps(5, K, V, v=W), V[:5].double()),
            gatewise.DtypeError,
            "`dcontexts` must be of the keys' dtype",
        ),
    ],
)
def test_bad_input_says_what_to_change(call, error, text):
    with pytest.raises(error, match=text):
        call()
