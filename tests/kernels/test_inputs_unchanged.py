"""A kernel modifies none of the tensors that it reads, and its outputs share no memory with them."""

import pytest
import torch

from gatewise import testing
from tests.pairwise import one_in


def tensors_of(*groups):
    for group in groups:
        for entry in group:
            yield from (entry if isinstance(entry, tuple) else (entry,))


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_nothing_given_is_written(kernel, case, device, admitted):
    problem = admitted(case.problem())
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    given = [tensor for tensor in tensors_of(inputs, gradients) if tensor is not None]
    copies = [tensor.clone() for tensor in given]
    testing.run_kernel(kernel, problem, inputs, gradients)
    for tensor, copy in zip(given, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_outputs_and_gradients_do_not_share_memory(kernel, case, device, admitted):
    problem = admitted(case.problem())
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    result, found = testing.run_kernel(kernel, problem, inputs, gradients)
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(inputs, gradients) if tensor is not None}
    outputs = [result.y, result.h_n, result.c_n]
    assert not given & {tensor.untyped_storage().data_ptr() for tensor in outputs}
    places = [(tensor.data_ptr(), tensor.numel()) for tensor in (found.x, found.h0, found.c0, *found.weights)]
    assert len({place for place, size in places if size}) == len([place for place, size in places if size])


@pytest.mark.parametrize("form", ["batch first", "every second feature", "expanded"])
def test_inputs_of_any_strides(kernel, form, device, admitted):
    problem = admitted(testing.CASES[0].problem(dtype=torch.float64))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    if form == "expanded":
        inputs = inputs._replace(x=inputs.x[:1].expand_as(inputs.x))
        gradients = gradients._replace(y=gradients.y[:, :, :1].expand_as(gradients.y))
        strided, above = inputs, gradients
    elif form == "batch first":
        strided = inputs._replace(x=inputs.x.transpose(0, 1).contiguous().transpose(0, 1))
        above = gradients._replace(y=gradients.y.transpose(0, 1).contiguous().transpose(0, 1))
    else:
        strided = inputs._replace(x=inputs.x.repeat_interleave(2, -1)[..., ::2])
        above = gradients._replace(y=gradients.y.repeat_interleave(2, -1)[..., ::2])
    expected = testing.named(
        problem,
        *testing.run_kernel(
            kernel, problem, inputs._replace(x=inputs.x.clone()), gradients._replace(y=gradients.y.clone())
        ),
    )
    found = testing.named(problem, *testing.run_kernel(kernel, problem, strided, above))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
