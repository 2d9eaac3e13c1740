"""The comparison of a kernel in float64 with autograd through a loop over the cell's own step."""

from gatewise import testing

_TOLERANCE = 1e-10  # rounding of a few dozen operations, with room for cells that enlarge it
_SMALLEST = 1e-3  # tensors of a smaller norm are compared with this one


def assert_agrees(kernel, problem, tolerance=lambda name: _TOLERANCE):
    """Compare all outputs and gradients of a kernel with float64."""
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(kernel, problem, inputs, gradients))
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert value.isfinite().all(), f"{name} of the reference is not finite"
        error = (found[name] - value).norm() / max(value.norm(), _SMALLEST)
        assert error <= tolerance(name), f"{name}: {error:.3g}"
