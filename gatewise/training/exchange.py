"""The exchange of gradients between the processes of a distributed training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import nn

from gatewise.contract import early_gradients
from gatewise.contract.early_gradients import EarlyGradients
from gatewise.training.factor_exchange import FactorExchange, candidates, chosen, number_of
from gatewise.training.processes import LARGE_BYTES, Finish, Processes
from gatewise.training.row_exchange import EmbeddingRows, saves_time
from gatewise.training.weight_reads import nodes_with_leaves, rows_read, weights_read_once


def _ignored(weights: Sequence[torch.Tensor]) -> None:
    """Do nothing with the weights."""


class GradientExchange:
    """Replaces the gradients of each process by their means, which are bitwise equal in all processes.

    A gradient of `LARGE_BYTES` or more is sent as soon as the backward pass has accumulated it, while the pass goes on
    with others. In a step that is captured as a CUDA graph, it waits for the work that computes this gradient (see
    `early_gradients`), and not for all that the pass has launched by then. The order is the same in all processes, that
    of the weights from the last to the first, in which a backward pass usually ends with them: a gradient that is ready
    before its turn waits for those before it, and what no turn has come for when the pass ends is sent then. Small
    gradients are sent together at the end.

    Args:
        processes: The processes.
        model: The model, or a module that contains it.
        bfloat16: Whether gradients are sent in bfloat16, as by PyTorch's `bf16_compress_hook`: each process rounds its
            share of the mean to bfloat16, and the n - 1 sums of these are rounded too. With n processes and u = 2**-8,
            the error of a mean is below ((1 + u)**n - 1) times the mean of the absolute values.
        rows: Whether processes send only those rows of the gradient of an `nn.Embedding` which occur in their batches,
            if these are less than a quarter of the bytes of an all-reduce of the whole matrix. All processes add the
            same rows in the order of the ranks. The rows are read from the autograd graph of each loss; a matrix that
            this graph uses in another way too, such as one that is shared with a softmax, is sent as a whole.

            PyTorch has ``nn.Embedding(sparse=True)`` for this, whose gradients the fused optimizers, momentum, AdamW
            and the norm for clipping do not take, NCCL does not reduce and a CUDA graph cannot contain.
        factors: Whether processes send the factors of a gradient (`gatewise.contract.token_factors`) where that is
            estimated to take less time, and compute the product over the tokens of all. All do so in the same order of
            the tokens, with equal results on GPUs of one kind.
    """

    def __init__(
        self,
        processes: Processes,
        model: nn.Module,
        *,
        bfloat16: bool = False,
        rows: bool = False,
        factors: bool = False,
    ) -> None:
        self._processes = processes
        self._bfloat16 = bfloat16
        self._uses_factors = factors
        self._factors: dict[torch.Tensor, FactorExchange] = {}
        tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)] if rows else []
        self._tables = list(dict.fromkeys(table for table in tables if table.requires_grad))
        self._rows: dict[torch.Tensor, EmbeddingRows] = {}
        self._turns = Turns((), _nothing_to_start)
        self._early = EarlyGradients()
        self._read_once: set[torch.Tensor] = set()
        # No work is on it: collectives have a stream of their own, which waits for that on which they are called. It is
        # made here, because nothing should be made while a step is captured.
        on_gpu = processes.count > 1 and processes.device.type == "cuda"
        self._stream = torch.cuda.Stream(processes.device) if on_gpu else None
        self._broken = False
        self._shapes: Hashable = None
        self._known: dict[tuple[Hashable, int | str], tuple[int, ...]] = {}

    def expect(self, shapes: Hashable) -> None:
        """Announce the shapes of all processes' batches in the next step, by a value that is equal for equal shapes.

        Processes tell each other on the host how many rows they will send, and the factors of which gradients. This
        cannot be a part of a CUDA graph: a captured step uses the numbers of the last step with the same shapes.
        """
        self._shapes = shapes

    @contextlib.contextmanager
    def during_backward(self, loss: torch.Tensor, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Send large gradients during the backward pass in the block; call `average` after it.

        Args:
            loss: The loss, before its backward pass.
            weights: The weights whose gradients are exchanged, the same in all processes and steps.

        Raises:
            RuntimeError: An earlier backward pass ended with an error after gradients had been sent. Other processes
                may have sent more since, so that collectives would no longer match.
        """
        if self._processes.count == 1:
            yield
            return
        if self._broken:
            raise RuntimeError(
                "a backward pass failed after it had sent gradients to other processes. Start the processes again."
            )
        trained = [each for each in reversed(weights) if each.requires_grad]
        self._factors = self._factors_of(loss, weights, trained) if self._uses_factors else {}
        self._rows = self._rows_of(loss, set(weights).difference(self._factors))
        large = [each for each in trained if each.nbytes >= LARGE_BYTES and each not in self._rows]
        self._turns = Turns(large, self._start)
        captured = _is_captured(self._processes.device)  # then nothing is sent
        # A step that is launched from Python gains little, and the autograd graph may be large.
        self._read_once = weights_read_once(loss, large) if captured and not self._bfloat16 else set()
        # The nodes that leave factors tell when these are ready; their weights have no gradients yet.
        whole = [weight for weight in large if weight not in self._factors]
        hooks = [weight.register_post_accumulate_grad_hook(self._turns.ready) for weight in whole]
        early = early_gradients.noted() if self._read_once else contextlib.nullcontext(EarlyGradients())
        try:
            with early as self._early:
                yield
        except BaseException:
            self._broken = not captured and (self._turns.begun or bool(self._rows))
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._early, self._read_once = EarlyGradients(), set()

    @torch.no_grad()
    def average(
        self,
        weights: Sequence[nn.Parameter],
        others: Sequence[torch.Tensor] = (),
        arrived: Callable[[Sequence[torch.Tensor]], None] = _ignored,
    ) -> None:
        """Replace the gradients of weights, and other tensors, by their means over the processes.

        Nothing synchronises with the device, so that a CUDA graph can capture it.

        Args:
            weights: The weights, the same in all processes and steps. A gradient that is missing counts as zeros.
            others: Further small floating-point tensors of the same shapes in all processes.
            arrived: A function that is called with weights whose gradients are means by now, while others are still
                exchanged, until it has been called with all.
        """
        for weight in weights:
            if weight.grad is None and weight not in self._factors:
                weight.grad = torch.zeros_like(weight)
        # All is sent before anything is waited for.
        sent: list[tuple[Sequence[torch.Tensor], Finish]] = [
            ([tensor], finish)
            for tensor, finish in zip(self._turns.tensors, self._turns.rest(), strict=True)
            if tensor not in self._factors
        ]
        sent += [([table], rows.start(_gradient(table))) for table, rows in self._rows.items()]
        done = {*self._turns.tensors, *self._rows, *self._factors}
        rest = [weight for weight in weights if weight not in done]
        whole = [*map(_gradient, rest), *others]
        sent.append((rest, self._processes.start_average(whole, bfloat16=self._bfloat16)))
        from_factors = list(dict.fromkeys(self._factors.values()))
        self._rows, self._factors, self._turns = {}, {}, Turns((), _nothing_to_start)
        # Products are computed while others are sent; the factors that were sent first have arrived first.
        for each in from_factors:
            each.finish()
        # They are reported together with the next gradients that arrive: the norms of several take less time at once.
        computed = [weight for each in from_factors for weight in each.weights]
        for owners, finish in sent:
            finish()
            arrived([*computed, *owners])
            computed = []

    def _start(self, weight: torch.Tensor) -> Finish:
        if weight in self._factors:
            self._factors[weight].start()
            return self._factors[weight].finish
        gradient = _gradient(weight)
        computed = self._early.event_of(gradient) if weight in self._read_once else None
        with torch.no_grad():
            if computed is None or self._stream is None:
                return self._processes.start_average([gradient], bfloat16=self._bfloat16)
            return self._start_at(computed, gradient, self._stream)

    def _start_at(self, computed: torch.cuda.Event, gradient: torch.Tensor, stream: torch.cuda.Stream) -> Finish:
        """Send a gradient when the event has happened, instead of at the end of the current stream's work."""
        stream.wait_event(computed)
        with torch.cuda.stream(stream):
            finish = self._processes.start_average([gradient])

        def finish_here() -> None:
            finish()
            torch.cuda.current_stream(stream.device).wait_stream(stream)

        return finish_here

    def _factors_of(
        self,
        loss: torch.Tensor,
        weights: Sequence[torch.Tensor],
        trained: Sequence[torch.Tensor],
    ) -> dict[torch.Tensor, FactorExchange]:
        """Return the exchange of factors for each weight whose gradient is not sent itself.

        The processes tell each other which weights these are, and send gradients where they do not agree.
        """
        possible = candidates(nodes_with_leaves(loss), weights_read_once(loss, trained))
        count = self._processes.count
        taken = chosen(possible, count, bfloat16=self._bfloat16, least_bytes=LARGE_BYTES)
        (first, *others) = self._numbers("factors", number_of(taken, weights, _kind_of(self._processes.device)))
        if any(other != first for other in others):
            return {}
        found: dict[torch.Tensor, FactorExchange] = {}
        for each in taken:
            found.update(dict.fromkeys(each.weights, FactorExchange(self._processes, each, self._ready)))
        return found

    def _ready(self, weight: torch.Tensor) -> None:
        """Take note that the factors of a weight's gradient are complete; the turns are set after this is handed on."""
        self._turns.ready(weight)

    def _rows_of(self, loss: torch.Tensor, weights: set[nn.Parameter]) -> dict[torch.Tensor, EmbeddingRows]:
        """Return the rows to send of each embedding that is not sent as a whole."""
        found: dict[torch.Tensor, EmbeddingRows] = {}
        if not self._tables:
            return found  # the autograd graph may be large
        with torch.no_grad():
            for place, (table, rows) in enumerate(zip(self._tables, rows_read(loss, self._tables), strict=True)):
                if table in weights:
                    numbers = self._numbers(place, -1 if rows is None else len(rows))
                    if rows is not None and saves_time(table, rows, numbers, bfloat16=self._bfloat16):
                        found[table] = EmbeddingRows(
                            self._processes, rows, len(table), max(numbers), bfloat16=self._bfloat16
                        )
        return found

    def _numbers(self, place: int | str, own: int) -> tuple[int, ...]:
        """Return a number of each process, by rank, such as the number of rows that it wants to send of a matrix.

        Args:
            place: The meaning of the number: the place of a matrix, or a name.
            own: The number of this process; -1 for the whole matrix.

        Raises:
            RuntimeError: A step is captured, and the numbers of its shapes are unknown, or this process has another. No
                process then replays the step: see `gatewise.training.graph.ReplayedStep`.
        """
        key = self._shapes, place
        if not _is_captured(self._processes.device):
            numbers = self._processes.all_gather_number(own)
            if self._shapes is not None:
                self._known[key] = numbers
            return numbers
        numbers = self._known.get(key, ())
        if not numbers or numbers[self._processes.rank] != own:
            raise RuntimeError("what processes send of the gradients differs between batches of one shape")
        return numbers


class Turns:
    """Work for each of some tensors, which is started in their order, but not before each is ready.

    Args:
        tensors: The tensors in the order of their turns.
        start: A function that starts the work for a tensor and returns a function that waits for its result.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], Finish]) -> None:
        self.tensors = tensors
        self._start = start
        self._ready: set[torch.Tensor] = set()
        self._started: list[Finish] = []

    @property
    def begun(self) -> bool:
        """Whether the work for a tensor has been started."""
        return bool(self._started)

    def ready(self, tensor: torch.Tensor) -> None:
        """Start the work for the tensor if it is its turn, and for those after it that are ready already.

        Raises:
            RuntimeError: The tensor was ready before: its gradient changes after it has been sent.
        """
        if tensor in self._ready:
            raise RuntimeError(
                "a weight's gradient was accumulated twice in one backward pass, which several processes cannot "
                "exchange. Use torch.utils.checkpoint with use_reentrant=False."
            )
        self._ready.add(tensor)
        while len(self._started) < len(self.tensors) and self.tensors[len(self._started)] in self._ready:
            self._started.append(self._start(self.tensors[len(self._started)]))

    def rest(self) -> list[Finish]:
        """Start what has not been started, and return the functions that wait for the results."""
        self._started += [self._start(tensor) for tensor in self.tensors[len(self._started) :]]
        return self._started


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def _nothing_to_start(tensor: torch.Tensor) -> Finish:
    raise AssertionError("no tensor has a turn")


def _kind_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
