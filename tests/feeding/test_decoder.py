"""The decoder's loop, compared with a plain program that autograd differentiates step by step."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

from gatewise import attention
from gatewise.contract.errors import ArgumentError, DeviceError, KernelRefused, ModifiedInPlace
from gatewise.feeding import LayerWeights, State, Weights, attended_outputs, kernel
from gatewise.feeding.elementwise import Plain
from tests.pairwise import each_value, pairwise

SIZES = {"time": 7, "batch": 5, "source": 6, "units": 8, "embedding": 6, "features": 8, "value_size": 8, "layers": 2}
CASES = {
    "default": {},
    "one layer": {"layers": 1},
    "three layers": {"layers": 3},
    "dot": {"features": 0},
    "layer norm": {"norm": True},
    "odd sizes": {"units": 31, "batch": 3, "embedding": 5, "features": 7, "value_size": 9, "source": 3},
    "ones": {"time": 1, "batch": 1, "source": 1, "units": 1, "embedding": 1, "features": 1, "value_size": 1},
    "one step": {"time": 1},
    "all lengths equal": {"lengths": False},
    "dropout": {"dropout": 0.4},
    "layer dropout": {"layer_dropout": 0.3, "layers": 3},
    "both": {"dropout": 0.25, "layer_dropout": 0.5, "features": 0},
}


class Call:
    """Return random arguments with mean zero, large enough to leave the linear range of the activations."""

    def __init__(self, dtype=torch.float64, seed=0, **options):
        sizes = SIZES | options
        self.dropout, self.layer_dropout = sizes.get("dropout", 0.0), sizes.get("layer_dropout", 0.0)
        generator = torch.Generator().manual_seed(seed)

        def new(*shape, scale=1.0):
            numbers = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return numbers.to(dtype).requires_grad_()

        time, batch, source, units = (sizes[name] for name in ("time", "batch", "source", "units"))
        features = sizes["features"]
        self.embedded = new(time, batch, sizes["embedding"])
        self.state = State(new(sizes["layers"], batch, units), new(sizes["layers"], batch, units), new(batch, units))
        self.values = new(source, batch, sizes["value_size"])
        self.keys = new(source, batch, features or units)
        self.lengths = (
            torch.randint(1, source + 1, (batch,), generator=generator) if sizes.get("lengths", True) else None
        )
        inputs = [sizes["embedding"] + units, *[units] * (sizes["layers"] - 1)]
        gates = 4 * units
        self.weights = Weights(
            tuple(
                LayerWeights(
                    new(gates, size, scale=size**-0.5), new(gates, units, scale=units**-0.5), new(gates), new(gates)
                )
                for size in inputs
            ),
            new(features, units, scale=2 * units**-0.5) if features else None,
            new(units, units + sizes["value_size"], scale=(units + sizes["value_size"]) ** -0.5),
            new(features, scale=2.0) if features else None,
            new(features) if sizes.get("norm") else None,
            new(features) if sizes.get("norm") else None,
        )  # fmt: skip
        self.dy = torch.randn(time, batch, units, generator=generator, dtype=torch.float64).to(dtype)

    @property
    def leaves(self):
        layers = {f"{name}_{n}": each for n, layer in enumerate(self.weights.layers)
                  for name, each in zip(("w_ih", "w_hh", "b_ih", "b_hh"), layer, strict=True)}  # fmt: skip
        rest = self.weights._asdict() | {f"first {name}": each for name, each in self.state._asdict().items()}
        named = layers | rest | {"embedded": self.embedded, "keys": self.keys, "values": self.values}
        return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}

    def results(self, outputs):
        names, leaves = zip(*self.leaves.items(), strict=True)
        gradients = torch.autograd.grad(outputs, leaves, self.dy.to(outputs.dtype))
        return {"outputs": outputs.detach()} | dict(zip(names, gradients, strict=True))

    def run(self, *, seeded=True, **options):
        if seeded:
            torch.manual_seed(1)
        return attended_outputs(
            self.embedded, self.state, self.keys, self.values, self.lengths, self.weights,
            dropout=self.dropout, layer_dropout=self.layer_dropout, **options,
        )  # fmt: skip

    def plain(self):
        """Run the program of the docstring with the dropout masks of the call."""
        torch.manual_seed(1)
        weights, (hidden, cell, attended) = self.weights, self.state
        hidden, cell, outputs = list(hidden), list(cell), []

        def mask(probability):
            if not probability:
                return torch.ones_like(self.dy)
            kept = torch.empty_like(self.dy, dtype=torch.bool).bernoulli_(1 - probability)
            return kept.to(self.dy.dtype) / (1 - probability)

        of_outputs = mask(self.dropout)
        between = [mask(self.layer_dropout) for _ in hidden[1:]]
        for step, x in enumerate(self.embedded):
            below = torch.cat([x, attended], -1)
            for layer, own in enumerate(weights.layers):
                hidden[layer], cell[layer] = torch.lstm_cell(below, (hidden[layer], cell[layer]), *own)
                below = hidden[layer] * between[layer][step] if layer + 1 < len(hidden) else hidden[layer]
            query = below if weights.query is None else functional.linear(below, weights.query)
            context = attention.attend(
                query, self.keys, self.values, self.lengths,
                score="dot" if weights.query is None else "additive",
                v=weights.v, norm_weight=weights.norm_weight, norm_bias=weights.norm_bias, kernel="reference",
            )  # fmt: skip
            attended = functional.linear(torch.cat([below, context], -1), weights.attended).tanh() * of_outputs[step]
            outputs.append(attended)
        return torch.stack(outputs)


def compare(found, wanted, rtol, atol):
    for name, expected in wanted.items():
        torch.testing.assert_close(
            found[name], expected, rtol=rtol, atol=atol * max(1.0, expected.abs().max().item()),
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


PARTS = "torch", "launches"


@pytest.fixture(params=PARTS)
def parts(request):
    if request.param == "launches":
        request.getfixturevalue("launches_on_cpu")


# Recomputation and the implementation of element-wise operations are independent; every case is run with both.
@pytest.mark.parametrize(
    ("case", "recompute", "parts"), each_value(pairwise([*CASES], [False, True], PARTS)), indirect=["parts"]
)
def test_outputs_and_gradients_agree_with_the_plain_program(case, recompute, parts):
    call = Call(**CASES[case])
    wanted = call.results(call.plain())
    if call.weights.v is not None and call.lengths is None:
        assert wanted["keys"].abs().max() > 0
    compare(call.results(call.run(recompute=recompute)), wanted, 1e-9, 1e-10)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("kernel", ["reference", "recompute"])
def test_every_attention_kernel_agrees(kernel):
    call = Call()
    compare(call.results(call.run(attention_kernel=kernel)), call.results(call.plain()), 1e-9, 1e-10)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("recompute", [False, True])
def test_float32_is_as_accurate_as_the_plain_program(recompute):
    call, exact = Call(torch.float32), Call(torch.float64)
    wanted, plain = exact.results(exact.plain()), call.results(call.plain())
    found = call.results(call.run(recompute=recompute))
    for name, expected in wanted.items():
        budget = 4 * (plain[name] - expected).norm() + 1e-6 * expected.norm()
        assert (found[name] - expected).norm() <= budget, name


OPTIONS = {}, {"layers": 3, "dropout": 0.3, "layer_dropout": 0.3}, {"norm": True}


@pytest.mark.parametrize(
    ("options", "recompute", "parts"), each_value(pairwise(OPTIONS, [False, True], PARTS)), indirect=["parts"], ids=str
)
def test_operands_in_float16_err_as_ten_bits_do(options, recompute, parts, monkeypatch):
    monkeypatch.setattr(type(kernel.eager), "halves", lambda *_: True)
    call, exact = Call(torch.float32, **options), Call(torch.float64, **options)
    with torch.no_grad():  # gradients far below and above the range of float16
        call.dy *= torch.tensor([1e-9, 1.0, 1e4, 1e-20, 0.0])[:, None]
        exact.dy.copy_(call.dy)
    wanted, found = exact.results(exact.plain()), call.results(call.run(recompute=recompute))
    for name, expected in wanted.items():
        assert (found[name] - expected).norm() <= 10 * 2.0**-11 * expected.norm(), name
    for name in ("embedded", "keys", "first cell"):
        for row in range(4):
            expected = wanted[name][:, row]
            assert (found[name][:, row] - expected).norm() <= 20 * 2.0**-11 * expected.norm(), (name, row)
        assert not found[name][:, 4].any()


@pytest.mark.parametrize("recompute", [False, True])
def test_under_autocast_errors_are_no_larger_than_those_of_the_plain_program(recompute):
    call, exact = Call(torch.float32), Call(torch.float64)
    wanted = exact.results(exact.plain())
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = call.plain(), call.run(recompute=recompute)
    assert found.dtype == torch.bfloat16
    plain, found = call.results(plain), call.results(found)
    for name, expected in wanted.items():
        assert (found[name] - expected).norm() <= 2 * (plain[name] - expected).norm() + 0.02 * expected.norm(), name


def test_without_gradients_nothing_is_kept_and_the_outputs_are_the_same():
    call = Call(dropout=0.3)
    with torch.no_grad():
        alone = call.run()
    assert alone.grad_fn is None
    torch.testing.assert_close(alone, call.run())


def test_a_mask_drops_and_scales():
    call, without = Call(dropout=0.5), Call()
    found = call.run()
    assert 0.3 < (found == 0).double().mean() < 0.7
    assert not torch.equal(found, without.run())
    assert found.abs().max() > 1


def test_a_second_backward_pass_is_refused_with_advice():
    call = Call()
    found = call.run().sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the decoder again"):
        found.backward()


def test_a_nan_stays_in_its_row():
    call = Call()
    clean = call.run()
    with torch.no_grad():
        call.values[0, 2] = torch.nan
    found = call.run()
    assert found[:, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[:, others], clean[:, others])


def test_no_step_is_refused():
    call = Call()
    call.embedded = call.embedded[:0]
    with pytest.raises(ArgumentError, match="at least one step"):
        call.run()


def test_an_unknown_attention_kernel_is_refused():
    with pytest.raises(KernelRefused):
        Call().run(attention_kernel="fastest")


def test_without_a_gpu_the_parts_are_plain_torch():
    seen = []

    class Seen(Plain):
        def cell(self, *args, **options):
            seen.append(args)
            super().cell(*args, **options)

    call = Call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "Plain", Seen)
        call.run()
    assert len(seen) == 2 * 7


def test_an_in_place_change_before_the_backward_pass_is_an_error():
    call = Call()
    outputs = call.run()
    outputs.mul_(2)
    with pytest.raises(ModifiedInPlace, match="`the output` must be as the decoder returned it, got one modified by"):
        outputs.sum().backward()
    call = Call()
    outputs = call.run()
    call.lengths.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
    call.run().sum().backward()


def test_a_second_derivative_is_refused_and_the_first_follows():
    call = Call()
    outputs = call.run()
    with pytest.raises(RuntimeError, match=r"A decoder with input feeding is differentiable once, .* A model without"):
        torch.autograd.grad(outputs, [call.keys], call.dy, create_graph=True)
    compare(call.results(outputs), call.results(call.plain()), 1e-7, 1e-9)


def test_transforms_of_functions_and_forward_mode_are_refused():
    call = Call()

    def outputs(embedded):
        call.embedded = embedded
        return call.run().sum()

    given = call.embedded
    message = "neither inside of torch.func's transforms nor in forward mode. A model without"
    for transformed in (torch.func.grad(outputs), lambda each: torch.vmap(outputs)(torch.stack([each]))):
        with pytest.raises(RuntimeError, match=message):
            transformed(given.detach())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        outputs(forward_ad.make_dual(given.detach(), torch.ones_like(given)))


def test_a_device_that_computes_nothing_is_named():
    call = Call()
    call.embedded = call.embedded.to("meta")
    with pytest.raises(DeviceError, match="`device` must be a CPU or CUDA device, got 'meta'"):
        call.run()


@pytest.mark.parametrize("where", ["dropout", "layer_dropout"])
@pytest.mark.parametrize("value", [1.0, -0.1, float("nan")])
def test_what_is_no_probability_below_1_is_refused(where, value):
    with pytest.raises(ArgumentError, match=rf"`{where}` must be a probability in \[0, 1\), got {value}"):
        Call(**{where: value}).run()
