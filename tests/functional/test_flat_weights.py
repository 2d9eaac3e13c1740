"""Telling weights that lie in one buffer from weights that only look so."""

import torch

from gatewise.contract.weights import cudnn_order, in_one_buffer
from gatewise.kernels.cudnn.weight_buffer import weight_buffer


def in_a_buffer(weights):
    ordered = cudnn_order(weights)
    buffer = torch.cat([tensor.flatten() for tensor in ordered])
    parts = buffer.split([tensor.numel() for tensor in ordered])
    views = {id(tensor): part.view(tensor.shape) for tensor, part in zip(ordered, parts, strict=True)}
    return [views[id(tensor)] for tensor in weights], buffer


def test_views_of_one_buffer_in_order():
    module = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2)
    weights = [parameter.detach() for parameter in module.parameters()]
    views, _ = in_a_buffer(weights)
    assert in_one_buffer(views, 5)
    assert not in_one_buffer(weights, 5)


def test_any_other_place_is_told_apart():
    weights = [parameter.detach() for parameter in torch.nn.LSTM(3, 4).parameters()]
    views, buffer = in_a_buffer(weights)
    assert not in_one_buffer([views[1], views[0], *views[2:]], 4)
    assert not in_one_buffer([*views[:3], views[3].clone()], 4)
    shifted = torch.cat([torch.zeros(1), buffer])[1:]
    parts = shifted.split([tensor.numel() for tensor in weights])
    assert not in_one_buffer([part.view(tensor.shape) for part, tensor in zip(parts, weights, strict=True)], 4)


def test_a_layer_without_biases_is_no_buffer_of_its_own_where_others_follow():
    # cuDNN reads two biases behind the matrices, where the buffer of a stack has the matrices of the next layer.
    weights = [parameter.detach() for parameter in torch.nn.LSTM(4, 4, num_layers=2, bias=False).parameters()]
    views, buffer = in_a_buffer([*weights, torch.zeros(2 * 2 * 16)])
    assert in_one_buffer(views[:4], 2)
    assert not in_one_buffer(views[:2], 2)
    found = weight_buffer(views[:2], 2)
    assert torch.equal(found, torch.cat([buffer[: 2 * 64], torch.zeros(2 * 16)]))


def test_neighbours_in_memory_are_not_one_buffer():
    class Neighbour:
        """A tensor that follows the one before it in memory, with a storage of its own."""

        def __init__(self, tensor, address):
            self.nbytes, self.shape, self._tensor, self._address = tensor.nbytes, tensor.shape, tensor, address

        def data_ptr(self):
            return self._address

        def dim(self):
            return self._tensor.dim()

        def numel(self):
            return self._tensor.numel()

        def element_size(self):
            return self._tensor.element_size()

        def is_contiguous(self):
            return True

        def untyped_storage(self):
            return self

    weights, address = [], 512
    for tensor in torch.nn.LSTM(3, 4).parameters():
        weights.append(Neighbour(tensor, address))
        weights[-1].nbytes = tensor.nbytes
        address += tensor.nbytes
    weights[0].untyped_storage = lambda: Storage(512, weights[0].nbytes)
    assert not in_one_buffer(weights, 4)
    weights[0].untyped_storage = lambda: Storage(512, address - 512)
    assert in_one_buffer(weights, 4)


class Storage:
    def __init__(self, address, size):
        self._address, self._size = address, size

    def data_ptr(self):
        return self._address

    def nbytes(self):
        return self._size
