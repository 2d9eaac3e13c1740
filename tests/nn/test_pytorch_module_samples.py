"""PyTorch's own samples of LSTM, GRU, RNN and their cells, from its module database, checked as its tests do."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gatewise.nn
from tests.pairwise import exhaustive_unless

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")

OURS = {
    nn.LSTM: gatewise.nn.LSTM,
    nn.LSTMCell: gatewise.nn.LSTMCell,
    nn.GRU: gatewise.nn.GRU,
    nn.GRUCell: gatewise.nn.GRUCell,
    nn.RNN: gatewise.nn.RNN,
    nn.RNNCell: gatewise.nn.RNNCell,
}
DTYPES = [torch.float32, torch.float64]

each_entry = pytest.mark.parametrize("entry", OURS, ids=lambda kind: kind.__name__, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_dtype_and_mode = pytest.mark.parametrize(
    ("dtype", "training"),
    exhaustive_unless([(torch.float32, True), (torch.float64, False)], itertools.product(DTYPES, [True, False])),
    ids=str,
)


@pytest.fixture(scope="module")
def database():
    """PyTorch's database by the classes of modules, which only the process that tests it imports, for seconds."""
    from torch.testing._internal.common_modules import module_db

    # PyTorch's test helpers freeze the backend flags of the whole process when they are imported; other tests set them.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return {entry.module_cls: entry for entry in module_db}


@pytest.fixture
def entry(request, database):
    return database[request.param]


def every(step):
    """Return a mark for the turns of every so many samples.

    Options of samples have two values each, so that those of one turn have all of them; cells have few samples.
    """
    turns = [pytest.param((turn, step), marks=pytest.mark.exhaustive if turn else ()) for turn in range(step)]
    return pytest.mark.parametrize("turn", turns, ids=lambda turn: str(turn[0]))


def test_the_database_has_both(database):
    assert database.keys() >= OURS.keys()


def samples(entry, dtype, training, requires_grad=False):
    """Return our module, the arguments of its call and PyTorch's reference function, for every sample."""
    found = entry.module_inputs_func(entry, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)
    for sample in found:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = OURS[entry.module_cls](*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module.to("cpu").to(dtype).train(training)
        yield module, sample


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@each_entry
@each_dtype_and_mode
def test_forward_equals_the_reference(entry, dtype, training):
    count = 0
    for module, sample in samples(entry, dtype, training):
        call = sample.forward_input
        with torch.random.fork_rng(devices=[]):
            outputs = module(*call.args, **call.kwargs)
        expected = sample.reference_fn(module, *call.args, **call.kwargs)
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        count += 1
    assert count


@each_entry
@each_dtype
def test_forward_equals_the_class_of_torch(entry, dtype):
    for module, sample in samples(entry, dtype, training=True):
        theirs = entry.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        theirs.load_state_dict(module.state_dict())
        call = sample.forward_input
        torch.testing.assert_close(module(*call.args, **call.kwargs), theirs(*call.args, **call.kwargs))


@each_entry
@each_dtype
def test_factory_arguments(entry, dtype):
    for _, sample in samples(entry, dtype, training=True):
        constructor = sample.constructor_input
        module = OURS[entry.module_cls](*constructor.args, **constructor.kwargs, device="cpu", dtype=dtype)
        assert {(str(p.device), p.dtype) for p in module.parameters()} == {("cpu", dtype)}


@each_entry
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["train", "eval"])
def test_pickle(entry, training):
    for module, sample in samples(entry, torch.float32, training):
        call = sample.forward_input
        with torch.random.fork_rng(devices=[]):
            expected = module(*call.args, **call.kwargs)
        with io.BytesIO() as file:
            torch.save(module, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        with torch.random.fork_rng(devices=[]):
            torch.testing.assert_close(other(*call.args, **call.kwargs), expected, rtol=0, atol=0)


@each_entry
def test_repr_and_str(entry):
    for module, _ in samples(entry, torch.float32, training=True):
        assert repr(module) == str(module)
        assert type(module).__name__ in repr(module)


@each_entry
def test_save_and_load_state_dict(entry):
    for module, sample in samples(entry, torch.float32, training=True):
        other = OURS[entry.module_cls](*sample.constructor_input.args, **sample.constructor_input.kwargs)
        other.load_state_dict(module.state_dict())
        call = sample.forward_input
        torch.testing.assert_close(other(*call.args, **call.kwargs), module(*call.args, **call.kwargs))


def noncontiguous(tree):
    def spread(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.numel() <= 1:
            return leaf
        wide = torch.repeat_interleave(leaf.detach(), 2, dim=-1)[..., ::2]
        return wide.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(spread, tree)


# Strides are the same in each dtype and mode.
@each_entry
@pytest.mark.parametrize(
    ("dtype", "training"),
    exhaustive_unless([(torch.float64, True)], itertools.product(DTYPES, [True, False])),
    ids=str,
)
def test_noncontiguous_inputs_and_parameters(entry, dtype, training):
    for module, sample in samples(entry, dtype, training, requires_grad=True):
        call = sample.forward_input

        def outcome(args, module=module):
            module.zero_grad()
            for leaf in tensors(args):
                leaf.grad = None
            outputs = tensors(module(*args))
            sum(output.sum() for output in outputs).backward()
            gradients = [leaf.grad for leaf in tensors(args)] + [p.grad.clone() for p in module.parameters()]
            return [output.detach() for output in outputs], gradients

        expected = outcome(call.args)
        torch.testing.assert_close(outcome(noncontiguous(call.args)), expected, rtol=1e-5, atol=1e-5)
        for parameter in module.parameters():
            parameter.data = noncontiguous(parameter.data)
        torch.testing.assert_close(outcome(noncontiguous(call.args)), expected, rtol=1e-5, atol=1e-5)


def check_gradients(check, entry, turn, left_out=lambda module: False):
    found = [each for each in samples(entry, torch.float64, True, requires_grad=True) if not left_out(each[0])]
    first, step = turn
    if first and len(found) <= step:
        pytest.skip("all samples are checked at once")
    for module, sample in found[first::step] if len(found) > step else found:
        args = sample.forward_input.args
        leaves, structure = pytree.tree_flatten(args)
        parameters = dict(module.named_parameters())

        def call(*flat, module=module, structure=structure, names=tuple(parameters)):
            count = len(flat) - len(names)
            given = pytree.tree_unflatten(list(flat[:count]), structure)
            weights = dict(zip(names, flat[count:], strict=True))
            with torch.random.fork_rng(devices=[]):
                return tuple(tensors(torch.func.functional_call(module, weights, given)))

        assert check(call, (*leaves, *parameters.values()), nondet_tol=entry.gradcheck_nondet_tol)


@each_entry
@every(9)
def test_gradcheck(entry, turn):
    # In training: test_if_train_and_eval_modes_differ shows that evaluation has the same results.
    from torch.testing._internal.common_utils import gradcheck

    check_gradients(gradcheck, entry, turn)


@each_entry
@every(9)
def test_gradgradcheck(entry, turn):
    from torch.testing._internal.common_utils import gradgradcheck

    # The samples have no batch, so that those with `batch_first` are the others once more; that it is the same in
    # evaluation is the next test.
    assert entry.supports_gradgrad
    check_gradients(gradgradcheck, entry, turn, left_out=lambda module: getattr(module, "batch_first", False))


@each_entry
def test_if_train_and_eval_modes_differ(entry):
    # The database says whether they may; its samples have no dropout, so results are the same and the flag is free.
    for module, sample in samples(entry, torch.float32, training=True):
        call = sample.forward_input
        trained = module(*call.args, **call.kwargs)
        torch.testing.assert_close(module.eval()(*call.args, **call.kwargs), trained)


@each_entry
def test_deepcopy(entry):
    for module, sample in samples(entry, torch.float32, training=True):
        call = sample.forward_input
        torch.testing.assert_close(
            copy.deepcopy(module)(*call.args, **call.kwargs), module(*call.args, **call.kwargs), rtol=0, atol=0
        )


@each_entry
@each_dtype
def test_errors_are_raised_in_the_same_situations(entry, dtype):
    found = entry.module_error_inputs_func(entry, device="cpu", dtype=dtype, requires_grad=False, training=False)
    assert found
    for sample in found:
        given = sample.module_error_input
        args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
        at_construction = sample.error_on.name == "CONSTRUCTION_ERROR"
        raises = pytest.raises(sample.error_type, match=r"^`\w+(\[\d\])?` must be .*, got ")
        with raises if at_construction else contextlib.nullcontext():
            module = OURS[entry.module_cls](*args, **kwargs)
        if not at_construction:
            with raises:
                module(*given.forward_input.args, **given.forward_input.kwargs)
