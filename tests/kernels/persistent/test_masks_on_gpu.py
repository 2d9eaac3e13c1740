"""Dropout and zoneout in the recurrence on a GPU: against float64 and the kernel eager, with the masks of each call."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import GRU, LSTM, SLSTM, LayerNormLSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.training.precision import arithmetic
from tests.graphs import captured
from tests.kernels.persistent.test_masks_on_cpu import ALL, CANDIDATE, DROPOUT, OF_CELL, masked
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "exact": {"dtype": torch.float32},
}
SHAPES = {
    "both-directions": Problem(20, 40, 64, 256, bidirectional=True, num_layers=2),
    "two-layers": Problem(40, 16, 61, 256, num_layers=2, dropout=0.3),
    "clusters": Problem(9, 64, 128, 1024),
    "large-weights": Problem(8, 80, 600, 1150),
    "odd": Problem(29, 21, 61, 203, bidirectional=True, resets=True),
    "one-row": Problem(30, 1, 64, 1024),
    "one-step": Problem(1, 20, 64, 256, bidirectional=True),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "ragged-resets": Problem(37, 20, 61, 133, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
    "rows-in-turn": Problem(5, 300, 64, 512, resets=True),
}
CELLS = [
    masked(LSTM(), DROPOUT),
    masked(LSTM(), "zoneout"),
    masked(LSTM(), CANDIDATE),
    masked(LSTM(), OF_CELL),
    *(masked(cell, *ALL) for cell in (LSTM(), GRU(), SLSTM(), LayerNormLSTM())),
]
OPTIONS = {
    "recurrent dropout": {"recurrent_dropout": 0.3},
    "zoneout": {"zoneout": {"h": 0.1, "c": 0.2}},
    "candidate dropout": {"candidate_dropout": 0.25},
}


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*SHAPES], [*NUMBERS], CELLS), ids=str)
def test_agrees_with_the_oracle(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers])
    if refusals := testing.why_not(persistent, problem, "cuda"):
        pytest.skip(f"persistent refuses: {'; '.join(refusals)}")
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["written over", "elsewhere"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(40, 16, 32, 64, bidirectional=True, cell=CELLS[4]),
        Problem(40, 16, 32, 61, num_layers=2, cell=CELLS[4]),
        Problem(40, 16, 32, 64, layout=Layout.DEVICE_LENGTHS, cell=masked(LayerNormLSTM(), *ALL)),
    ],
    ids=["both directions", "two layers", "layer norm, ragged"],
)
def test_replayed_calls_read_the_masks_of_the_call(problem, elsewhere):
    """Calls of one shape replay the same graphs, with masks that differ from call to call."""
    problem = problem.replace(dtype=torch.float32, needs_grad=True)
    replay._replays.cache_clear()
    replay.stack_of.cache_clear()
    torch.cuda.empty_cache()  # with free blocks of earlier tests, addresses may differ from call to call
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    for seed in range(6):
        masks = testing.make_inputs(problem, "cuda", seed=seed).masks
        if not elsewhere:
            for mask, drawn in zip(inputs.masks, masks, strict=True):
                mask.copy_(drawn)
            masks = inputs.masks
        given = inputs._replace(masks=masks)
        found = testing.named(problem, *testing.run_kernel(persistent, problem, given, gradients))
        for name, value in testing.named(problem, *testing.oracle(problem, given, gradients)).items():
            assert testing.relative_error(found[name], value) < 1e-4, name
        del found
    if not elsewhere:
        assert replay._replays("backward", problem, False, Needs()).replayed > 0


def training_step(layer, x):
    def step(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        for parameter in layer.parameters():
            parameter.grad.zero_()
        y, (h, c) = layer(x)
        (y.square().mean() + h.sum() + c.sum()).backward()
        return [y.detach(), h.detach(), c.detach(), *(parameter.grad for parameter in layer.parameters())]

    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return step


def layer_with(options, cell=None, **others):
    torch.manual_seed(0)
    options = {"device": "cuda", "kernel": "persistent", "bias": True} | options | others
    return gatewise.Recurrent(cell or LSTM(), 32, 96, **options)


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"weight_dropout": 0.4}], ids=str)
@pytest.mark.parametrize("cell", [LSTM(), LayerNormLSTM()], ids=lambda cell: cell.name)
def test_every_replay_of_a_graph_of_the_caller_draws_masks(options, cell):
    layer = layer_with(options, cell)
    step = training_step(layer, torch.randn(20, 8, 32, device="cuda"))
    graph, found = captured(step)
    replayed = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        graph.replay()
        replayed.append([tensor.clone() for tensor in found])
    first, other, again = replayed
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    for mine, theirs in zip(first, step(1), strict=True):
        assert testing.relative_error(mine, theirs.double()) < 1e-6


@pytest.mark.parametrize("options", OPTIONS.values(), ids=str)
@pytest.mark.parametrize("cell", [LSTM(), LayerNormLSTM()], ids=lambda cell: cell.name)
def test_masks_are_those_of_other_kernels(options, cell):
    """Through autograd, in the order of rows, in four layers' worth of masks."""
    layer = layer_with(options, cell, num_layers=2, bidirectional=True, batch_first=True)
    step = training_step(layer, torch.randn(8, 20, 32, device="cuda"))
    results = []
    with arithmetic("float32"):
        for kernel in ("persistent", "stepwise", "eager"):
            layer.kernel = kernel
            results.append([tensor.clone() for tensor in step(seed=1)])
    for found in results[:2]:
        for mine, theirs in zip(found, results[2], strict=True):
            assert testing.relative_error(mine, theirs.double()) < 1e-4


def test_compiled_calls_find_the_same():
    layer = layer_with({"recurrent_dropout": 0.3, "zoneout": 0.1, "candidate_dropout": 0.25})
    x = torch.randn(12, 8, 32, device="cuda", requires_grad=True)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        torch.manual_seed(1)
        y, _ = call(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        assert testing.relative_error(mine, theirs.double()) < 1e-5


@pytest.mark.parametrize("options", OPTIONS.values(), ids=str)
def test_is_chosen_in_training_and_evaluation(options):
    layer = layer_with(options)
    layer.kernel = "auto"
    x = torch.randn(20, 8, 32, device="cuda")
    assert gatewise.explain(layer, x).chosen == "persistent"
    assert gatewise.explain(layer.eval(), x).chosen == "persistent"
