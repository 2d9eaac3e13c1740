"""The floor of a pass: the time that no arrangement of the same arithmetic on the same device can go below."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.precision import Precision
from gatewise.contract.device import Device
from gatewise.selection.timing import captured, time_callable

# Bytes a second between the multiprocessors and the L2 cache of an H200, measured; other GPUs by their multiprocessors.
_L2_BANDWIDTH = 5.5e12
_L2_MULTIPROCESSORS = 132

Product = tuple[int, int, int]  # rows, columns, depth


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of a pass that no kernel can go below.

    Attributes:
        loop: Of the steps that depend on each other.
        around: Of the products that do not, at the rate of the library on this device.
    """

    loop: float
    around: float

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
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
    """Return the floor of a forward pass, in training of a forward and a backward pass.

    The loop of a pass takes at least the largest of

    - latency: a step needs the one before, and an upper layer the one below, on whichever multiprocessors they are:
      T + L - 2 exchanges of 0.7 us (both directions, and layers one step apart, run beside each other);
    - traffic: W_hh is read once, and what a step hands to the next (h_t, going back the G*H gradients of the gates) is
      written once and read once, at the bandwidth of the L2 cache;
    - arithmetic: the products with W_hh, at the rate of large products in this precision.

    Around it are x W_ih^T of every layer, and going back dx, dW_ih and dW_hh: as long as the library takes for them
    when their sizes are rounded up to what it is fastest at, as padding could.

    Args:
        case: The sizes.
        tokens: Steps of all sequences together; T*B unless ragged.
        precision: Of the products.
        device: Gives exchange time and arithmetic rate.
        gates: G, the gates of the cell.
        training: Whether the backward pass belongs to it.
        product_seconds: Measures a matrix product.
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
    """Yield the matrix products around the loop; those of both directions with one input are one."""
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
    """Measures matrix products on a CUDA device, each once, their sizes rounded up to multiples of 8.

    Several in a row are replayed as a CUDA graph, so that small ones are not measured by how fast the CPU issues them.
    """

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self._device = device
        self._dtype = precision.compute_dtype
        self._found: dict[Product, float] = {}

    def seconds(self, product: Product) -> float:
        """Return the seconds of one product; to be called with the precision applied."""
        if product not in self._found:
            self._found[product] = self._measured(product)
        return self._found[product]

    def _measured(self, product: Product) -> float:
        # Rows of other sizes do not start at multiples of 16 bytes, and the library is several times slower.
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
