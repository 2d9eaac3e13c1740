"""Factors of the products after the loop, as a schedule hands them on, and what rounding them may cost."""

import itertools

import torch

from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.factors import products
from gatewise.kernels.factors.padding import hidden_of
from gatewise.kernels.factors.tokens import Tokens
from gatewise.kernels.stack import Layer

UNIT = 2.0**-11  # the largest relative error of rounding to TF32, and to float16
LEAST = 2.0**-38  # what more a term may lose, of the product of the largest values


def widened(mm, left, right, out=None, bias=None):
    """What a GPU computes: products of float16 numbers are exact, and added up in float32, here in float64."""
    if out is None or out.dtype == left.dtype:
        return mm(left, right, out, bias)
    assert left.dtype == right.dtype == torch.float16
    return out.copy_(left.double() @ right.double())


class Given:
    """The factors for one direction or two; a test may change them.

    Attributes:
        dgates: The gradients of the gate sums [D, T, B, 4H], H padded.
        x: The input [T, B, I].
        y: The hidden states [T, B, D*H].
        h0: Those before the first step [D, B, H].
        weights: The weights of each direction.
    """

    def __init__(self, sizes=(4, 3, 13, 11), directions=1, *, by_row=False, lengths=None, device="cpu"):
        time, batch, features, size = sizes
        generator, hidden = torch.Generator().manual_seed(5), hidden_of(size)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.problem = Problem(*sizes, dtype=torch.float32, needs_grad=True, bidirectional=directions == 2)
        self.tokens, self.lengths, self.device = Tokens(time, batch, by_row=by_row), lengths, device
        self.dgates = self.tokens.new(torch.empty(0), directions, width=4 * hidden)
        self.dgates.copy_(normal(directions, time, batch, 4 * hidden))
        self.dgates.unflatten(-1, (4, hidden))[..., size:] = 0
        for row, length in enumerate(() if lengths is None else lengths):
            self.dgates[:, length:, row] = 0
        self.x = normal(time, batch, features)
        self.y, self.h0 = normal(time, batch, directions * size), normal(directions, batch, size)
        matrices = [(normal(4 * size, features), normal(4 * size, size)) for _ in range(directions)]
        self.weights = [DirectionWeights(*own, None, None) for own in matrices]

    def found(self):
        """Return the gradients of x, and of both matrices of each direction."""

        def there(tensor):
            return None if tensor is None else tensor.to(self.device)

        weights = [DirectionWeights(there(own.w_ih), there(own.w_hh), None, None) for own in self.weights]
        x, y, h0, lengths = map(there, (self.x, self.y, self.h0, self.lengths))
        dx = torch.full(self.x.shape, torch.nan, device=self.device).flatten(0, 1)
        into = [(torch.full_like(own.w_ih, torch.nan), torch.full_like(own.w_hh, torch.nan)) for own in weights]
        given = self.problem, Layer(x, h0, h0, weights, lengths, None), y, there(self.dgates).clone(), lengths
        products.gradients(*given, self.tokens, dx, into, Scratch(x))
        return [own.cpu() for own in (self.tokens.unflat(dx), *itertools.chain(*into))]

    def expected(self, function=lambda factor: factor.double()):
        """Return them in float64; the function is applied to both factors of each product."""
        size = self.problem.hidden_size
        before = [
            torch.cat([first[None], own[:-1]]) if direction == 0 else torch.cat([own[1:], first[None]])
            for direction, (own, first) in enumerate(zip(self.y.split(size, 2), self.h0, strict=True))
        ]
        dx, others = 0, []
        for own, weights, states in zip(self.dgates, self.weights, before, strict=True):
            sums = function(own.unflatten(-1, (4, -1))[..., :size].flatten(-2)).flatten(0, 1)
            dx = dx + (sums @ function(weights.w_ih)).view(self.x.shape)
            others += [sums.t() @ function(factor).flatten(0, 1) for factor in (self.x, states)]
        return [dx, *others]

    def check(self):
        """Hold the results to the errors that rounding factors causes."""
        states = torch.cat([self.y.flatten(), self.h0.flatten()])
        of_x, largest = 0.0, []
        for own, weights in zip(self.dgates, self.weights, strict=True):
            most = float(own.abs().max())
            of_x += most * float(weights.w_ih.abs().max())
            largest += [most * float(factor.abs().max()) for factor in (self.x, states)]
        tokens = self.problem.time * self.problem.batch
        counts = [4 * self.problem.hidden_size, *[tokens] * len(largest)]
        sizes = self.expected(lambda factor: factor.double().abs())
        every = zip(self.found(), self.expected(), sizes, (of_x, *largest), counts, strict=True)
        for found, exact, size, most, count in every:
            # Both factors of each term are rounded, and the result to float32.
            allowed = 2.01 * UNIT * size + 2 * count * LEAST * most + 2.0**-149
            assert ((found - exact).abs() <= allowed).all()
            assert found.isfinite().all()
