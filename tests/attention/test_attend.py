"""The call: autograd, one step, options that count, what lies beyond a length, and errors that say what to change."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.autograd import forward_ad

import gatewise
from gatewise import attention
from gatewise.attention.call import Inputs
from gatewise.attention.choice import decide
from gatewise.attention.problem import Problem, Score
from gatewise.contract import errors
from gatewise.testing.attention import compare, make_gradients, make_inputs
from tests.compilers import runs_triton
from tests.pairwise import each_value

KERNELS = [
    "reference",
    "recompute",
    pytest.param("fused", marks=pytest.mark.skipif(not runs_triton(), reason="needs Triton that runs here")),
]
PROBLEM = Problem(5, 7, 4, 31, 9, ragged=True, needs_grad=True)
LENGTHS = [7, 1, 0, 3]
SCORES = {
    "additive": {},
    "normalised": {"layer_norm": True},
    "dot": {"score": Score.DOT},
    "general": {"score": Score.GENERAL, "query_size": 6},
}


def parameters(inputs):
    return {name: getattr(inputs, name) for name in ("v", "weight", "norm_weight", "norm_bias")}


def attend(problem, inputs, **options):
    options = parameters(inputs) | {"score": problem.score} | options
    return attention.attend(inputs.query, inputs.keys, inputs.values, inputs.lengths, **options)


def leaves(inputs):
    return inputs._replace(
        **{
            name: tensor.requires_grad_()
            for name, tensor in inputs._asdict().items()
            if tensor is not None and name != "lengths"
        }
    )


@pytest.mark.parametrize(
    ("kernel", "score", "lengths"),
    each_value([*itertools.product(["reference", "recompute"], SCORES, [None, [3, 0]])]),
    ids=str,
)
def test_second_derivatives(score, kernel, lengths):
    problem = Problem(2, 3, 2, 4, 4, dtype=torch.float64, needs_grad=True, ragged=lengths is not None)
    inputs = leaves(make_inputs(problem.replace(**SCORES[score]), lengths))
    names = [
        name for name, tensor in inputs._asdict().items() if tensor is not None and name not in ("keys", "lengths")
    ]

    def call(*tensors):
        given = inputs._replace(**dict(zip(names, tensors, strict=True)))
        # The keys are computed from the values: the gradient of the values must not have the part of the keys twice.
        given = given._replace(keys=given.values.sin())
        return attend(problem.replace(**SCORES[score]), given, kernel=kernel, need_weights=True)

    tensors = [getattr(inputs, name) for name in names]
    above = [torch.randn_like(output) for output in call(*tensors)]
    first = torch.autograd.grad(call(*tensors), tensors, above)
    torch.testing.assert_close(torch.autograd.grad(call(*tensors), tensors, above, create_graph=True), first)
    assert torch.autograd.gradgradcheck(call, tensors, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("lengths", [None, [3, 0]], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_transforms_of_functions(score, lengths):
    problem = Problem(2, 3, 2, 4, 4, dtype=torch.float64, needs_grad=True, ragged=lengths is not None)
    problem = problem.replace(**SCORES[score])
    inputs = leaves(make_inputs(problem, lengths))
    names = [name for name, tensor in inputs._asdict().items() if tensor is not None and name != "lengths"]
    tensors = [getattr(inputs, name) for name in names]

    def call(*given):
        return attend(problem, inputs._replace(**dict(zip(names, given, strict=True))))

    def loss(*given):
        return call(*given).square().sum()

    plain = [tensor.detach() for tensor in tensors]
    every = tuple(range(len(names)))
    expected = torch.autograd.grad(loss(*tensors), tensors)
    torch.testing.assert_close(torch.func.grad(loss, every)(*plain), expected)
    torch.testing.assert_close(
        torch.func.jacrev(call)(*plain), torch.autograd.functional.jacobian(lambda q: call(q, *plain[1:]), plain[0])
    )
    for_each = torch.vmap(torch.func.grad(loss, every))(*[torch.stack([each, 2 * each]) for each in plain])
    twice = [(2 * each).requires_grad_() for each in plain]
    both = [torch.stack(each) for each in zip(expected, torch.autograd.grad(loss(*twice), twice), strict=True)]
    torch.testing.assert_close(list(for_each), both)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(plain[0]))
        tangent = forward_ad.unpack_dual(loss(dual, *tensors[1:])).tangent
    torch.testing.assert_close(tangent, expected[0].sum())


def test_lengths_may_be_mapped_and_are_clamped_then():
    inputs = make_inputs(Problem(2, 3, 2, 4, 4, dtype=torch.float64), None)
    lengths = torch.tensor([[3, 1], [0, 9]])

    def call(lengths):
        return attention.attend(*inputs[:3], lengths, v=inputs.v)

    torch.testing.assert_close(torch.vmap(call)(lengths), torch.stack([call(each.clamp(max=3)) for each in lengths]))


def test_a_kernel_that_no_transform_can_use_is_refused_by_name():
    inputs = make_inputs(Problem(2, 3, 2, 4, 4, dtype=torch.float64), None)

    def loss(query, kernel):
        return attention.attend(query, *inputs[1:3], v=inputs.v, kernel=kernel).sum()

    with pytest.raises(gatewise.KernelRefused, match="`kernel` must be 'auto' or 'reference' inside of"):
        torch.func.grad(loss)(inputs.query, "recompute")
    assert torch.func.grad(loss)(inputs.query, "reference").any()


@pytest.mark.parametrize("lengths", [None, [3, 0], torch.zeros(2, dtype=torch.int64, device="meta")], ids=str)
def test_meta_tensors_have_shapes(lengths):
    inputs = leaves(
        Inputs(*[None if each is None else each.to("meta") for each in make_inputs(Problem(2, 3, 2, 4, 5), None)])
    )
    context, weights = attention.attend(*inputs[:3], lengths, v=inputs.v, need_weights=True)
    assert (context.shape, weights.shape, context.is_meta) == ((2, 2, 5), (2, 2, 3), True)
    context.sum().backward()
    assert inputs.query.grad.shape == inputs.query.shape


def test_second_derivatives_of_a_call_without_positions():
    query, keys, values = (torch.randn(size, 2, 4, dtype=torch.float64, requires_grad=True) for size in (3, 0, 0))
    context = attention.attend(query, keys, values, score="dot")
    (found,) = torch.autograd.grad(context.sum(), query, create_graph=True)
    assert not found.any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("score", SCORES)
def test_autograd_agrees_with_float64(score, kernel):
    problem = PROBLEM.replace(**SCORES[score])
    inputs, gradients = leaves(make_inputs(problem, LENGTHS)), make_gradients(problem)
    context, weights = attend(problem, inputs, kernel=kernel, need_weights=True)
    torch.autograd.backward([context, weights], gradients)
    found = {"context": context, "weights": weights}
    found |= {
        f"d{name}": tensor.grad for name, tensor in inputs._asdict().items() if getattr(tensor, "requires_grad", 0)
    }
    compare(problem, inputs, gradients, found)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("score", SCORES)
def test_steps_one_by_one_equal_all_at_once_and_add_up_their_gradients(score, kernel):
    problem = PROBLEM.replace(**SCORES[score])
    inputs, gradients = make_inputs(problem, LENGTHS), make_gradients(problem)
    options = parameters(inputs) | {"score": problem.score, "kernel": kernel, "need_weights": True}
    sums, dquery, contexts, weights = None, [], [], []
    for step in range(problem.steps):
        query = inputs.query[step : step + 1]
        context, share, saved = attention.forward(query, inputs.keys, inputs.values, inputs.lengths, **options)
        sums = sums or attention.new_sums(saved)
        above = [gradient[step : step + 1] for gradient in gradients]
        dquery.append(attention.backward(saved, *above, into=sums).query)
        contexts.append(context)
        weights.append(share)
    found = {"context": torch.cat(contexts), "weights": torch.cat(weights), "dquery": torch.cat(dquery)}
    found |= {f"d{name}": tensor for name, tensor in sums._asdict().items() if tensor is not None}
    compare(problem, inputs, gradients, found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_step_has_no_step_dimension(kernel):
    inputs = make_inputs(PROBLEM, LENGTHS)
    whole, shares = attend(PROBLEM, inputs, kernel=kernel, need_weights=True)
    context, share = attend(PROBLEM, inputs._replace(query=inputs.query[2]), kernel=kernel, need_weights=True)
    torch.testing.assert_close(context, whole[2])
    torch.testing.assert_close(share, shares[2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("score", SCORES)
def test_what_lies_beyond_a_length_is_never_looked_at(score, kernel):
    problem = PROBLEM.replace(**SCORES[score])
    inputs, gradients = make_inputs(problem, LENGTHS), make_gradients(problem)
    beyond = torch.arange(7)[:, None] >= inputs.lengths
    poisoned = inputs._replace(
        keys=inputs.keys.masked_fill(beyond[..., None], torch.nan),
        values=inputs.values.masked_fill(beyond[..., None], torch.nan),
    )
    found = []
    for each in (inputs, poisoned):
        each = leaves(each)
        context = attend(problem, each, kernel=kernel)
        context.backward(gradients[0])
        found.append([context.detach(), *(t.grad for t in each if t is not None and t.requires_grad)])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)
    assert not found[0][2].masked_select(beyond[..., None]).any()  # the keys' gradient
    assert not found[0][0][:, 2].any()  # the context of the sequence without source


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("where", ["query", "keys", "values", "v"])
def test_nan_in_gives_nan_out(where, kernel):
    inputs = make_inputs(PROBLEM, LENGTHS)
    tensor = getattr(inputs, where).clone()
    tensor[(0,) * tensor.dim()] = torch.nan
    context = attend(PROBLEM, inputs._replace(**{where: tensor}), kernel=kernel)
    reached = {"query": context[0, 0], "keys": context[:, 0], "values": context[:, 0, 0], "v": context[:, :2]}[where]
    assert reached.isnan().all()
    assert not context[:, 2].any()  # a sequence without source has a zero context whatever the query


def test_every_option_changes_the_result():
    inputs = make_inputs(PROBLEM.replace(layer_norm=True), LENGTHS)
    base = attend(PROBLEM, inputs, norm_weight=None, norm_bias=None)
    others = [
        attend(PROBLEM, inputs),
        attend(PROBLEM, inputs, norm_weight=torch.ones_like(inputs.v), norm_bias=torch.zeros_like(inputs.v)),
        attend(PROBLEM, inputs, norm_bias=inputs.norm_bias + 1),
        attend(PROBLEM, inputs, norm_weight=None, norm_bias=None, v=-inputs.v),
        attend(PROBLEM, inputs._replace(lengths=None), norm_weight=None, norm_bias=None),
        attend(PROBLEM, inputs, score="dot", v=None, norm_weight=None, norm_bias=None),
        attend(
            PROBLEM,
            inputs,
            score="general",
            v=None,
            norm_weight=None,
            norm_bias=None,
            weight=2 * torch.eye(31),
        ),
    ]
    results = [base, *others]
    for index, one in enumerate(results):
        assert not any(torch.allclose(one, other) for other in results[index + 1 :])


def test_nothing_comes_of_nothing():
    query, keys, values, v = torch.randn(5, 2, 3), torch.randn(0, 2, 3), torch.randn(0, 2, 4), torch.randn(3)
    query.requires_grad_()
    context = attention.attend(query, keys, values, v=v)
    context.sum().backward()
    assert context.shape == (5, 2, 4)
    assert not context.any()
    assert not query.grad.any()
    assert attention.attend(query[:0], keys, values, v=v).shape == (0, 2, 4)
    assert attention.attend(torch.zeros(5, 0, 3), torch.zeros(7, 0, 3), torch.zeros(7, 0, 4), [], v=v).shape == (
        5,
        0,
        4,
    )


def test_memory_budget_passes_over_what_needs_too_much():
    inputs = make_inputs(Problem(600, 50, 2, 512, 4, needs_grad=True))
    problem = Problem(600, 50, 2, 512, 4, needs_grad=True)
    free = attention.explain(problem)
    assert free.chosen == "reference"
    budget = free.verdict("recompute").peak_bytes
    assert decide(problem, free.device, "auto", budget).chosen == "recompute"
    for each in inputs:
        if each is not None:
            each.requires_grad_()
    with pytest.raises(gatewise.OutOfMemoryPredicted, match="recompute"):
        attend(problem, inputs, memory_budget=1000)


def test_autocast_computes_in_its_dtype():
    inputs = make_inputs(PROBLEM, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(PROBLEM, inputs).dtype == torch.bfloat16


def test_lengths_without_values_are_refused():
    lengths = torch.tensor([7, 4], device="meta")
    with pytest.raises(
        gatewise.DeviceError, match="`lengths` must be on the CPU or on the keys' device 'cpu', got on meta"
    ):
        attention.attend(Q, K, V, lengths, v=W)


Q, K, V, W = torch.zeros(5, 2, 3), torch.zeros(7, 2, 3), torch.zeros(7, 2, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((Q, K, V), {}, gatewise.ArgumentError, "`v` must be a tensor for the additive score"),
        ((Q, K, V), {"v": W, "score": "dot"}, gatewise.ArgumentError, "`v` must be None for the dot score"),
        ((Q, K, V), {"v": W, "weight": W}, gatewise.ArgumentError, "`weight` must be None"),
        ((Q, K, V), {"score": "cosine"}, gatewise.ArgumentError, "`score` must be one of 'additive', 'dot', 'general'"),
        ((Q, K, V), {"v": W, "norm_weight": W}, gatewise.ArgumentError, "`norm_bias` must be given"),
        ((Q[0, 0], K, V), {"v": W}, gatewise.ShapeError, "`query` must be"),
        ((Q[..., :2], K, V), {"v": W}, gatewise.ShapeError, r"`query` must be of shape \[5, 2, 3\], got \[5, 2, 2\]"),
        ((Q, K, V[:3]), {"v": W}, gatewise.ShapeError, "`values` must be of shape"),
        ((Q, K, V), {"v": W[:2]}, gatewise.ShapeError, "`v` must be of shape"),
        ((Q, K, V.double()), {"v": W}, gatewise.DtypeError, "`values` must be of the keys' dtype"),
        ((Q, K, V, [7]), {"v": W}, gatewise.ShapeError, "`lengths` must be of shape"),
        ((Q, K, V, [7, 8]), {"v": W}, gatewise.ShapeError, "`lengths` must be between 0 and S = 7, got 8"),
        ((Q, K, V, [7, -1]), {"v": W}, gatewise.ShapeError, "`lengths` must be between 0 and S = 7, got -1"),
        ((Q, K, V, [7.0, 1.0]), {"v": W}, gatewise.DtypeError, "`lengths` must be integers"),
        *[
            ((Q, K, V, lengths), {"v": W}, gatewise.ArgumentError, "`lengths` must be None, or 2 integers, got")
            for lengths in (7, "ab", [7, None], [2**70, 1])
        ],
        (
            (Q, K.to_sparse(), V),
            {"v": W},
            gatewise.ArgumentError,
            "`keys` must be a dense tensor, got one of torch.sparse",
        ),
        ((Q.numpy(), K, V), {"v": W}, gatewise.ArgumentError, "`query` must be a tensor, got ndarray"),
        ((Q, K, [V]), {"v": W}, gatewise.ArgumentError, "`values` must be a tensor, got list"),
        ((Q, K, V), {"v": 1.0}, gatewise.ArgumentError, "`v` must be a tensor, got float"),
        ((Q, K, V), {"v": W, "kernel": "best"}, gatewise.KernelRefused, "`kernel` must be one of 'auto', 'fused'"),
        *[
            ((Q, K, V), {"v": W, "memory_budget": budget}, gatewise.ArgumentError, "`memory_budget` must be None or a")
            for budget in (float("nan"), 0, -1.0, True, "8GB")
        ],
    ],
)
def test_bad_input_says_what_to_change(arguments, options, error, text):
    with pytest.raises(error, match=text):
        attention.attend(*arguments, **options)
    attention.attend(Q, K, V, v=W)  # the next call works


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda saved: pickle.loads(pickle.dumps(saved))])
def test_a_copy_of_what_a_forward_pass_saved_serves_the_backward_pass(travel):
    inputs = make_inputs(PROBLEM, LENGTHS)

    context, _, saved = attention.forward(*inputs[:4], v=inputs.v)
    dcontext = torch.ones_like(context)
    expected = attention.backward(saved, dcontext)
    again = travel(saved)
    for found, value in zip(attention.backward(again, dcontext), expected, strict=True):
        assert (found is None) == (value is None)
        assert found is None or torch.equal(found, value)
    again.inputs.query.mul_(2)
    with pytest.raises(errors.ModifiedInPlace, match="`query` must be as it was"):
        attention.backward(again, dcontext)
    inputs.query.mul_(2)
    with pytest.raises(errors.ModifiedInPlace, match="`query` must be as it was"):
        travel(saved)


@pytest.mark.parametrize("name", ["query", "keys", "values", "v", "context"])
def test_a_tensor_that_was_modified_between_the_explicit_passes_is_named(name):
    given = {"query": Q.clone(), "keys": K.clone(), "values": V.clone(), "v": W.clone()}
    context, _, saved = attention.forward(**given, kernel="reference")
    attention.backward(saved, torch.ones_like(context))
    (given | {"context": context})[name].add_(1)
    with pytest.raises(gatewise.ModifiedInPlace, match=f"`{name}` must be as it was in the forward pass"):
        attention.backward(saved, torch.ones_like(context))


@pytest.mark.parametrize(
    ("above", "error", "text"),
    [
        ((torch.ones(5, 2, 1), None), gatewise.ShapeError, r"`dcontext` must be of shape \[5, 2, 4\], got \[5, 2, 1\]"),
        ((torch.ones(5, 2, 4).double(), None), gatewise.DtypeError, "`dcontext` must be of the keys' dtype"),
        ((None, None), gatewise.ArgumentError, "`dcontext` must be a tensor"),
        (
            (torch.ones(5, 2, 4), torch.ones(1)),
            gatewise.ShapeError,
            r"`dweights` must be of shape \[5, 2, 7\], got \[1\]",
        ),
    ],
)
def test_gradients_that_do_not_fit_the_outputs_are_refused(above, error, text):
    *_, saved = attention.forward(Q, K, V, v=W)
    with pytest.raises(error, match=text):
        attention.backward(saved, *above)


def test_a_forward_pass_without_gradients_has_no_backward_pass():
    context, _, saved = attention.forward(Q, K, V, v=W, needs_grad=False)
    with pytest.raises(gatewise.ArgumentError, match=r"`saved` must be .* with needs_grad=True"):
        attention.backward(saved, context)


def test_an_unknown_device_is_named():
    with pytest.raises(gatewise.DeviceError, match="`device` must be a CPU or CUDA device, got 'h2000'"):
        attention.explain(PROBLEM, "h2000")


def test_the_default_device_is_not_that_of_lengths():
    query, keys, values, v = torch.randn(5, 2, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 3), torch.randn(8)
    expected = attention.attend(query, keys, values, [7, 4], v=v)
    with torch.device("meta"):
        torch.testing.assert_close(attention.attend(query, keys, values, [7, 4], v=v), expected)
