"""The floor, compared with a calculation by hand for an invented device."""

from __future__ import annotations

import pytest
import torch

from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.benchmarks.lstm.floor import Floor, Products, floor, products
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.cells import SHIPPED, Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from tests.pairwise import each_value, pairwise

BF16, FP32 = LAYER_PRECISIONS["bf16"], LAYER_PRECISIONS["fp32"]
DEVICE = Device.named("h200").replace(
    exchange_seconds=1e-6, matmul_rates=(("bfloat16", 1e15), ("tf32", 5e14), ("float32", 1e13))
)


def bound(case: LSTMCase, *, tokens=None, training=False, precision=BF16, device=DEVICE, gates=4) -> Floor:
    count = tokens or case.time * case.batch
    return floor(case, count, precision, device, gates=gates, training=training, product_seconds=lambda product: 1e-3)


def test_a_narrow_loop_waits_for_its_exchanges() -> None:
    assert bound(LSTMCase("narrow", 101, 2, 8)).loop == pytest.approx(100e-6)


def test_layers_and_directions_run_beside_each_other() -> None:
    assert bound(LSTMCase("stack", 101, 2, 8, num_layers=3, directions=2)).loop == pytest.approx(102e-6)


def test_a_wide_loop_is_arithmetic() -> None:
    case = LSTMCase("wide", 10, 10_000, 1000)
    assert bound(case).loop == pytest.approx(10 * 2 * 10_000 * 4 * 1000**2 / 1e15)
    assert bound(case, precision=FP32).loop == pytest.approx(100 * bound(case).loop)
    assert bound(case, tokens=50_000).loop == pytest.approx(bound(case).loop / 2)
    assert bound(case, gates=3).loop == pytest.approx(3 / 4 * bound(case).loop)


def test_one_step_reads_the_weights() -> None:
    case = LSTMCase("decode", 1, 1, 1024)
    read, handed = 4 * 1024**2, 2 * 1024
    assert bound(case).loop == pytest.approx(2 * (read + handed) / 5.5e12)
    assert bound(case, device=DEVICE.replace(multiprocessors=66)).loop == pytest.approx(2 * bound(case).loop)


def test_training_adds_a_loop_and_the_products_of_backward() -> None:
    case = LSTMCase("narrow", 101, 2, 8)
    forward, both = bound(case), bound(case, training=True)
    assert both.loop == pytest.approx(2 * forward.loop)
    assert (forward.around, both.around) == (pytest.approx(1e-3), pytest.approx(4e-3))
    assert both.seconds == both.loop + both.around


@pytest.mark.parametrize(
    ("case", "cell", "training"),
    each_value(pairwise(LSTM_GRID, SHIPPED, [True, False]), times=2),
    ids=lambda value: getattr(value, "name", value),
)
def test_loop_and_products_are_all_of_the_arithmetic(case: LSTMCase, training: bool, cell: Cell) -> None:
    size, tokens, gates = case.hidden_size, case.time * case.batch, len(cell.gates)
    options = {"num_layers": case.num_layers, "bidirectional": case.directions == 2, "cell": cell}
    problem = Problem(case.time, case.batch, size, size, **options)
    passes = 3 if training else 1
    # The products with W_hh inside the loop, once a pass; the third is dW_hh, which is around it.
    loop = (2 if training else 1) * 2 * gates * tokens * size**2 * case.num_layers * case.directions
    around = sum(2 * rows * columns * depth for rows, columns, depth in products(case, tokens, gates, training))
    assert loop + around == pytest.approx(passes * problem.matmul_flops)


@pytest.mark.gpu
def test_products_are_measured_once_and_cost_what_they_are() -> None:
    measured = Products(torch.device("cuda"), BF16)
    with BF16.applied():
        small, large = measured.seconds((64, 512, 512)), measured.seconds((4096, 4096, 4096))
        again = measured.seconds((64, 512, 512))
    assert 0 < small < large
    assert again == small
    assert large > 2 * 4096**3 / 1.5e15  # no GPU of today multiplies faster
