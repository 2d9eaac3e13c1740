"""The predicted memory of a call is what its schedules allocate, for any device, and nothing is launched for it."""

import itertools

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from gatewise import testing
from gatewise.cells import LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import allocations, driver, toolchain
from gatewise.kernels.cuda.allocations import Allocations
from gatewise.kernels.persistent import dry_run, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.schedules import matrix_products, projection
from gatewise.kernels.persistent.schedules.checkpointed import Checkpointed
from gatewise.kernels.persistent.schedules.layer_pair import LayerPair
from gatewise.kernels.persistent.schedules.single_layer import SingleLayer
from gatewise.kernels.persistent.sizes import layer_pairs
from gatewise.selection import admit
from gatewise.selection.choose import decide
from tests.kernels.persistent.emulation import emulate, without_loops
from tests.pairwise import each_value

H200 = Device.named("h200")
MASKED = Regularised(LSTM(), 0.3, (0.1, 0.2), 0.25)
MIB = 1 << 20
SINGLE = Problem(35, 20, 256, 256, num_layers=3, dtype=torch.bfloat16, needs_grad=True)
PAIR = Problem(100, 16, 256, 256, num_layers=2, dtype=torch.bfloat16, needs_grad=True)
LEAN = SINGLE.replace(lean=True)
TRACED = SINGLE.replace(traced=True)
PROJECTED = SINGLE.replace(proj_size=64)
PROBLEMS = [SINGLE, PAIR, LEAN, TRACED, PROJECTED]
NAMES = ["single layers", "pair", "lean", "traced", "projected"]


@pytest.fixture(autouse=True)
def afresh():
    remembered = dry_run._memory_of, replay.kept_bytes
    for own in remembered:
        own.cache_clear()
    yield
    for own in remembered:
        own.cache_clear()


@pytest.mark.parametrize(
    "options",
    [
        {"traced": True},
        {"traced": True, "num_layers": 3, "dropout": 0.4, "layout": Layout.DEVICE_LENGTHS},
        {"traced": True, "bidirectional": True, "num_layers": 2},
        {"traced": True, "needs_grad": False, "num_layers": 2},
        {"traced": True, "resets": True, "num_layers": 2, "bidirectional": True},
        {"traced": True, "cell": MASKED, "num_layers": 2, "bidirectional": True, "dropout": 0.4},
        {"proj_size": 8, "resets": True, "bidirectional": True, "layout": Layout.DEVICE_LENGTHS},
        {"proj_size": 8},
        {"proj_size": 8, "bidirectional": True, "num_layers": 2, "layout": Layout.DEVICE_LENGTHS},
        {"proj_size": 8, "needs_grad": False},
    ],
    ids=str,
)
def test_what_is_allocated_one_by_one_is_as_predicted(monkeypatch, options):
    emulate(monkeypatch)
    problem = Problem(6, 32, 61, 61, dtype=torch.float64, needs_grad=True).replace(**options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    returned = []
    with without_loops(), Allocations() as counted:
        returned.append(persistent.forward(problem, inputs))
        if problem.needs_grad:
            returned.append(persistent.backward(problem, inputs, returned[0], gradients, Needs()))
    masks = sum(mask.nbytes for mask in inputs.masks)
    assert persistent.workspace_bytes(problem, Device.probe("cpu")) == counted.peak - counted.now + masks > 0
    kept = [(tuple(tensor.shape), tensor.dtype) for tensor in returned[0].kept]
    assert kept == [spec[:2] for spec in persistent.kept(problem, Device.probe("cpu"))]


def allocates_more(monkeypatch, owner, name):
    """Have a pass take one more buffer, of a mebibyte."""
    real = getattr(owner, name)

    def more(*given, **options):
        arguments = [*given, *options.values()]
        like = next(own for own in arguments if hasattr(own, "new_empty"))
        held = like.new_empty(MIB, dtype=torch.uint8)
        found = real(*given, **options)
        del held
        return found

    monkeypatch.setattr(owner, name, more)


@pytest.mark.parametrize(
    ("problem", "owner", "name"),
    [
        (SINGLE.replace(num_layers=1, needs_grad=False), SingleLayer, "forward"),
        (SINGLE.replace(num_layers=1), SingleLayer, "backward"),
        (PAIR.replace(needs_grad=False), LayerPair, "forward"),
        (PAIR, LayerPair, "backward"),
        (LEAN, Checkpointed, "backward"),
        (TRACED, SingleLayer, "backward"),
        (PROJECTED, projection, "_with_projections"),
    ],
    ids=str,
)
def test_one_more_buffer_of_a_schedule_is_predicted(monkeypatch, problem, owner, name):
    before = persistent.workspace_bytes(problem, H200)
    allocates_more(monkeypatch, owner, name)
    dry_run._memory_of.cache_clear()
    assert persistent.workspace_bytes(problem, H200) == before + MIB


def test_one_more_kept_tensor_is_predicted(monkeypatch):
    before = [persistent.kept(problem, H200) for problem in (SINGLE, TRACED)]
    real = SingleLayer.new_kept
    monkeypatch.setattr(
        SingleLayer,
        "new_kept",
        lambda self, problem, *given: (*real(self, problem, *given), given[1].new_empty(1024, 256)),
    )
    dry_run._memory_of.cache_clear()
    (together,), one_by_one = (persistent.kept(problem, H200) for problem in (SINGLE, TRACED))
    assert together.nbytes == before[0][0].nbytes + 3 * 2 * 1024 * 256
    assert [spec.shape for spec in one_by_one].count((1024, 256)) == 3


@pytest.mark.parametrize(
    ("problem", "device"), each_value([*itertools.product(PROBLEMS, ["a100", "l4", "b200"])]), ids=str
)
def test_needs_neither_a_gpu_nor_a_compiler(monkeypatch, problem, device):
    def refused(*given):
        raise AssertionError("nothing may be compiled or launched")

    monkeypatch.setattr(toolchain, "compile_source", refused)
    for name in ("launch", "fill_with_ones", "_driver"):
        monkeypatch.setattr(driver, name, refused)
    found = admit.verdict(persistent, problem, Device.named(device))
    assert found.peak_bytes > sum(spec.nbytes for spec in persistent.kept(problem, Device.named(device))) > 0


def test_it_depends_on_the_device():
    """Layers go in pairs where the chip has room for two."""
    small = H200.replace(multiprocessors=20)
    assert layer_pairs.stacked_cut(PAIR, H200, backward=True)
    assert not layer_pairs.stacked_cut(PAIR, small, backward=True)
    assert persistent.workspace_bytes(PAIR, small) < persistent.workspace_bytes(PAIR, H200)


@pytest.mark.parametrize("problem", PROBLEMS, ids=NAMES)
def test_nothing_around_the_call_takes_part(problem):
    expected = dry_run.memory_of(problem, H200)
    for mode in (FakeTensorMode(), FlopCounterMode(display=False), torch.inference_mode()):
        dry_run._memory_of.cache_clear()
        with mode:
            assert dry_run.memory_of(problem, H200) == expected
        if isinstance(mode, FlopCounterMode):
            assert mode.get_total_flops() == 0

    def loss(weight):
        dry_run._memory_of.cache_clear()
        assert dry_run.memory_of(problem, H200) == expected
        return (weight**2).sum()

    torch.func.vmap(torch.func.grad(loss))(torch.ones(2, 3))


@pytest.mark.parametrize("problem", [SINGLE, PAIR, LEAN, LEAN.replace(bidirectional=True, hidden_size=61)], ids=str)
def test_nothing_is_computed(monkeypatch, problem):
    """What PyTorch computes on "meta" takes long, and imports a second's worth of modules the first time."""
    executed, real = set(), allocations._effects

    def effects(operator):
        written, allocates = real(operator)
        if written is None:
            executed.add((str(operator), allocates))
        return written, allocates

    monkeypatch.setattr(allocations, "_effects", effects)
    problem = problem.replace(dtype=torch.float32, dropout=0.3, layout=Layout.DEVICE_LENGTHS)
    dry_run.memory_of(problem, H200)
    assert executed
    assert {name for name, allocates in executed if allocates} <= {"aten.new_empty.default"}


def test_settings_of_products_stay(monkeypatch):
    changed = []
    monkeypatch.setattr(matrix_products, "products_in_tf32", changed.append)
    for problem in PROBLEMS:
        dry_run.memory_of(problem.replace(dtype=torch.float32), H200)
    assert not changed


def test_calls_in_a_graph_share_the_prediction():
    dry_run.memory_of(PAIR, H200)
    assert dry_run.memory_of(PAIR.replace(captured=True), H200) == dry_run.memory_of(PAIR.replace(announced=True), H200)
    assert dry_run._memory_of.cache_info().misses == 1


def test_a_choice_by_time_asks_for_no_memory(monkeypatch):
    ran = []
    real = dry_run._memory_of
    monkeypatch.setattr(dry_run, "_memory_of", lambda *given: ran.append(given) or real(*given))
    decision = decide(PAIR.replace(batch=17), H200)
    assert decision.chosen == "persistent"
    assert not ran
    assert decision.verdict("persistent").peak_bytes > 0
    assert ran


def test_an_error_of_a_schedule_is_raised(monkeypatch):
    def failing(*given, **options):
        raise ValueError("this schedule fails")

    monkeypatch.setattr(SingleLayer, "forward", failing)
    with pytest.raises(ValueError, match="this schedule fails"):
        persistent.workspace_bytes(SINGLE, H200)


def test_segments_take_less(cut):
    found = []
    for count in (1, 3, 7):
        cut(count)
        found.append(persistent.workspace_bytes(LEAN.replace(time=100, batch=64), H200))
    assert all(more > fewer for more, fewer in itertools.pairwise(found))


@pytest.mark.parametrize("problem", [TRACED, TRACED.replace(lean=True), TRACED.replace(proj_size=64)], ids=str)
def test_sizes_of_kept_tensors_are_those_of_every_number_of_steps_and_sequences(problem):
    environment = ShapeEnv()
    symbols = {name: symbol_of(environment, name) for name in ("time", "batch")}
    for names in (("time",), ("batch",), ("time", "batch")):
        symbolic = persistent.kept(problem.replace(**{name: symbols[name] for name in names}), H200)
        for numbers in ((2, 3), (7, 128), (500, 2)):
            sizes = {name: number for name, number in zip(symbols, numbers, strict=True) if name in names}
            values = {symbols[name].node.expr: number for name, number in sizes.items()}
            found = [(tuple(number_of(size, values) for size in spec.shape), spec.dtype) for spec in symbolic]
            assert found == [spec[:2] for spec in persistent.kept(problem.replace(**sizes), H200)]
    assert not environment.guards


def symbol_of(environment, name):
    """Return a size that is known only when a graph runs, as `torch.compile` has it."""
    symbol = environment.create_symbol(9, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=9)


def number_of(size, values):
    return size if isinstance(size, int) else int(size.node.expr.subs(values))
