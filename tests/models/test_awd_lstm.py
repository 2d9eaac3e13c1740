"""The options of the AWD-LSTM: sizes of layers, locked dropout, dropped words and weights, penalties."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gatewise.contract.errors import ArgumentError
from gatewise.data import Window
from gatewise.models import LanguageModel
from gatewise.models.lstm_stack import LSTMStack
from gatewise.nn import LSTM
from gatewise.training import TrainingOptions
from gatewise.training.graph import WARMUPS, ReplayedStep, cuda_graphs
from gatewise.training.optimizers import build_optimizer
from gatewise.training.step import MeanLoss, Step

SIZES = {"vocabulary_size": 31, "embedding_size": 12, "hidden_size": 20, "num_layers": 3, "last_hidden_size": 12}
DROPOUTS = {"dropout": 0.4, "embedding_dropout": 0.5, "layer_dropout": 0.2, "word_dropout": 0.1, "locked": True}
AWD = SIZES | DROPOUTS | {"tied": True, "weight_dropout": 0.5, "activation_penalty": 2.0, "change_penalty": 1.0}
RATE = AWD["weight_dropout"]


def window(time=7, batch=3, seed=0, device="cpu"):
    tokens = torch.randint(31, (time + 1, batch), generator=torch.Generator().manual_seed(seed)).to(device)
    return Window(tokens[:-1], tokens[1:])


def model(seed=0, **options):
    torch.manual_seed(seed)
    return LanguageModel(**(SIZES | options))


def test_layers_have_sizes_of_their_own_and_the_last_that_of_the_embedding():
    subject = model(**AWD)
    assert [(layer.input_size, layer.hidden_size) for layer in subject.layers] == [(12, 20), (20, 20), (20, 12)]
    assert subject.narrowed is None
    assert subject.output.weight is subject.embedding.weight


def test_a_stack_is_its_layers_one_after_the_other():
    subject, batch = model(), window()
    x, finals = subject.embedding(batch.inputs), []
    for layer in subject.layers:
        x, final = layer(x)
        finals.append(final)
    logits, state = subject(batch.inputs)
    torch.testing.assert_close(logits, functional.linear(x, subject.output.weight, subject.output.bias))
    torch.testing.assert_close(state, tuple(finals))
    again, _ = subject(batch.inputs, state)
    assert not torch.allclose(again[0], logits[0]), "the state is read"


def test_layers_of_one_size_with_locked_dropout_compute_what_one_lstm_computes():
    plain = {"last_hidden_size": 0, "layer_dropout": 0.2}
    stack, single = model(**plain, locked=True), model(**plain)
    assert isinstance(stack.lstm, LSTMStack)
    assert isinstance(single.lstm, LSTM)
    for number, layer in enumerate(stack.layers):
        for name, weight in layer.named_parameters():
            weight.data.copy_(getattr(single.lstm, name.replace("_l0", f"_l{number}")).data)
    for name in ("embedding", "output"):
        getattr(stack, name).load_state_dict(getattr(single, name).state_dict())
    batch = window()
    torch.testing.assert_close(stack.eval().loss(batch)[0], single.eval().loss(batch)[0])


@pytest.mark.parametrize("locked", [False, True])
def test_a_locked_mask_is_the_same_at_all_steps(locked):
    subject, found = model(**DROPOUTS | {"locked": locked, "word_dropout": 0.0}), {}
    places = {"input": subject.layers[0], "between": subject.layers[1], "output": subject.output}
    for name, module in places.items():
        module.register_forward_pre_hook(lambda _, given, name=name: found.update({name: given[0].detach()}))
    subject(window(time=20).inputs)
    for name, given in found.items():
        zero = given == 0
        assert zero.any(), name
        assert torch.equal(zero, zero[:1].expand_as(zero)) is locked, name


def test_a_text_in_pieces_with_carried_state_is_the_whole():
    subject, batch = model(**AWD).eval(), window(time=9)
    whole, end = subject(batch.inputs)
    first, state = subject(batch.inputs[:4])
    second, again = subject(batch.inputs[4:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(end, again)


def test_penalties_are_in_the_gradient_but_not_in_the_value():
    options, batch = DROPOUTS | {"dropout": 0.5}, window()
    plain, penalised = model(**options), model(**options, activation_penalty=2.0, change_penalty=3.0)
    outputs = []
    plain.lstm.register_forward_hook(lambda *given: outputs.append(given[-1][0]))
    plain.output.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    torch.manual_seed(1)
    logits, _ = plain(batch.inputs)
    expected = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    raw, dropped = outputs
    total = expected + 2 * dropped.square().mean() + 3 * (raw[1:] - raw[:-1]).square().mean()
    torch.manual_seed(1)
    loss, _ = penalised.loss(batch)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, [*of.parameters()]) for each, of in ((loss, penalised), (total, plain))]
    torch.testing.assert_close(*gradients)


def test_a_window_of_one_step_has_no_change_to_penalise():
    loss, _ = model(**AWD).loss(window(time=1))
    loss.backward()
    assert loss.isfinite()


def test_evaluation_drops_and_penalises_nothing():
    subject, batch, state = model(**AWD).eval(), window(), torch.random.get_rng_state()
    loss, _ = subject.loss(batch)
    expected = model(tied=True).eval()
    expected.load_state_dict(subject.state_dict())
    torch.testing.assert_close(loss, expected.loss(batch)[0], rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    gradients = [torch.autograd.grad(each.loss(batch)[0], [*each.parameters()]) for each in (subject, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word_dropout": 1.0}, r"`word_dropout` must be a probability in \[0, 1\), got 1.0"),
        ({"weight_dropout": -0.5}, r"`weight_dropout` must be a probability in \[0, 1\), got -0.5"),
        ({"activation_penalty": -1.0}, "`activation_penalty` must be 0 or more, got -1.0"),
        ({"change_penalty": float("nan")}, "`change_penalty` must be a finite number, got nan"),
        ({"last_hidden_size": -1}, "`last_hidden_size` must be 0 or more, got -1"),
        ({"num_layers": 1}, "`last_hidden_size` must be 0 for one layer, got 12. Set `hidden_size`"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        model(**options)


# The known trap: programs that replaced the weights of `torch.nn.LSTM` stopped dropping any, without an error, when
# PyTorch began to read other references to the weights.


def masks_of_training(subject, steps, device="cpu", capture=None, precision="float32"):
    """Train, and return the elements of the recurrent matrices that had no gradient in each step, by layer.

    A dropped element has no gradient at all; any other would be zero by chance only.
    """
    device = torch.device(device)
    options = TrainingOptions(optimizer="sgd", learning_rate=0.1, momentum=0.0)
    weights = [*subject.parameters()]
    step = Step(MeanLoss(subject), build_optimizer(weights, options), 1.0, precision, device)
    train = step if capture is None else ReplayedStep(step, capture, lambda _: None, weights)
    matrices = [layer.weight_hh_l0 for layer in subject.layers]
    found, state, evaluated = [], None, window(seed=99, device=device)
    for number in range(steps):
        _, state = train(window(batch=8, seed=number, device=device), state)
        found.append([(matrix.grad == 0).cpu() for matrix in matrices])
        if number == steps // 2:  # an evaluation must not stop the dropping
            losses = {subject.eval().loss(evaluated)[0].item() for _ in range(3)}
            assert len(losses) == 1
            subject.train()
    return found


def check_masks(found):
    masks = [mask for step in found for mask in step]
    for mask in masks:
        assert abs(mask.double().mean().item() - RATE) < 5 * (RATE * (1 - RATE) / mask.numel()) ** 0.5
    of_layers = [{mask.numpy().tobytes() for mask in layer} for layer in zip(*found, strict=True)]
    assert [len(each) for each in of_layers] == [len(found)] * len(of_layers), "every step has another mask"


class AgainCaptured:
    """A capture whose replay calls the work again, and counts the replays."""

    replays = 0

    def __call__(self, work):
        def replay():
            self.replays += 1
            work()

        return replay


@pytest.mark.parametrize("kernel", ["auto", "aten", "eager"])
def test_every_step_of_training_drops_other_recurrent_weights(kernel):
    check_masks(masks_of_training(model(**AWD, kernel=kernel), 6))


def test_every_replayed_step_drops_other_recurrent_weights():
    capture = AgainCaptured()
    check_masks(masks_of_training(model(**AWD), WARMUPS + 5, capture=capture))
    assert capture.replays == 4


def test_a_single_lstm_of_several_layers_drops_in_all_of_them():
    subject = model(**AWD | {"last_hidden_size": 0, "locked": False})
    subject.loss(window(batch=8))[0].backward()
    for number in range(3):
        assert 0.3 < (getattr(subject.lstm, f"weight_hh_l{number}").grad == 0).double().mean() < 0.7


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["auto", "persistent", "stepwise", "cudnn", "eager"])
@pytest.mark.parametrize("captured", [False, True])
def test_every_step_on_a_gpu_drops_other_recurrent_weights(kernel, precision, captured):
    sizes = {"embedding_size": 32, "hidden_size": 64, "last_hidden_size": 32, "kernel": kernel}
    subject = model(**AWD | sizes).cuda()
    capture = cuda_graphs() if captured else None
    check_masks(masks_of_training(subject, WARMUPS + 5, "cuda", capture, precision))
