"""Stacks in memory laid out beforehand: the oracle's numbers, and replays only of what comes back."""

import itertools
import types

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.functional import execution, plan
from gatewise.kernels.cuda import graphs
from gatewise.kernels.persistent import buffers, dry_run, launches, replay
from gatewise.kernels.persistent.buffers import order_of, order_of_kept
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.replay import kept_bytes
from gatewise.kernels.persistent.schedules import matrix_products
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.memory import copies_states, is_laid_out, keeps_matrices
from tests.calls import profile
from tests.kernels.cell_code import FUSED
from tests.kernels.persistent.emulation import Addresses, Recording, assert_agrees, by_row, emulate, without_loops
from tests.pairwise import each_value, one_in, pairwise

H200 = Device.named("h200")
PROBLEM = Problem(4, 3, 6, 5, dtype=torch.float64, needs_grad=True)
KINDS = [
    {},
    {"hidden_size": 8},
    {"hidden_size": 8, "num_layers": 2},
    {"num_layers": 4, "bidirectional": True},
    {"num_layers": 3, "dropout": 0.4},
    {"bias": False, "num_layers": 2},
    {"time": 1, "num_layers": 2, "bidirectional": True},
    {"batch": 1, "hidden_size": 16, "input_size": 8},
    {"layout": Layout.HOST_LENGTHS, "bidirectional": True, "num_layers": 2},
    {"layout": Layout.DEVICE_LENGTHS, "hidden_size": 8},
]
PACKED = {"layout": Layout.PACKED, "bidirectional": True}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


def replays(name, problem, by_row=False, needs=None):
    return replay._replays(name, problem, by_row, needs or Needs())


@pytest.mark.parametrize(
    ("options", "by_row", "cell"), each_value(pairwise([*KINDS, PACKED], [False, True], FUSED), most=5), ids=str
)
def test_agrees_with_the_oracle_launched_and_replayed(options, by_row, cell):
    problem = PROBLEM.replace(cell=cell, **options)
    assert is_laid_out(problem)
    assert_agrees(problem, rows_first=by_row, calls=5)


@pytest.mark.parametrize(
    ("options", "cell"),
    each_value(pairwise([{**kind, "hidden_size": 8} for kind in KINDS if "layout" not in kind], FUSED[:2])),
    ids=str,
)
def test_states_that_went_into_the_steps_need_not_be_copied(monkeypatch, options, cell):
    """The first step then has a product of its own, and the others read the outputs where they are."""
    problem = PROBLEM.replace(cell=cell, **{**options, "input_size": 16})
    written, write = [], launches.write_operands
    monkeypatch.setattr(memory, "copies_states", lambda problem: False)
    monkeypatch.setattr(launches, "write_operands", lambda *given: (written.append(given), write(*given)))
    assert_agrees(problem, calls=1)
    assert not written


@pytest.mark.parametrize("copied", [False, True], ids=["outputs where they are", "copied states"])
@pytest.mark.parametrize("options", [{}, {"layout": Layout.DEVICE_LENGTHS}, {"resets": True}], ids=str)
def test_directions_are_multiplied_together(monkeypatch, options, copied):
    """Weights of one buffer, gradients and hidden states lie as batches do; cropped gradients do not."""
    alone = []
    compute = matrix_products._sum
    monkeypatch.setattr(memory, "copies_states", lambda problem: copied)
    monkeypatch.setattr(matrix_products, "_sum", lambda *given: (alone.append(given), compute(*given)))
    for features in (8, 5):
        problem = PROBLEM.replace(hidden_size=8, input_size=features, bidirectional=True, **options)
        inputs = testing.make_inputs(problem)
        buffer = torch.cat([weight.flatten() for weight in inputs.weights])
        together = inputs._replace(weights=buffers.views_like(buffer, inputs.weights))
        gradients = testing.make_gradients(problem, inputs)
        exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
        for own, of_x in ((inputs, 2 if features == 8 else 0), (together, 0)):
            alone.clear()
            found = testing.named(problem, *testing.run_kernel(persistent, problem, own, gradients))
            for name, value in found.items():
                assert testing.relative_error(value, exact[name]) < (1e-6 if "bias" in name else 1e-12), name
            assert len(alone) == of_x + (0 if features == 8 else 2)


def test_states_are_copied_where_a_product_would_take_longer():
    wide = Problem(50, 128, 512, 512, num_layers=2, bidirectional=True, dtype=torch.bfloat16, needs_grad=True)
    assert not copies_states(wide)
    assert copies_states(wide.replace(hidden_size=510))
    assert copies_states(wide.replace(layout=Layout.DEVICE_LENGTHS))
    assert copies_states(wide.replace(batch=16, bidirectional=False))
    assert copies_states(wide.replace(batch=12800, time=1))


@pytest.mark.parametrize("options", one_in(3, [*KINDS, PACKED]), ids=str)
def test_agrees_with_the_oracle_where_gradients_take_the_place_of_gates(overwritten, options):
    problem = PROBLEM.replace(**options)
    assert_agrees(problem)


def test_which_gradients_take_the_place_of_gates():
    problem = PROBLEM.replace(batch=40, hidden_size=256, dtype=torch.float32, allow_tf32=True)
    assert persistent.single_use(problem)
    assert not persistent.single_use(problem.replace(traced=True))  # a compiled call may not change what it keeps
    assert not persistent.single_use(problem.replace(lean=True))  # its gates are not kept
    for other in ({"allow_tf32": False}, {"batch": 1}, {"dtype": torch.bfloat16, "hidden_size": 248}):
        assert not persistent.single_use(problem.replace(**other))
    wide = problem.replace(dtype=torch.bfloat16, hidden_size=264)  # whose blocks exchange gradients elsewhere
    assert persistent.single_use(wide)
    assert not persistent.single_use(wide.replace(hidden_size=256))  # in clusters
    assert not persistent.single_use(wide.replace(traced=True))
    apart = persistent.workspace_bytes(problem.replace(allow_tf32=False), H200)
    assert persistent.workspace_bytes(problem, H200) == apart - 4 * (4 * 40 * 4 * 256)


@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "bidirectional": True, "input_size": 9}], ids=str)
def test_input_weights_that_were_rounded_up_are_kept(request, monkeypatch, options):
    problem = PROBLEM.replace(**options)
    assert keeps_matrices(problem.replace(dtype=torch.bfloat16))
    assert not keeps_matrices(problem.replace(dtype=torch.bfloat16, hidden_size=8))
    without = kept_bytes(problem)
    monkeypatch.setattr(memory, "keeps_matrices", lambda problem: problem.needs_grad)
    for remembered in (kept_bytes, dry_run._memory_of):
        remembered.cache_clear()
        request.addfinalizer(remembered.cache_clear)
    assert kept_bytes(problem) > without
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    for _ in range(4):
        result, found = testing.run_kernel(persistent, problem, inputs, gradients)
        stated = persistent.kept(problem, H200)
        assert [tuple(tensor.shape) for tensor in result.kept] == [spec.shape for spec in stated]
        for name, value in testing.named(problem, result, found).items():
            assert testing.relative_error(value, exact[name]) < (1e-6 if "bias" in name else 1e-12), name


def test_weights_begin_where_wide_words_do():
    inputs = testing.make_inputs(PROBLEM)
    moved = [torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight) for weight in inputs.weights]
    assert all(weight.data_ptr() % 16 for weight in moved)
    inputs = inputs._replace(weights=tuple(moved))
    taken = replay._contiguous(PROBLEM, inputs, order_of(inputs.x, PROBLEM)).weights
    assert all(weight.data_ptr() % 16 == 0 for weight in taken)
    assert all(torch.equal(weight, other) for weight, other in zip(taken, moved, strict=True))


@pytest.mark.parametrize("options", [{"lean": True}, *KINDS], ids=str)
def test_what_is_kept_fills_one_allocation(options):
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    result = persistent.forward(problem, inputs)
    (memory,) = result.kept
    tokens = order_of_kept(result.y.unsqueeze(0))
    parts = [*itertools.chain(*replay._kept(problem, result, tokens)[1]), *replay._kept(problem, result, tokens)[0]]
    starts = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    assert memory.data_ptr() == starts[0][0]
    assert starts[-1][1] <= memory.data_ptr() + memory.nbytes < starts[-1][1] + 512
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(starts))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_inference_equals_training(options):
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    trained = persistent.forward(problem, inputs)
    for _ in range(4):
        inferred = persistent.forward(problem.replace(needs_grad=False), inputs)
        assert all(torch.equal(*pair) for pair in zip(inferred[:3], trained[:3], strict=True))
        assert inferred.kept == ()


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(state=False, weights=False), Needs(False, False)], ids=str)
def test_what_is_not_needed_is_none(needs):
    problem = PROBLEM.replace(num_layers=2)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    result = persistent.forward(problem, inputs)
    all_found = persistent.backward(problem, inputs, result, gradients, Needs())
    for _ in range(4):
        found = persistent.backward(problem, inputs, result, gradients, needs)
        assert (found.x is not None, found.h0 is not None, found.weights[0] is not None) == needs
        for one, other in zip((*found[:3], *found.weights), (*all_found[:3], *all_found.weights), strict=True):
            assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(("options", "gates"), each_value(pairwise(KINDS, ["kept", "overwritten"])), ids=str)
def test_scratch_memory_is_as_predicted(request, options, gates):
    if gates == "overwritten":
        request.getfixturevalue("overwritten")
    problem = PROBLEM.replace(**({"input_size": 61, "hidden_size": 61} | options)).replace(time=6, batch=32)
    inputs = testing.make_inputs(problem)
    with without_loops():
        result = persistent.forward(problem, inputs)
        persistent.backward(problem, inputs, result, testing.make_gradients(problem, inputs), Needs())
        persistent.forward(problem.replace(needs_grad=False), inputs)
    masks = sum(mask.nbytes for mask in inputs.masks)
    for name, each in (("backward", problem), ("forward", problem.replace(needs_grad=False))):
        taken = replays(name, each).scratch_bytes + masks
        assert persistent.workspace_bytes(each, Device.probe("cpu")) == taken


def test_what_comes_back_is_replayed_and_nothing_else(monkeypatch):
    problem = PROBLEM.replace(num_layers=2)
    inputs = testing.make_inputs(problem)
    addresses = Addresses(monkeypatch)
    persistent.forward(problem, inputs)  # learns how much scratch memory there must be
    found = replays("forward", problem)
    addresses.forget()
    for expected in ((0, 0), (1, 0), (1, 1), (1, 2)):
        addresses.begin()
        persistent.forward(problem, inputs)
        assert (found.recorded, found.replayed) == expected
    addresses.begin()
    elsewhere = persistent.forward(problem, inputs._replace(x=2 * inputs.x))
    assert (found.recorded, found.replayed) == (1, 2)
    inputs.x.mul_(2)  # in place: the same addresses, other values
    addresses.begin()
    outputs = elsewhere.y.clone()
    assert torch.equal(persistent.forward(problem, inputs).y, outputs)
    assert (found.recorded, found.replayed) == (1, 3)


@pytest.mark.parametrize(
    ("options", "rows_first"),
    each_value(pairwise([*KINDS, {"resets": True}, {"lean": True, "num_layers": 2}], [False, True]), most=4),
    ids=str,
)
def test_calls_whose_small_tensors_move_are_replayed(monkeypatch, options, rows_first):
    """All tensors have new addresses in each call, as the states have that a training loop carries."""
    for name in ("_PATIENCE", "_PATIENCE_OF_A_STEP"):
        monkeypatch.setattr(replay, name, 0)
    replayed, launch = [], graphs.StaticGraph.launch
    monkeypatch.setattr(graphs.StaticGraph, "launch", lambda *given: (replayed.append(given), launch(*given)))
    problem = PROBLEM.replace(**options)
    inputs, held = testing.make_inputs(problem), []
    gradients = testing.make_gradients(problem, inputs)
    if rows_first:
        inputs, gradients = inputs._replace(x=by_row(inputs.x)), gradients._replace(y=by_row(gradients.y))
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    for _ in range(4):
        own, above = moved(inputs), moved(gradients)
        found = testing.named(problem, *testing.run_kernel(persistent, problem, own, above))
        held.append((own, above, found))
        for name, value in found.items():
            assert testing.relative_error(value, exact[name]) < (1e-6 if "bias" in name else 1e-12), name
    assert len(replayed) == 2 * 3  # the first call learns how much scratch memory there must be
    for own, above, found in held:  # nobody wrote where another call had read or written
        assert all(map(torch.equal, tensors_of(own), tensors_of(inputs)))
        assert all(map(torch.equal, tensors_of(above), tensors_of(gradients)))
        assert all(torch.equal(value, held[-1][2][name]) for name, value in found.items())


@pytest.mark.parametrize("present", [[False] * 6 + [True] * 6, [True] * 6 + [False] * 6, [False, True] * 6], ids=str)
def test_a_gradient_of_the_final_state_that_not_every_step_has(request, monkeypatch, present):
    """A loop changes its loss, or goes over windows of a sequence of which all but the last hand on their state."""
    request.addfinalizer(plan.plan_of.cache_clear)
    plan.plan_of.cache_clear()
    monkeypatch.setattr(plan, "choose", lambda *arguments: types.SimpleNamespace(chosen="persistent"))
    monkeypatch.setattr(replay, "_PATIENCE", 2)
    replayed, launch = [], graphs.StaticGraph.launch
    monkeypatch.setattr(graphs.StaticGraph, "launch", lambda *given: (replayed.append(given), launch(*given)))
    torch.manual_seed(0)
    layer = gatewise.LSTM(6, 5, dtype=torch.float64)
    theirs = torch.nn.LSTM(6, 5, dtype=torch.float64)
    theirs.load_state_dict(layer.state_dict())
    held = []
    for of_state in present:
        x = torch.randn(4, 3, 6, dtype=torch.float64)
        found = []
        for own in (layer, theirs):
            y, (h_n, _) = own(x)
            loss = y.sum() + 10 * h_n.square().sum() if of_state else y.sum()
            found.append(torch.autograd.grad(loss, list(own.parameters())))
        held.append((x, found))
        for one, other in zip(*found, strict=True):
            assert testing.relative_error(one, other) < 1e-6
    assert len(replayed) > len(present)


def test_directions_are_multiplied_together_in_replays_of_calls_whose_small_tensors_move(monkeypatch):
    """Weights of one buffer, as under autocast, lie as batches do in the memory of a graph, too."""
    monkeypatch.setattr(replay, "_PATIENCE", 0)
    alone, compute = [], matrix_products._sum
    monkeypatch.setattr(matrix_products, "_sum", lambda *given: (alone.append(given), compute(*given)))
    replayed, launch = [], graphs.StaticGraph.launch
    monkeypatch.setattr(graphs.StaticGraph, "launch", lambda *given: (replayed.append(given), launch(*given)))
    problem = PROBLEM.replace(hidden_size=8, input_size=8, bidirectional=True)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    for _ in range(4):
        buffer = torch.cat([weight.flatten() for weight in inputs.weights])
        own = moved(inputs)._replace(weights=buffers.views_like(buffer, inputs.weights))
        testing.run_kernel(persistent, problem, own, moved(gradients))
    assert len(replayed) == 2 * 3
    assert not alone


def tensors_of(values):
    return [each for each in (*values, *getattr(values, "weights", ())) if isinstance(each, torch.Tensor)]


def moved(values):
    """Return copies of tensors that have their order."""
    if isinstance(values, torch.Tensor):
        return values.clone()
    if isinstance(values, tuple):
        return type(values)._make(map(moved, values)) if hasattr(values, "_make") else tuple(map(moved, values))
    return values


def test_calls_that_warm_up_for_a_graph_are_not_recorded(monkeypatch):
    problem = PROBLEM.replace(captured=True)
    inputs = testing.make_inputs(problem)
    persistent.forward(problem, inputs)
    addresses = Addresses(monkeypatch)
    for _ in range(5):
        addresses.begin()
        persistent.forward(problem, inputs)
    assert replays("forward", problem).recorded == 0


def test_addresses_that_come_back_too_rarely_are_no_longer_recorded(monkeypatch):
    monkeypatch.setattr(replay, "_PATIENCE", 1000)
    inputs = testing.make_inputs(PROBLEM)
    addresses = Addresses(monkeypatch)
    persistent.forward(PROBLEM, inputs)
    found = replays("forward", PROBLEM)
    held = []
    for _ in range(40):
        addresses.forget()
        held.append(inputs._replace(x=inputs.x.clone()))
        for _ in range(2):
            addresses.begin()
            persistent.forward(PROBLEM, held[-1])
    assert 8 < found.recorded < 12


def steps_of_python(call):
    """Return the functions of gatewise that are called, but for comprehensions, which some versions inline."""
    seen = []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and "/gatewise/" in code.co_filename and not code.co_name.startswith("<"):
            seen.append(code.co_name)

    profile(call, note)
    return seen


def test_a_replayed_call_takes_few_steps_of_python(request, monkeypatch):
    # Each costs up to two microseconds where caches are cold, which they are for every other call of a training loop.
    request.addfinalizer(plan.plan_of.cache_clear)
    plan.plan_of.cache_clear()
    monkeypatch.setattr(plan, "choose", lambda *arguments: types.SimpleNamespace(chosen="persistent"))
    lstm = gatewise.LSTM(6, 5, 2, dtype=torch.float64)
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    above = torch.randn(4, 3, 5, dtype=torch.float64)
    outputs = []

    def forward():
        outputs[:] = lstm(x, state)

    def backward():
        outputs[0].backward(above)

    monkeypatch.setattr(Recording, "launch", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: tensor)  # on a GPU outputs are not copied
    forward()
    backward()  # they learn how much scratch memory there must be
    addresses, steps = Addresses(monkeypatch), []
    for _ in range(3):
        addresses.begin()
        steps = [steps_of_python(forward), steps_of_python(backward)]
    assert replays("forward", PROBLEM.replace(num_layers=2)).replayed == 1
    assert replays("backward", PROBLEM.replace(num_layers=2)).replayed == 1
    assert len(steps[0]) <= 20, steps[0]
    assert len(steps[1]) <= 11, steps[1]


def test_a_second_backward_pass_of_what_was_used_up_repeats_the_forward_pass(request, monkeypatch):
    request.addfinalizer(plan.plan_of.cache_clear)
    plan.plan_of.cache_clear()
    monkeypatch.setattr(plan, "choose", lambda *arguments: types.SimpleNamespace(chosen="persistent"))
    monkeypatch.setattr(type(persistent), "single_use", lambda self, problem: True)
    monkeypatch.setattr(execution, "_graph_is_kept", lambda: False)  # as where PyTorch does not tell
    passes, forward = [], replay.Stack.forward
    monkeypatch.setattr(replay.Stack, "forward", lambda *arguments: passes.append(1) or forward(*arguments))
    lstm = gatewise.LSTM(6, 5, dtype=torch.float64)
    y, _ = lstm(torch.randn(4, 3, 6, dtype=torch.float64))
    found = []
    for expected in (1, 2, 3):
        found.append(torch.autograd.grad(y.sum(), list(lstm.parameters()), retain_graph=True))
        assert len(passes) == expected
    assert all(torch.equal(*pair) for again in found[1:] for pair in zip(again, found[0], strict=True))
