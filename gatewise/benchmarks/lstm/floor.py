"""The floor of a pass: a lower bound of its time for any arrangement of the same arithmetic (roofline)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.precision import Precision
from gatewise.contract.device import Device
from gatewise.selection.timing import captured, time_callable

# The measured bandwidth between multiprocessors and L2 cache of an H200 in bytes per second; scaled for other GPUs.
_L2_BANDWIDTH = 5.5e12
_L2_MULTIPROCESSORS = 132

Product = tuple[int, int, int]  # rows, columns, depth


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound of the time of a pass, in seconds.

    Attributes:
        loop: The bound for the time steps, which depend on each other.
        around: The time of all other matrix products, at the speed of the library on this device.
    """

    loop: float
    around: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.loop + self.around


def floor(
    case: LSTMCase,
    tokens: int,
    precision: Precision,
    device: Device,
    *,
    gates: int,
    training: bool,
    product_seconds: Callable[[Product], float],
) -> Floor:
    """Return the floor of a forward pass, or in training of a forward and backward pass.

    The loop of a pass takes at least the largest of

    - latency: a step depends on the previous step, and an upper layer on the one below: T + L - 2 exchanges of 0.7 us
      through the L2 cache (both directions, and layers one step apart, run concurrently). Blocks of a cluster take
      less for an exchange, so that layers that fit in one can be faster than this floor;
    - traffic: W_hh is read once, and the values for the next step (h_t; in the backward pass the G*H gradients of
      the gates) are written once and read once, at the bandwidth of the L2 cache;
    - arithmetic: the products with W_hh, at the rate of large products in this precision.

    To this are added the products x W_ih^T of every layer, and in the backward pass dx, dW_ih and dW_hh: the time that
    the library takes for them if their sizes are padded to those at which it is fastest.

    Args:
        case: The sizes.
        tokens: The total number of time steps of all sequences; T*B unless ragged.
        precision: The precision of the products.
        device: The device, with its exchange time and arithmetic rate.
        gates: The number of gates of the cell, G.
        training: Whether the backward pass is included.
        product_seconds: A function that returns the time of a matrix product.
    """
    size, cells = case.hidden_size, case.num_layers * case.directions
    number_bytes = precision.compute_dtype.itemsize
    latency = (case.time + case.num_layers - 2) * device.exchange_seconds
    rate = device.matmul_rate(precision.compute_dtype, allow_tf32=precision.tf32)
    arithmetic = 2.0 * gates * tokens * cells * size**2 / rate
    bandwidth = _L2_BANDWIDTH * device.multiprocessors / _L2_MULTIPROCESSORS

    def loop(handed_on: int) -> float:
        elements = gates * cells * size**2 + 2 * tokens * cells * handed_on
        return max(latency, elements * number_bytes / bandwidth, arithmetic)

    around = sum(product_seconds(product) for product in products(case, tokens, gates, training))
    return Floor(loop(size) + (loop(gates * size) if training else 0.0), around)


def products(case: LSTMCase, tokens: int, gates: int, training: bool) -> Iterator[Product]:
    """Yield the matrix products outside of the loop; products of both directions with the same input are one."""
    size, rows = case.hidden_size, gates * case.hidden_size
    for layer in range(case.num_layers):
        features = size if layer == 0 else size * case.directions
        yield tokens, case.directions * rows, features  # x W_ih^T
        if training:
            yield tokens, features, case.directions * rows  # dx
            yield case.directions * rows, features, tokens  # dW_ih
            for _ in range(case.directions):
                yield rows, size, tokens  # dW_hh


class Products:
    """Times of matrix products on a CUDA device, each measured once, with sizes rounded up to multiples of 8.

    Several products in a row are replayed as a CUDA graph, so that the CPU's launch rate does not limit small ones.
    """

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self._device = device
        self._dtype = precision.compute_dtype
        self._found: dict[Product, float] = {}

    def seconds(self, product: Product) -> float:
        """Return the time of one product in seconds; the precision must be applied."""
        if product not in self._found:
            self._found[product] = self._measured(product)
        return self._found[product]

    def _measured(self, product: Product) -> float:
        # In matrices of other sizes, rows do not start at multiples of 16 bytes, and the library is several times
        # slower.
        rows, columns, depth = (-(-size // 8) * 8 if size > 1 else 1 for size in product)
        left = torch.randn(rows, depth, device=self._device, dtype=self._dtype)
        right = torch.randn(depth, columns, device=self._device, dtype=self._dtype)
        into = torch.empty(rows, columns, device=self._device, dtype=self._dtype)
        count = 10 if rows * columns * depth < 1e10 else 1

        def several() -> None:
            for _ in range(count):
                torch.mm(left, right, out=into)

        replay = captured(several, warmups=1)
        return time_callable(replay, device=self._device, runs=5, warmups=1, budget=0.02).median / count
