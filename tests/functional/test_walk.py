"""All calls share one path: the input goes through few files, and returns to few of them."""

import sys

import pytest
import torch

import gatewise
from gatewise import functional
from tests.functional.walk import Stay, Walk, walk

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="a walk reads the bytecode of Python 3.11 and 3.12")

LAYER, DIFFERENTIABLE, EXECUTION = "nn/lstm.py", "functional/differentiable.py", "functional/execution.py"


def files_until_the_kernel(found):
    """Return the file of every stay before the first one in a kernel."""
    files = [stay.file for stay in found.stays]
    return files[: next(index for index, file in enumerate(files) if file.startswith("kernels/"))]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kernel", ["eager", "auto"])
def test_the_input_of_a_layer(kernel, training, passes_alone):
    layer, x = gatewise.LSTM(3, 4, kernel=kernel), torch.randn(5, 2, 3)
    with torch.set_grad_enabled(training):
        layer(x)  # the plan of the second call is looked up
        found = walk(lambda: layer(x), x)
    assert files_until_the_kernel(found) == [LAYER, DIFFERENTIABLE, EXECUTION], found
    stays, files, returns = found.counts
    assert stays <= 14, found
    assert files <= 8, found
    # For a backward pass the input is read once more, to be saved; all other returns are within the kernel.
    outside = [stay.file for stay in found.stays if not stay.file.startswith("kernels/")]
    assert len(outside) - len(set(outside)) == (training and kernel == "eager"), found
    assert returns <= 5, found


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_the_input_of_a_plain_call(training):
    layer, x = gatewise.LSTM(3, 4, kernel="eager"), torch.randn(5, 2, 3)
    with torch.set_grad_enabled(training):
        layer(x)
        found = walk(lambda: layer(x), x)
    assert files_until_the_kernel(found) == [LAYER, DIFFERENTIABLE, EXECUTION], found
    outside = [stay.file for stay in found.stays if not stay.file.startswith("kernels/")]
    assert len(outside) == len(set(outside)), found
    assert found.counts[0] <= 8, found


@pytest.mark.parametrize("lengths", [[5, 2], torch.tensor([1, 4])], ids=["list", "tensor"])
def test_the_input_with_lengths(lengths):
    layer, x = gatewise.LSTM(3, 4, kernel="eager"), torch.randn(5, 2, 3)
    found = walk(lambda: layer(x, lengths=lengths), x)
    assert files_until_the_kernel(found) == [LAYER, DIFFERENTIABLE, EXECUTION], found


def test_the_input_under_autocast_is_only_converted_on_its_way_in():
    layer, x = gatewise.LSTM(3, 4, kernel="eager"), torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = walk(lambda: layer(x), x)
    assert found.files == [LAYER, DIFFERENTIABLE], found


def test_the_input_of_the_explicit_pass_takes_the_same_path():
    layer, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    found = walk(lambda: functional.forward(x, None, layer.all_weights, kernel="eager"), x)
    assert EXECUTION in files_until_the_kernel(found), found


def test_the_input_under_torch_func_takes_the_same_path():
    layer, x = gatewise.LSTM(3, 4), torch.randn(5, 2, 3)
    seen = []

    def loss(weights):
        found = []
        seen.append(walk(lambda: found.append(torch.func.functional_call(layer, weights, (x,))[0]), x))
        return found[0].sum()

    torch.func.grad(loss)(dict(layer.named_parameters()))
    assert files_until_the_kernel(seen[0])[:3] == [LAYER, DIFFERENTIABLE, EXECUTION], seen[0]


def test_a_stay_is_a_stretch_in_one_file():
    found = Walk([Stay("a.py", []), Stay("b.py", []), Stay("a.py", [])])
    assert found.counts == (3, 2, 1)


def test_views_are_followed_and_results_are_not():
    layer, x = gatewise.LSTM(3, 4, batch_first=True, kernel="eager"), torch.randn(2, 5, 3)
    assert walk(lambda: layer(x), x).files[-1].startswith("kernels/")
    assert walk(lambda: layer(x + 1), x).stays == []
