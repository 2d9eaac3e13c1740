"""`gatewise.explain` of streams: what computes a step, and why."""

import itertools

import pytest
import torch

import gatewise
from gatewise.cells import GRU, LSTM, SLSTM, LayerNormLSTM
from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.selection.one_step import held_steps
from tests.nn.test_stream import Erf, Momentum
from tests.pairwise import each_value


def test_a_step_on_a_cpu_has_the_operators_of_pytorch_where_it_has_the_cell():
    for layer, algorithm in (
        (gatewise.LSTM(5, 8), "the operators of torch.lstm_cell for each layer"),
        (gatewise.RNN(5, 8, nonlinearity="relu"), "the operators of torch.rnn_relu_cell for each layer"),
        (gatewise.LSTM(5, 8, proj_size=3), "a few operators of `eager` for each layer"),
        (gatewise.GRU(5, 8, dtype=torch.bfloat16), "a few operators of `eager` for each layer"),
        (gatewise.Recurrent(GRU(), 5, 8), "the operators of torch.gru_cell for each layer"),
        (gatewise.Recurrent(GRU(), 5, 8, heads=2), "a few operators of `eager` for each layer"),
        (gatewise.Recurrent(Erf(), 5, 8), "a few operators of `eager` for each layer"),
    ):
        decision = gatewise.explain(layer.stream(20), (20, 5))
        assert decision.chosen == "one_step"
        assert decision.verdict("one_step").algorithm == algorithm
        assert decision.verdict("one_step").seconds > 0
        assert decision.problem.time == 1
        assert decision.problem.batch == 20


def test_a_step_on_a_gpu_is_one_launch_for_each_layer():
    stream = gatewise.LSTM(5, 8, 2, batch_first=True).stream(8)
    decision = gatewise.explain(stream, torch.zeros(8, 5), device="h200")
    assert decision.chosen == "one_step"
    verdict = decision.verdict("one_step")
    assert (verdict.algorithm, verdict.work.launches) == ("one launch for each layer", 2)
    assert "one_step    accepted" in str(decision)


@pytest.mark.parametrize(
    ("dtype", "layers", "cell"),
    each_value(
        [
            *itertools.product(
                [torch.bfloat16, torch.float32, torch.float64], [1, 3], [LSTM(), GRU(), SLSTM(), Momentum()]
            )
        ]
    ),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_the_memory_of_a_step_is_that_of_its_states_and_its_output(cell, layers, dtype):
    layer = gatewise.Recurrent(cell, 5, 8, layers, dtype=dtype)
    zeros = layer.weight_ih_l0.new_zeros(3, 8)
    held = held_steps(cell, [(zeros,) * (1 + len(cell.states))] * layers, dtype)
    tensors = [value for value in vars(held).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4
    on_gpu = gatewise.explain(layer.stream(3), (3, 5), device="h200").verdict("one_step").peak_bytes
    assert on_gpu == sum(tensor.nbytes for tensor in tensors) + zeros.nbytes
    stream = layer.stream(3)
    y = stream(zeros[:, :5])
    states = sum(state.nbytes for each in stream._states for state in each)
    assert gatewise.explain(stream, (3, 5)).verdict("one_step").peak_bytes == states + y.nbytes


@pytest.mark.parametrize(
    ("make", "batch", "refusal"),
    [
        (lambda: gatewise.LSTM(5, 8), 9, "batch is 9, allowed: at most 8"),
        (lambda: gatewise.LSTM(5, 8, proj_size=3), 8, "proj_size is 3, allowed: 0"),
        (lambda: gatewise.Recurrent(LayerNormLSTM(), 5, 8), 8, "cell is layer_norm_lstm"),
        (lambda: gatewise.Recurrent(Erf(), 5, 8), 8, "cell is Erf, which cannot be traced"),
        (lambda: gatewise.LSTM(5, 8, kernel="stepwise"), 8, "kernel is 'stepwise', allowed: none that is named"),
    ],
)
def test_other_steps_on_a_gpu_are_calls_of_the_kernel_that_is_chosen_for_one(make, batch, refusal):
    layer = make()
    decision = gatewise.explain(layer.stream(batch), (batch, 5), device="h200")
    expected = gatewise.explain(layer, (1, batch, 5), device="h200", training=False)
    assert (decision.chosen, decision.reason) == (expected.chosen, expected.reason)
    assert decision.verdicts[1:] == expected.verdicts
    (found,) = decision.verdict("one_step").refusals
    assert str(found).startswith(refusal)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: gatewise.LSTM(5, 8, proj_size=3), "proj_size is 3, allowed: 0"),
        (lambda: gatewise.LSTM(5, 8, kernel="eager"), "kernel is 'eager', allowed: none that is named"),
    ],
)
def test_a_call_of_another_kernel_is_not_captured(make, refusal):
    stream = make().stream(8)
    assert gatewise.explain(stream, (8, 5), device="h200", captured=False).chosen is not None
    decision = gatewise.explain(stream, (8, 5), device="h200", captured=True)
    reason = "a call in the capture of a CUDA graph, whose replays would not carry the states"
    assert (decision.chosen, decision.reason) == (None, reason)
    assert [str(found) for found in decision.verdict("one_step").refusals] == [refusal]
    assert "chosen   none (a call in the capture of a CUDA graph" in str(decision)
    captured = gatewise.explain(gatewise.LSTM(5, 8).stream(8), (8, 5), device="h200", captured=True)
    assert captured.chosen == "one_step"
    assert gatewise.explain(stream, (8, 5), device="cpu", captured=True).chosen is not None


def test_a_named_kernel_computes_a_step_on_a_cpu_too():
    stream = gatewise.Recurrent(LSTM(), 5, 8).stream(1)
    assert gatewise.explain(stream, (1, 5), kernel="eager").chosen == "eager"
    with gatewise.use_kernel("aten"):
        assert gatewise.explain(stream, (1, 5)).chosen == "aten"
    assert gatewise.explain(stream, (1, 5)).chosen == "one_step"


def test_what_a_step_cannot_have_is_refused():
    stream = gatewise.LSTM(5, 8).stream(2)
    for shape in ((1, 2, 5), (5,), (3, 5), (2, 4)):
        with pytest.raises(ShapeError, match=r"`x` must be of shape \[B, I\] = \[2, 5\], got"):
            gatewise.explain(stream, shape)
    for option in ("lengths", "training", "resets"):
        with pytest.raises(ArgumentError, match=f"`{option}` must be left out for a stream, got True"):
            gatewise.explain(stream, (2, 5), **{option: True})
