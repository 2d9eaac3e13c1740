"""Factors of the products after the loop, as a schedule hands them on, and what rounding them may cost."""

import itertools

import torch

from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers
from gatewise.kernels.persistent.buffers import states_before
from gatewise.kernels.persistent.launches import Tokens
from gatewise.kernels.persistent.schedules import half_products
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.stack import Layer
from gatewise.testing import relative_error
from tests.kernels.persistent.emulation import write_operands

UNIT = 2.0**-11  # the largest relative error of rounding to TF32, and to float16
LEAST = 2.0**-38  # what more a term may lose, of the largest product of a token's gradient with a value of its column
SIZES = (1.0, 1e9, 1e-9, 1e12, 1e-30)  # of the columns of an input, in turn


class Given:
    """The factors for one direction or two; a test may change them.

    Attributes:
        dgates: The gradients of the gate sums [D, T, B, 4H], H padded.
        x: The input [T, B, I].
        y: The hidden states [T, B, D*H].
        h0: Those before the first step [D, B, H].
        weights: The weights of each direction.
        resets: The steps at which episodes begin [T, B], or None.
    """

    def __init__(self, sizes=(4, 3, 13, 11), directions=1, *, by_row=False, lengths=None, resets=None, device="cpu"):
        time, batch, features, size = sizes
        generator, hidden = torch.Generator().manual_seed(5), hidden_of(size)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.problem = Problem(*sizes, dtype=torch.float32, needs_grad=True, bidirectional=directions == 2)
        self.tokens, self.device = Tokens(time, batch, by_row=by_row), device
        self.lengths, self.resets = lengths, resets
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
        x, y, h0, lengths, resets = map(there, (self.x, self.y, self.h0, self.lengths, self.resets))
        dx = torch.full(self.x.shape, torch.nan, device=self.device).flatten(0, 1)
        shapes = [(own.w_ih.shape, own.w_hh.shape) for own in weights]
        into = [tuple(torch.full(shape, torch.nan, device=self.device) for shape in own) for own in shapes]
        given = (
            self.problem,
            Layer(x, h0, h0, weights, lengths, None, resets=resets),
            y,
            there(self.dgates).clone(),
            lengths,
        )
        half_products.gradients(*given, self.tokens, dx, into, Scratch(x))
        return [own.cpu() for own in (self.tokens.unflat(dx), *itertools.chain(*into))]

    def states_before(self):
        """Return the hidden states that the steps of each direction read [T, B, H]."""
        operands = [
            states_before(own, first, direction)
            for direction, (own, first) in enumerate(
                zip(self.y.split(self.problem.hidden_size, 2), self.h0, strict=True)
            )
        ]
        found = [torch.empty(own.source.shape).flatten(0, 1) for own in operands]
        write_operands(operands, found, self.tokens._replace(by_row=False), self.lengths, self.resets)
        return [own.view(self.x.shape[:2] + own.shape[1:]) for own in found]

    def inputs(self):
        """Return the input with zeros after the end of each sequence."""
        return self.x if self.lengths is None else buffers.zeros_after_ends(self.x, self.lengths)

    def expected(self, function=lambda factor: factor.double()):
        """Return them in float64; the function is applied to both factors of each product."""
        size = self.problem.hidden_size
        dx, others = 0, []
        for own, weights, states in zip(self.dgates, self.weights, self.states_before(), strict=True):
            sums = function(own.unflatten(-1, (4, -1))[..., :size].flatten(-2)).flatten(0, 1)
            dx = dx + (sums @ function(weights.w_ih)).view(self.x.shape)
            others += [sums.t() @ function(factor).flatten(0, 1) for factor in (self.inputs(), states)]
        return [dx, *others]

    def check(self):
        """Hold the results to the errors that rounding factors causes."""
        tokens = self.problem.time * self.problem.batch
        of_x, largest = 0.0, []
        for own, weights, states in zip(self.dgates, self.weights, self.states_before(), strict=True):
            most = largest_of_tokens(own)
            of_x = of_x + 4 * self.problem.hidden_size * most * weights.w_ih.double().abs().amax(0)
            largest += [tokens * (most * factor.double().abs()).amax((0, 1)) for factor in (self.inputs(), states)]
        names = "dx", *[f"d{name}[{n}]" for n in range(len(self.weights)) for name in ("w_ih", "w_hh")]
        sizes = self.expected(lambda factor: factor.double().abs())
        every = zip(names, self.found(), self.expected(), sizes, (of_x, *largest), strict=True)
        for name, found, exact, size, most in every:
            # Both factors of each term are rounded, and the result to float32.
            allowed = 2.01 * UNIT * size + 2 * LEAST * most + 2.0**-149
            share = ((found - exact).abs() / allowed).nan_to_num(torch.inf)
            at = tuple(int(place) for place in torch.unravel_index(share.argmax(), share.shape))
            values = f"{float(found[at]):.9e} instead of {float(exact[at]):.9e}, terms add up to {float(size[at]):.3e}"
            count = int((share > 1).sum())
            assert count == 0, (
                f"{name}{list(at)}: {float(share[at]):.3g} times the allowed error, {values}; {count} wrong"
            )


def of_different_sizes(gradients, values, device="cpu"):
    """Return factors with gradients that differ from token to token, inputs that differ from feature to feature."""
    given = Given(device=device)
    given.dgates *= gradients * torch.logspace(0, -30, 12, base=2).view(4, 3, 1)
    for tensor in (given.x, given.y, given.h0, *given.weights[0][:2]):
        tensor *= values
    given.x *= torch.logspace(0, -20, 13, base=2)
    return given


def with_columns_of_different_size(sizes, directions, device="cpu"):
    """Return factors whose columns are of very different size: inputs, input weights and hidden states."""
    given, (*_, features, size) = Given(sizes, directions, device=device), sizes
    for values in (given.x, *(own.w_ih for own in given.weights)):
        values *= sizes_of_columns(features)
    given.y *= sizes_of_columns(size).repeat(directions)
    given.h0 *= sizes_of_columns(size)
    return given


def sizes_of_columns(count, device="cpu"):
    """Return a size for each of so many columns."""
    return torch.tensor(SIZES, device=device).repeat(count)[:count]


def worst_column(found, exact):
    """Return the largest error of a column of two matrices, relative to the column's largest value."""
    return max(relative_error(one, other) for one, other in zip(found.t(), exact.t(), strict=True))


def largest_of_tokens(values):
    """Return the largest magnitude of each token [T, B, 1], float64."""
    return values.double().abs().amax(-1, keepdim=True)
