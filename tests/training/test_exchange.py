"""What processes send of their gradients: all of them, rows of embeddings, bfloat16 numbers."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from several import Recorder, all_are_large, together
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gatewise
from gatewise.models.arguments import embedded
from gatewise.training import TrainingOptions, exchange
from gatewise.training.exchange import GradientExchange, Turns
from gatewise.training.graph import WARMUPS, ReplayedStep
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import Processes
from gatewise.training.row_exchange import EmbeddingRows
from gatewise.training.step import Step
from gatewise.training.weight_reads import rows_read, weights_read_once
from tests.pairwise import exhaustive

WORDS, SIZE = 200, 8
COUNTS = (2, 3)


class Words(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor


class Reader(nn.Module):
    """A model that predicts numbers from words; `tied` uses the embedding as a matrix product too."""

    def __init__(self, *, tied: bool = False, steps: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.others = nn.Embedding(WORDS, SIZE), nn.Embedding(WORDS, SIZE)
        self.hidden, self.output = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.tied, self.steps = tied, steps

    def forward(self, batch: Words, state: None) -> tuple[torch.Tensor, None]:
        found = self.words(batch.tokens) + self.others(batch.tokens.flip(0)) * self.words(batch.tokens + 1)
        hidden = torch.tanh(self.hidden(found))
        if self.tied:
            hidden = hidden @ self.words.weight[:SIZE]
        return (self.output(hidden).squeeze(-1) - batch.targets).square().mean(), None


def batches(rank: int, lengths, seed: int = 0) -> list[Words]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    # Few different words, so that most occur several times in a batch and in the batches of several processes.
    return [
        Words(torch.randint(0, 9, (length,), generator=generator), torch.randn(length, generator=generator))
        for length in lengths
    ]


class Sent:
    """Counts the bytes of tensors that a process passes to collectives on gradients inside the context."""

    def __init__(self, monkeypatch) -> None:
        self.reduced, self.gathered = 0, 0
        for name, kind in (("all_reduce", "reduced"), ("all_gather", "gathered")):
            monkeypatch.setattr(distributed, name, self._counted(getattr(distributed, name), kind))

    def _counted(self, collective, kind):
        def counted(*arguments, **options):
            tensor = arguments[-1] if kind == "gathered" else arguments[0]
            # Numbers on the host are int64; row numbers are gathered.
            if kind == "gathered" or tensor.is_floating_point():
                setattr(self, kind, getattr(self, kind) + tensor.nbytes)
            return collective(*arguments, **options)

        return counted


def trained(processes: Processes, lengths, recorded=False, tied=False, **options):
    """Take steps; return losses, weights and bytes sent in the last step."""
    model = Reader(tied=tied)
    weights = list(model.parameters())
    optimizer = build_optimizer(weights, TrainingOptions(optimizer="adamw", learning_rate=0.01))
    step = Step(model, optimizer, 1.0, "float32", processes.device, processes=processes, **options)
    replayed = ReplayedStep(step, Recorder(), print, weights, processes, step.expect)
    losses = []
    with contextlib.closing(replayed):
        own = lengths[processes.rank % len(lengths)]
        *most, last = batches(processes.rank, own)
        for batch in most:
            losses.append(float((replayed if recorded else step)(batch, None)[0]))
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(patch)
            step(last, None)
    return losses, [each.detach().numpy() for each in weights], (sent.reduced, sent.gathered)


def averaged(processes: Processes, values, rows, bfloat16=False, dtypes=(torch.int64,)):
    """Average the gradient of an embedding whose rows are given; return it, and that without exchange of rows."""
    found = []
    for by_rows in (True, False):
        table = nn.Embedding(WORDS, SIZE)
        own = torch.tensor(rows[processes.rank], dtype=dtypes[processes.rank % len(dtypes)])
        factors = torch.from_numpy(values)[processes.rank, : len(own)]
        loss = (table(own) * factors).sum()
        sender = GradientExchange(processes, table, bfloat16=bfloat16, rows=by_rows)
        with sender.during_backward(loss, [table.weight]):
            loss.backward()
        others = [torch.tensor([float(processes.rank)])]
        sender.average([table.weight], others)
        found.append(table.weight.grad.numpy())
        assert others[0].item() == (processes.count - 1) / 2
    return found


def compressed(processes: Processes):
    """Return gradients that are sent in bfloat16, by `GradientExchange` and by PyTorch's hook."""
    (batch,) = batches(processes.rank, [7])
    own, theirs = Reader(), Reader()
    sender = GradientExchange(processes, own, bfloat16=True)
    loss, _ = own(batch, None)
    with sender.during_backward(loss, list(own.parameters())):
        loss.backward()
    sender.average(list(own.parameters()))
    wrapped = DistributedDataParallel(theirs)
    # PyTorch refuses the hook by its name without NCCL, but gloo can run it.
    wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    wrapped(batch, None)[0].backward()
    return [[each.grad.numpy() for each in model.parameters()] for model in (own, theirs)]


def one_table(processes: Processes):
    """Average the gradient of one of two embeddings; return the gradient of the other."""
    model = Reader()
    (batch,) = batches(processes.rank, [5])
    sender = GradientExchange(processes, model, rows=True)
    loss, _ = model(batch, None)
    with sender.during_backward(loss, [model.others.weight]):
        loss.backward()
    own = model.words.weight.grad.clone()
    sender.average([model.others.weight])
    return bool((model.words.weight.grad == own).all()), model.others.weight.grad.numpy()


def trained_overlapped(processes: Processes, lengths, **options):
    with all_are_large():
        return trained(processes, lengths, **options)[:2]


def turns(processes: Processes):
    """Return the sizes of what is sent during a backward pass and after it, where one process uses fewer weights."""
    model = Reader()
    model.spare = nn.Linear(5, 1, bias=False)  # the last weight
    weights = list(model.parameters())
    (batch,) = batches(processes.rank, [5])
    sizes, all_reduce = [], distributed.all_reduce

    def counted(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    with all_are_large(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", counted)
        sender = GradientExchange(processes, model)
        loss = model(batch, None)[0] + (model.spare.weight.sum() if processes.rank == 0 else 0)
        with sender.during_backward(loss, weights):
            loss.backward()
        during = len(sizes)
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        arrived = []
        sender.average(weights, [torch.ones(7)], lambda some: arrived.extend((own, own.grad.clone()) for own in some))
    known = dict(arrived)
    means = len(known) == len(arrived) == len(weights) and all(torch.equal(known[own], own.grad) for own in weights)
    return sizes[:during], sizes[during:], model.spare.weight.grad.numpy(), [each.numel() for each in weights], means


def frozen(processes: Processes):
    """Train a model of which a weight has been frozen after its optimizer was made."""
    model = Reader()
    optimizer = build_optimizer(model.parameters(), TrainingOptions(optimizer="sgd", learning_rate=0.1, momentum=0.0))
    model.hidden.weight.requires_grad_(False)
    before = model.hidden.weight.detach().clone()
    with all_are_large():
        step = Step(model, optimizer, 1.0, "float32", processes.device, processes=processes)
        for batch in batches(processes.rank, [5, 7]):
            step(batch, None)
    return bool((model.hidden.weight == before).all()), [each.detach().numpy() for each in model.parameters()]


class Checkpointed(nn.Module):
    """A stack whose forward pass is repeated in the backward pass, or not."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.repeats = gatewise.LSTM(3, 4, 2, memory="lean"), repeats

    def forward(self, batch: Words, state: None) -> tuple[torch.Tensor, None]:
        x = batch.targets[:, None, None].expand(-1, 2, 3)
        y = checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False) if self.repeats else self.lstm(x)[0]
        return y.square().mean(), None


def checkpointed(processes: Processes):
    found = []
    for repeats in (False, True):
        model = Checkpointed(repeats)
        optimizer = build_optimizer(model.parameters(), TrainingOptions(optimizer="sgd", learning_rate=0.1))
        step = Step(model, optimizer, 1.0, "float32", processes.device, processes=processes)
        with all_are_large():
            found.append([float(step(batch, None)[0]) for batch in batches(processes.rank, [5, 5, 5])])
    return found


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("a backward pass that fails")


def failing(processes: Processes, captured=False):
    """Fail in a backward pass after a gradient has been sent, or in its capture; return what the next step says."""
    model = Reader()
    (batch,) = batches(processes.rank, [5])
    sender = GradientExchange(processes, model)
    with all_are_large(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_is_captured", lambda device: captured)
        loss = model.output(Fails.apply(model.hidden(model.words(batch.tokens)))).mean()
        with pytest.raises(ArithmeticError), sender.during_backward(loss, list(model.output.parameters())):
            loss.backward()
        loss = model(batch, None)[0]
        if captured:
            with sender.during_backward(loss, list(model.parameters())):
                loss.backward()
            return ""
        with pytest.raises(RuntimeError) as refused, sender.during_backward(loss, list(model.parameters())):
            loss.backward()
    return str(refused.value)


def different_uses(processes: Processes):
    """Train where only one process uses the embedding as a matrix: all must send the whole matrix."""
    model = Reader(tied=processes.rank == 1)
    optimizer = build_optimizer(model.parameters(), TrainingOptions())
    step = Step(model, optimizer, 0.0, "float32", processes.device, processes=processes, exchange_rows=True)
    for batch in batches(processes.rank, [5] * 3):
        step(batch, None)
    return [each.detach().numpy() for each in model.parameters()]


LENGTHS = [[5, 3, 5] * 4, [4, 4, 3] * 4]
VALUES = np.random.default_rng(0).standard_normal((3, 6, SIZE)).astype(np.float32)
WITH_NAN = VALUES.copy()
WITH_NAN[0, 1, 2], WITH_NAN[1, 0, 3] = np.nan, np.inf
ROWS = [[4, 4, 4, 0, 7, 4], [7, 3], [0, 4, 0, 199]]
EMPTY = [[4, 4], [], [5]]


@pytest.fixture(scope="module", params=[COUNTS[0], *exhaustive(*COUNTS[1:])])
def found(request, tmp_path_factory):
    """The number of processes, and the results of all jobs."""
    options = {
        "plain": {},
        "rows": {"exchange_rows": True},
        "replayed": {"exchange_rows": True, "recorded": True},
        "bfloat16": {"exchange_bfloat16": True},
        "both": {"exchange_bfloat16": True, "exchange_rows": True},
        "tied": {"exchange_rows": True, "tied": True},
        "tied plain": {"tied": True},
    }
    jobs = {name: (trained, {"lengths": LENGTHS} | each) for name, each in options.items()}
    jobs["long plain"] = (trained, {"lengths": [[170, 170]]})
    jobs["long"] = (trained, {"lengths": [[170, 170]], "exchange_rows": True})
    jobs["averaged"] = (averaged, {"values": VALUES, "rows": ROWS})
    jobs["averaged nan"] = (averaged, {"values": WITH_NAN, "rows": ROWS})
    jobs["averaged bfloat16"] = (averaged, {"values": VALUES, "rows": ROWS, "bfloat16": True})
    jobs["averaged empty"] = (averaged, {"values": VALUES, "rows": EMPTY})
    jobs["averaged int32"] = (averaged, {"values": VALUES, "rows": ROWS, "dtypes": (torch.int32,)})
    jobs["averaged both types"] = (averaged, {"values": VALUES, "rows": ROWS, "dtypes": (torch.int32, torch.int64)})
    jobs["averaged nothing"] = (averaged, {"values": VALUES, "rows": [[], [], []]})
    jobs["compressed"] = (compressed, {})
    jobs["one table"] = (one_table, {})
    jobs["overlapped"] = (trained_overlapped, {"lengths": LENGTHS})
    jobs["overlapped bfloat16"] = (trained_overlapped, {"lengths": LENGTHS, "exchange_bfloat16": True})
    jobs["overlapped replayed"] = (trained_overlapped, {"lengths": LENGTHS, "recorded": True, "exchange_rows": True})
    jobs["turns"] = (turns, {})
    jobs["frozen"] = (frozen, {})
    jobs["checkpointed"] = (checkpointed, {})
    jobs["failing"] = (failing, {})
    jobs["failing capture"] = (failing, {"captured": True})
    jobs["different uses"] = (different_uses, {})
    return request.param, together(tmp_path_factory.mktemp("results"), jobs, count=request.param)


AVERAGED = ["averaged", "averaged int32", "averaged both types"]
AVERAGED += ["averaged nan", "averaged empty", "averaged nothing"]
KINDS = ["plain", "rows", "replayed", "bfloat16", "both", "tied", "long"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_have_the_same_bits(found, kind):
    count, results = found
    first, *others = (weights for _, weights, _ in results[kind])
    assert len(others) == count - 1
    for other in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, another)


def test_rows_alone_give_the_weights_of_the_whole_matrices(found):
    count, results = found
    for (losses, weights, _), (plain_losses, plain, _) in zip(results["rows"], results["plain"], strict=True):
        if count == 2:  # where a half is exact, and a sum does not depend on the order
            assert losses == plain_losses
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        for one, other in zip(weights, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=0 if count == 2 else 1e-4, atol=0 if count == 2 else 1e-5)


def test_replayed_steps_send_the_same_rows(found):
    _, results = found
    for (losses, weights, _), (launched, others, _) in zip(results["replayed"], results["rows"], strict=True):
        assert losses == launched
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_bytes_that_are_sent(found):
    _, results = found
    table, rest = 4 * WORDS * SIZE, 4 * (SIZE * SIZE + 2 * SIZE + 1 + 1)
    most = [max(lengths[-1] for lengths in LENGTHS)] * len(results["plain"])
    for sent in (each[2] for each in results["plain"]):
        assert sent == (2 * table + rest, 0)
    for number, (_, _, sent) in zip(most, results["rows"], strict=True):
        # The words are looked up twice, the others once.
        assert sent == (rest, 3 * number * (4 * SIZE + 8))
    for sent in (each[2] for each in results["bfloat16"]):
        assert sent == (table + rest / 2, 0)
    for number, (_, _, sent) in zip(most, results["both"], strict=True):
        assert sent == (rest / 2, 3 * number * (2 * SIZE + 8))


def test_a_matrix_that_is_used_otherwise_or_in_long_batches_is_sent_as_a_whole(found):
    _, results = found
    table, rest = 4 * WORDS * SIZE, 4 * (SIZE * SIZE + 2 * SIZE + 1 + 1)
    for reduced, _ in (each[2] for each in results["tied"]):
        assert reduced == table + rest, "the other embedding is sent in rows"
    for sent in (each[2] for each in results["long"]):
        assert sent == (2 * table + rest, 0)
    for kind in ("tied", "long"):
        for (losses, _, _), (plain, _, _) in zip(results[kind], results[f"{kind} plain"], strict=True):
            assert losses == pytest.approx(plain, rel=1e-5)


def test_what_one_process_sends_as_a_whole_all_do(found):
    first, *others = found[1]["different uses"]
    for other in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("kind", AVERAGED)
def test_the_mean_of_rows_is_the_mean_of_the_matrix(found, kind):
    count, results = found
    for by_rows, whole in results[kind]:
        # One rounding of the quotient and of each sum, in both.
        np.testing.assert_allclose(by_rows, whole, rtol=2 * (count + 1) * 2**-24, atol=1e-7 * (count > 2))
        np.testing.assert_array_equal(by_rows, results[kind][0][0])


def exact_mean(count):
    """Return the mean gradient and the mean of absolute values, in float64."""
    sums = np.zeros((count, WORDS, SIZE))
    for rank in range(count):
        for row, values in zip(ROWS[rank], VALUES[rank], strict=False):
            sums[rank, row] += values
    return sums.mean(0), np.abs(sums).mean(0)


def test_the_error_in_bfloat16_is_within_its_bound(found):
    count, results = found
    mean, of_sizes = exact_mean(count)
    allowed = ((1 + 2**-8) ** (count + 1) - 1) * of_sizes + 1e-6
    for by_rows, whole in results["averaged bfloat16"]:
        for one in (by_rows, whole):
            assert (np.abs(one - mean) <= allowed).all()
            assert (one != mean.astype(np.float32)).any(), "nothing was rounded"
        assert np.abs(by_rows - mean).sum() <= np.abs(whole - mean).sum(), "rows are added in float32"


def test_bfloat16_is_sent_as_by_the_hook_of_pytorch(found):
    count, results = found
    for own, theirs in results["compressed"]:
        largest = max(np.abs(other).max() for other in theirs)
        for one, other in zip(own, theirs, strict=True):
            # The hook rounds before it divides too, which makes a difference where the quotient is not exact.
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if count == 2 else 2**-5 * largest)


@pytest.mark.parametrize("kind", ["bfloat16", "both"])
def test_losses_in_bfloat16_are_beside_those_without(found, kind):
    _, results = found
    for (losses, _, _), (plain, _, _) in zip(results[kind], results["plain"], strict=True):
        assert losses != plain
        assert losses == pytest.approx(plain, rel=0.02)


def test_an_embedding_that_is_not_trained_is_not_exchanged(found):
    (kept, first), *others = found[1]["one table"]
    assert kept
    for also_kept, other in others:
        assert also_kept
        np.testing.assert_array_equal(first, other)


class OneOfTwo(Processes):
    """The first of two processes, where the other sends the same."""

    def all_gather_number(self, own):
        return (own, own)


def test_a_captured_step_uses_the_numbers_of_its_shapes_and_refuses_others(monkeypatch):
    table = nn.Embedding(WORDS, SIZE)
    sender = GradientExchange(OneOfTwo(0, 2, torch.device("cpu")), table, rows=True)
    sender.expect("short")
    assert sender._numbers(0, 3) == (3, 3)
    sender.expect("long")
    assert sender._numbers(0, 9) == (9, 9)
    sender.expect("short")
    monkeypatch.setattr(exchange, "_is_captured", lambda device: True)
    monkeypatch.setattr(OneOfTwo, "all_gather_number", lambda self, own: pytest.fail("a message in a capture"))
    assert sender._numbers(0, 3) == (3, 3)
    with pytest.raises(RuntimeError, match=r"what processes send .* differs between batches of one shape"):
        sender._numbers(0, 4)
    sender.expect("never seen")
    with pytest.raises(RuntimeError, match="what processes send"):
        sender._numbers(0, 3)


def test_a_replayed_step_announces_the_shapes_before_each_step_and_capture():
    seen, model = [], Reader()
    alone = Processes(0, 1, torch.device("cpu"))
    step = Step(model, build_optimizer(model.parameters(), TrainingOptions()), 0.0, "float32", alone.device)
    replayed = ReplayedStep(step, Recorder(), print, list(model.parameters()), alone, seen.append)
    for batch in batches(0, [5] * (WARMUPS + 2) + [3]):
        replayed(batch, None)
    assert len(set(seen[:-1])) == 1
    assert len(set(seen)) == 2


def test_rows_are_those_that_the_loss_looks_up():
    table, other = nn.Embedding(WORDS, SIZE), nn.Embedding(WORDS, SIZE)
    tokens = torch.tensor([[3, 1], [3, 8]])
    with torch.autocast("cpu", torch.bfloat16):
        looked_up = nn.Linear(SIZE, SIZE)(table(tokens)).sum() + table(tokens[0]).sum()
    read, unread = rows_read(looked_up, [table.weight, other.weight])
    assert sorted(read.tolist()) == [1, 1, 3, 3, 3, 8]
    assert unread is None
    assert rows_read(looked_up + table.weight.mean(), [table.weight]) == [None]
    assert rows_read(nn.functional.linear(looked_up.expand(SIZE), table.weight).sum(), [table.weight]) == [None]
    with gatewise.for_data_parallel():  # by the node of gatewise's models
        looked_up = embedded(table, "tokens", tokens).sum() + table(tokens[0]).sum()
    assert sorted(rows_read(looked_up, [table.weight])[0].tolist()) == [1, 1, 3, 3, 3, 8]
    bag = nn.functional.embedding_bag(tokens, table.weight)
    assert rows_read(bag.sum(), [table.weight]) == [None]


@pytest.mark.parametrize(("reentrant", "whole"), [(True, True), (False, False)])
def test_a_checkpoint_that_hides_a_part_of_the_graph_sends_the_whole_matrix(reentrant, whole):
    table, tokens = nn.Embedding(WORDS, SIZE), torch.tensor([3, 1])
    start = torch.ones(2, SIZE, requires_grad=True)
    hidden = checkpoint(lambda x: x * table(tokens), start, use_reentrant=reentrant)
    (read,) = rows_read((hidden + table(tokens)).sum(), [table.weight])
    assert (read is None) == whole


def test_which_weights_one_node_alone_reads():
    lstm, once, twice, unread = gatewise.LSTM(SIZE, SIZE), *(nn.Linear(SIZE, SIZE) for _ in range(3))
    x = torch.randn(3, 2, SIZE)
    loss = once(twice(twice(lstm(x)[0]))).sum()
    weights = [*lstm.parameters(), once.weight, twice.weight, unread.weight]
    assert weights_read_once(loss, weights) == {*lstm.parameters(), once.weight}
    penalized = loss + lstm.weight_hh_l0.square().sum()
    assert weights_read_once(penalized, weights) == {*lstm.parameters(), once.weight} - {lstm.weight_hh_l0}
    assert weights_read_once((once.weight * once.weight).sum(), weights) == set()
    hidden = checkpoint(once, x.requires_grad_(), use_reentrant=True)
    assert weights_read_once((hidden + once(x)).sum(), weights) == set()


@pytest.mark.parametrize(
    ("kind", "plain"), [("overlapped", "plain"), ("overlapped bfloat16", "bfloat16"), ("overlapped replayed", "rows")]
)
def test_what_is_sent_during_the_backward_pass_gives_the_same_weights(found, kind, plain):
    count, results = found
    (losses, weights), *others = results[kind]
    expected, plain_weights, _ = results[plain][0]
    for _, other in others:
        for one, another in zip(weights, other, strict=True):
            np.testing.assert_array_equal(one, another)
    # Three numbers are added in an order that depends on their place in what is sent.
    close = {2: 0.0, 3: 1e-5 if plain != "bfloat16" else 2e-2}[count]
    assert losses == pytest.approx(expected, rel=close, abs=0)
    if not close:
        for one, another in zip(weights, plain_weights, strict=True):
            np.testing.assert_array_equal(one, another)


def test_gradients_are_sent_in_the_same_order_by_all_and_during_the_backward_pass(found):
    count, results = found
    first, *others = results["turns"]
    sizes = first[3]
    assert first[0] + first[1] == [*reversed(sizes), 7], "one by one, from the last weight to the first, then the rest"
    assert len(first[0]) > 1, "the first process has a gradient for the last weight, and sends during the pass"
    for other in others:
        assert other[0] == [], "the last weight has the first turn, and no gradient here"
        assert other[0] + other[1] == first[0] + first[1]
    for _, _, gradient, _, means in results["turns"]:
        np.testing.assert_allclose(gradient, 1 / count, rtol=1e-6)
        assert means, "every weight arrived once, with a gradient that did not change any more"


def test_a_weight_that_was_frozen_later_stays_as_it_is(found):
    _, results = found
    (unchanged, first), *others = results["frozen"]
    assert unchanged
    for _, weights in others:
        for one, other in zip(first, weights, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_checkpointed_stack_trains_as_without(found):
    _, results = found
    for plain, repeated in results["checkpointed"]:
        assert repeated == pytest.approx(plain, rel=1e-6)
        assert plain[-1] != plain[0]


def test_no_step_follows_a_backward_pass_that_failed_after_it_had_sent_gradients(found):
    _, results = found
    for said in results["failing"]:
        assert said.startswith("a backward pass failed after it had sent gradients to other processes.")
    assert set(results["failing capture"]) == {""}, "a capture sends nothing"


def test_infinite_rows_stay_infinite_and_float64_rows_exact():
    processes = Processes(0, 1, torch.device("cpu"))
    gradient = torch.zeros(5, 2, dtype=torch.float64)
    gradient[3] = torch.tensor([math.inf, 1 / 3], dtype=torch.float64)
    rows = EmbeddingRows(processes, torch.tensor([3, 3]), 5, 2, bfloat16=False)
    rows.start(gradient)()
    assert gradient[3].tolist() == [math.inf, 1 / 3]
    assert not gradient[[0, 1, 2, 4]].any()


def test_turns_come_in_order_and_once():
    tensors, started = [torch.zeros(each) for each in range(4)], []

    def start(tensor):
        started.append(len(tensor))
        return lambda: started.append(f"{len(tensor)} done")

    order = Turns(tensors, start)
    order.ready(tensors[1])
    order.ready(tensors[2])
    assert started == []
    order.ready(tensors[0])
    assert started == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"accumulated twice in one backward pass.*use_reentrant=False"):
        order.ready(tensors[1])
    for finish in order.rest():
        finish()
    assert started == [0, 1, 2, 3, *(f"{each} done" for each in range(4))]
