"""gatewise.LSTM inside the tools of training loops gives the results of torch.nn.LSTM."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from gatewise.nn import LSTM
from tests.pairwise import each_value

LAYERS = [nn.LSTM, LSTM]
SIZES = {"num_layers": 2, "dtype": torch.float64}


def layer_and_input(kind, **options):
    torch.manual_seed(0)
    return kind(5, 4, **(SIZES | options)), torch.randn(6, 3, 5, dtype=options.get("dtype", torch.float64))


def gradients(layer, x, *others):
    return [x.grad, *(weight.grad for weight in layer.parameters()), *others]


def same_for_both(found) -> None:
    theirs, ours = found
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("memory", "lengths", "dropout", "reentrant"),
    each_value([*itertools.product(["normal", "lean"], [None, [6, 2, 3], [4, 4, 4]], [0.0, 0.5], [True, False])]),
    ids=str,
)
def test_activation_checkpointing(reentrant, dropout, lengths, memory):
    found = []
    for again in (False, True):
        layer, x = layer_and_input(LSTM, dropout=dropout, memory=memory)
        x.requires_grad_()
        torch.manual_seed(1)
        call = checkpoint if again else lambda function, *given, use_reentrant: function(*given)
        y, _ = call(layer, x, None, lengths, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append(gradients(layer, x, y))
    same_for_both(found)


def test_gradient_scaling_and_clipping():
    found, shrunk = [], []
    for kind in LAYERS:
        layer, x = layer_and_input(kind, dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(layer(x)[0].square().sum()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(layer.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        found.append([*layer.parameters()])
        shrunk.append(scaler.get_scale())
    same_for_both(found)
    assert shrunk[0] == shrunk[1] != 2.0**120


def test_an_optimizer_that_calls_a_closure():
    found = []
    for kind in LAYERS:
        layer, x = layer_and_input(kind)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure(layer=layer, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (layer(x)[0] - 0.3).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[-1] < losses[0]
        found.append([*layer.parameters()])
    same_for_both(found)


def test_tensors_kept_on_the_host():
    found = []
    for kind in LAYERS:
        layer, x = layer_and_input(kind)
        x.requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y, _ = layer(x)
        y.square().sum().backward()
        found.append(gradients(layer, x))
    same_for_both(found)


def test_an_average_of_weights():
    found = []
    for kind in LAYERS:
        layer, x = layer_and_input(kind)
        averaged = torch.optim.swa_utils.AveragedModel(layer)
        averaged.update_parameters(layer)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(2)
        averaged.update_parameters(layer)
        found.append(averaged(x)[0])
    same_for_both(found)


def test_a_replica_whose_weights_are_no_parameters():
    layer, x = layer_and_input(LSTM)
    replica = layer._replicate_for_data_parallel()  # as DataParallel does for each device
    for name, weight in layer.named_parameters():
        setattr(replica, name, weight * 1.0)
    replica(x)[0].square().sum().backward()
    found = gradients(layer, x)
    layer.zero_grad()
    layer(x)[0].square().sum().backward()
    torch.testing.assert_close(found, gradients(layer, x))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "eager"])
def test_a_gradient_penalty_on_a_gpu(kernel):
    found = []
    for dtype, name in ((torch.float64, "eager"), (torch.float32, kernel)):
        torch.manual_seed(0)
        layer, x = LSTM(24, 64, num_layers=2, kernel=name), torch.randn(9, 5, 24)
        layer, x = layer.to("cuda", dtype), x.to("cuda", dtype).requires_grad_()
        with torch.backends.cudnn.flags(allow_tf32=False):
            (dx,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
            dx.square().sum().backward()
        found.append(gradients(layer, x, dx))
    for mine, exact in zip(found[1], found[0], strict=True):
        assert (mine - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.gpu
def test_data_parallel_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer, x = layer_and_input(LSTM, batch_first=True, dtype=torch.float32)
    layer, x = layer.cuda(), x.cuda()
    found = []
    for model in (layer, nn.DataParallel(layer)):
        for _ in range(4):  # enough for calls to be captured and replayed
            layer.zero_grad()
            y, _ = model(x)
            y.square().sum().backward()
        found.append([y, *(weight.grad for weight in layer.parameters())])
    torch.testing.assert_close(found[1], found[0])
