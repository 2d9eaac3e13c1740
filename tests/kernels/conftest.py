"""Fixtures that run the tests of kernels for every kernel, on the CPU and (marked gpu) on a CUDA device."""

import pytest
import torch

from gatewise import testing
from gatewise.kernels import ALL
from gatewise.testing import check

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
CASES = [case.problem(dtype=dtype) for case in testing.CASES for dtype in DTYPES]


def pytest_collection_modifyitems(config, items):
    """Leave out hundreds of tests that would be skipped: on a CPU, those of kernels that refuse every case there."""
    for_gpus = [kernel for kernel in ALL if all(testing.why_not(kernel, problem, "cpu") for problem in CASES)]

    def left_out(item):
        given = item.callspec.params if hasattr(item, "callspec") and "admitted" in item.fixturenames else {}
        return given.get("device") == "cpu" and given.get("kernel") in for_gpus

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(params=ALL, ids=lambda kernel: kernel.name)
def kernel(request):
    return request.param


@pytest.fixture
def admitted(kernel, device):
    """Return a function that returns a problem if the kernel runs it here, and otherwise skips with the refusals."""

    def check(problem):
        refusals = testing.why_not(kernel, problem, device)
        if refusals:
            pytest.skip(f"{kernel.name} refuses {problem}: {'; '.join(refusals)}")
        return problem

    return check


@pytest.fixture(scope="session")
def known_budgets():
    return {}


@pytest.fixture(scope="module")
def known_oracles():
    return {}


@pytest.fixture
def budgets_once(monkeypatch, known_budgets, known_oracles):
    """Compute a problem's oracle and error budgets once for all kernels; inputs depend on the problem alone."""
    compute, exact_of = check.budgets, check.oracle

    def known(problem, *given):
        if problem not in known_oracles:
            known_oracles[problem] = exact_of(problem, *given)
        return known_oracles[problem]

    def remembered(problem, inputs, gradients, exact, device):
        key = problem, str(device)
        if key not in known_budgets:
            known_budgets[key] = compute(problem, inputs, gradients, exact, device)
        return known_budgets[key]

    monkeypatch.setattr(check, "budgets", remembered)
    monkeypatch.setattr(check, "oracle", known)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """Fill new buffers with NaN, so that an output that is never written fails the test."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])
