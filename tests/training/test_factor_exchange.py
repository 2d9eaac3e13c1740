"""Gradients that processes compute from the factors of all of them: the means of whole gradients, in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from several import all_are_large, together
from torch import distributed, nn

from gatewise import for_data_parallel
from gatewise.contract import token_factors
from gatewise.contract.token_factors import FactorReceiver, TokenFactors
from gatewise.models.arguments import embedded
from gatewise.models.chunked_softmax import weighted_token_loss
from gatewise.training import exchange, factor_exchange
from gatewise.training.exchange import GradientExchange
from gatewise.training.factor_exchange import Candidate, candidates, chosen, number_of
from gatewise.training.processes import ALONE, Processes
from tests.pairwise import exhaustive

TOKENS, INPUTS, OUTPUTS = 6, 40, 48
COUNTS = (2, 3)


class Product(torch.autograd.Function):
    """x W^T, which can leave the factors of the gradient of W."""

    @staticmethod
    def forward(ctx, x, weight, states):
        ctx.save_for_backward(x, weight)
        if states:
            dtypes, flops = (x.dtype, x.dtype), 2 * len(x) * weight.numel()
            ctx.token_factors = TokenFactors(len(x), tuple(weight.shape), dtypes, (1,), weight.dtype, flops)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        receiver = token_factors.receiver_of(ctx)
        if receiver is None:
            return gradient @ weight, gradient.t() @ x, None
        of_outputs, of_inputs = receiver.new(x)
        torch.mul(gradient, receiver.scale, out=of_outputs)
        of_inputs.copy_(x)
        receiver.leave(lambda factors: [torch.mm(factors[0].t(), factors[1])])
        return gradient @ weight, None, None


class Model(nn.Module):
    """Two products of weights, of which the second may be read twice."""

    def __init__(self, *, states: bool = True, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(INPUTS, INPUTS) / 6)
        self.second = nn.Parameter(torch.randn(OUTPUTS, INPUTS) / 6)
        self.bias = nn.Parameter(torch.zeros(OUTPUTS))
        self.states, self.twice = states, twice

    def forward(self, x):
        hidden = torch.tanh(Product.apply(x, self.first, self.states))
        y = Product.apply(hidden, self.second, self.states) + self.bias
        return y.square().mean() + (self.second.square().mean() if self.twice else 0)


class Reader(nn.Module):
    """Lookups of embeddings, some of them several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.output = nn.Embedding(140, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        tokens = x.flatten().mul(5).long().abs() % 9
        return (embedded(self.words, "tokens", tokens) @ self.output).square().mean()


class Scores(nn.Module):
    """A softmax over a vocabulary under autocast; sizes that are no multiples of 8 have the bias as a column."""

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(vocabulary, size) / 3), nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x):
        targets = x.argmax(1) % len(self.bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            shares = torch.linspace(0.5, 1.5, len(x)) / len(x)
            return weighted_token_loss(x, self.weight, self.bias, targets, shares, chunk_rows=len(x))


def means(processes: Processes, model, *arguments, tokens=TOKENS, lone=(), **options):
    """Return the means of a model's gradients, whole and from factors, and the elements that were reduced for each."""
    own = options | dict(lone) if processes.rank == 1 else options
    generator = torch.Generator().manual_seed(processes.rank)
    found, reduced = [], []
    size = arguments[0] if arguments else INPUTS
    x = torch.randn(tokens, size, generator=generator)
    for factors in (False, True):
        made = model(*arguments, **own)
        weights = list(made.parameters())
        sender, sizes, all_reduce = GradientExchange(processes, made, factors=factors), [], distributed.all_reduce

        def counted(tensor, *others, sizes=sizes, all_reduce=all_reduce, **named):
            sizes.append(tensor.numel() if tensor.is_floating_point() else 0)
            return all_reduce(tensor, *others, **named)

        with all_are_large(), for_data_parallel(0), pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "all_reduce", counted)
            loss = made(x)
            with sender.during_backward(loss, weights):
                loss.backward()
            arrived = []
            sender.average(weights, [torch.ones(3)], arrived.extend)
        assert len(arrived) == len(weights)
        assert {id(each) for each in arrived} == {id(each) for each in weights}
        found.append([each.grad.numpy() for each in weights])
        reduced.append(sum(sizes))
    return (*found, reduced)


@pytest.fixture(scope="module", params=[COUNTS[0], *exhaustive(*COUNTS[1:])])
def found(request, tmp_path_factory):
    """The number of processes, and the results of all jobs."""
    jobs = {
        "factors": (means, {"model": Model}),
        "twice": (means, {"model": Model, "twice": True}),
        "many tokens": (means, {"model": Model, "tokens": 60}),
        "one process states none": (means, {"model": Model, "lone": {"states": False}}),
        "lookups": (means, {"model": Reader, "tokens": 1}),
        "wide softmax": (softmax_means, {"size": 41, "vocabulary": 150}),
        "aligned softmax": (softmax_means, {"size": 64, "vocabulary": 160}),
    }
    return request.param, together(tmp_path_factory.mktemp("results"), jobs, count=request.param)


def softmax_means(processes: Processes, size, vocabulary):
    return means(processes, Scores, size, vocabulary)


WHOLE = ["twice", "many tokens", "one process states none"]
"""Jobs in which a gradient that could be left as factors is sent as a whole."""


@pytest.mark.parametrize("kind", ["factors", "lookups", *WHOLE])
def test_the_means_are_those_of_the_whole_gradients(found, kind):
    _, results = found
    for whole, by_factors, _ in results[kind]:
        for one, other in zip(whole, by_factors, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["wide softmax", "aligned softmax"])
def test_the_means_of_a_softmax_are_those_of_the_whole_gradients(found, kind):
    _, results = found
    for whole, by_factors, _ in results[kind]:
        for one, other in zip(whole, by_factors, strict=True):
            # Each rounds rows and sums to bfloat16 once.
            np.testing.assert_allclose(other, one, rtol=0, atol=2**-7 * np.abs(one).max())


@pytest.mark.parametrize("kind", ["factors", "lookups", "wide softmax", "aligned softmax", *WHOLE])
def test_all_processes_have_the_same_bits(found, kind):
    _, results = found
    (_, first, _), *others = results[kind]
    for _, other, _ in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, another)


def test_gradients_are_not_sent_where_factors_are(found):
    _, results = found
    first, second = INPUTS * INPUTS, OUTPUTS * INPUTS
    for name, saved in {
        "factors": first + second,
        "twice": first,
        "many tokens": 0,
        "one process states none": 0,
        "lookups": 140 * 8,
        "wide softmax": 150 * 41 + 150,
        "aligned softmax": 160 * 64,
    }.items():
        for *_, (whole, by_factors) in results[name]:
            assert whole - by_factors == saved, name


def stated(tokens=4, **changes):
    dtypes = (torch.float32, torch.float32)
    return TokenFactors(tokens, (8, 16), dtypes, (1,), torch.float32, 2 * tokens * 8 * 16)._replace(**changes)


def candidate(tokens, rows=800, columns=1600, dtype=torch.bfloat16, **changes):
    """Return a node with a weight [rows, columns], whose factors are of the dtype."""
    said = TokenFactors(tokens, (rows, columns), (dtype, dtype), (1,), torch.float32, 2 * tokens * rows * columns)
    return Candidate(None, said._replace(**changes), (torch.empty(rows, columns),))


def choice(*found, count=2, bfloat16=False, least_bytes=1):
    return chosen(found, count, bfloat16=bfloat16, least_bytes=least_bytes)


def test_factors_of_few_tokens_are_sent():
    few = candidate(300)
    assert choice(few) == [few]
    assert choice(candidate(700)) == []
    # The more processes, the more factors.
    assert choice(few, count=16) == []
    # Half the bytes of the gradient are saved otherwise.
    assert choice(candidate(400)) != []
    assert choice(candidate(400), bfloat16=True) == []


def test_small_weights_half_factors_and_too_many_tokens_are_not_sent():
    few = candidate(100)
    assert choice(few, least_bytes=few.weights[0].nbytes) == [few]
    assert choice(few, least_bytes=few.weights[0].nbytes + 1) == []
    assert choice(candidate(100, dtype=torch.float16)) == []
    assert choice(candidate(100, most_tokens=199)) == []
    assert len(choice(candidate(100, most_tokens=200))) == 1


def test_the_costs_of_all_factors_together_limit_them():
    cheap, dear, another = candidate(50), candidate(880), candidate(890)
    assert choice(dear) == []
    assert choice(dear, cheap) == [dear, cheap]
    assert choice(another, dear, cheap) == [dear, cheap]
    # Not in place of a gradient that is fewer bytes.
    assert choice(candidate(950), cheap, candidate(40)) != []
    assert len(choice(candidate(950), cheap, candidate(40))) == 2


def test_only_weights_that_one_node_reads_are_candidates():
    weight, other, x = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    node = Product.apply(x, weight, True).grad_fn
    leaves = [x, weight]
    (only,) = candidates([(node, leaves)], {weight})
    assert only.node is node
    assert only.weights == (weight,)
    assert candidates([(node, leaves)], {other}) == []
    assert candidates([(node, [x, None])], {weight}) == []
    half = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    assert candidates([(node, [x, half])], {half}) == []


def test_processes_recognise_the_same_factors_of_the_same_weights():
    weights = [torch.ones(2), torch.ones(3)]
    one = number_of([Candidate(None, stated(), (weights[0],))], weights, "cpu")
    assert number_of([], weights, "cpu") == 0
    assert number_of([Candidate("another node", stated(), (weights[0],))], weights, "cpu") == one > 0
    assert number_of([Candidate(None, stated(), (weights[0],))], weights, "another device") != one
    for other in (Candidate(None, stated(5), (weights[0],)), Candidate(None, stated(), (weights[1],))):
        assert number_of([other], weights, "cpu") != one


def test_a_node_that_leaves_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="left no factors"):
        FactorReceiver(stated(), 0, 2, list).gradients()


def test_a_captured_step_sends_the_factors_of_the_steps_before_it(monkeypatch):
    sent = []

    class Two(Processes):
        def all_gather_number(self, own):
            return own, own

        def start_all_gather_into(self, tensors, parts):
            sent.append([each.shape for each in tensors])
            for each, part in zip(tensors, parts, strict=True):
                each[:] = part
            return lambda: None

        def start_average(self, tensors, **options):
            return lambda: None

    processes = Two(0, 2, torch.device("cpu"))
    x, model = torch.randn(TOKENS, INPUTS), Model()
    sender, weights = GradientExchange(processes, model, factors=True), list(model.parameters())

    def step(model):
        loss = model(x)
        with sender.during_backward(loss, weights):
            loss.backward()
        sender.average(weights)

    with all_are_large(), for_data_parallel(0):
        sender.expect("shapes")
        step(model)
        once = list(sent)
        monkeypatch.setattr(exchange, "_is_captured", lambda device: True)
        step(model)
        assert sent == 2 * once
        assert [len(each) for each in once] == [2, 2]
        model.states = False
        with pytest.raises(RuntimeError, match="differs between batches of one shape"):
            step(model)


def test_factors_of_one_process_reach_the_memory_for_all():
    tensors, parts = [torch.full((1, 2), -1.0), torch.zeros(1, 3)], [torch.ones(2), torch.full((3,), 2.0)]
    ALONE.start_all_gather_into(tensors, parts)()
    assert [each[0].tolist() for each in tensors] == [[1, 1], [2, 2, 2]]


def test_the_time_of_products_is_part_of_the_choice(monkeypatch):
    few = candidate(300)
    assert choice(few) == [few]
    monkeypatch.setattr(factor_exchange, "_FLOPS_OF_A_BYTE", 100)
    assert choice(few) == []
