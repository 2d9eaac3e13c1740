"""Settings for all tests: no preferences from the environment, and GPU tests that state why they are skipped."""

import gc
import os
import types

import pytest
from _pytest.runner import runtestprotocol

# What Inductor generates is PyTorch's to test. Otherwise each process that compiles with it compiles six programs to
# find out what vector instructions the machine has, and starts processes to compile in.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # Nearly all that collecting makes lives until the end; looking for garbage would take a quarter of the time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Do not make tests that `-m` would leave out again: of `make test`'s, that would be two of three.

    Of a function without other tests one is left for `-m`, because pytest would call it without its parameters. Tests
    that are named are made, so that pytest finds them.
    """
    yield
    given = metafunc.config.option
    words = given.markexpr.split(" and ")
    simple = all(word.startswith("not ") and word[4:].isidentifier() for word in words)
    if not simple or any("::" in path for path in given.file_or_dir):
        return
    left_out = {word.removeprefix("not ").strip() for word in words}
    always = not left_out.isdisjoint(mark.name for mark in metafunc.definition.iter_markers())
    calls = metafunc._calls
    calls[:] = [
        call for call in calls if not always and left_out.isdisjoint(mark.name for mark in call.marks)
    ] or calls[:1]


def pytest_collection_modifyitems(items):
    import torch  # not in the process that only distributes the tests

    from tests.compilers import knows

    # For each node of a graph PyTorch would collect the lines that made it.
    torch.fx.config.do_not_emit_stack_traces = True
    # Files with slow tests come first, so that none of them is left to one worker at the end.
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        architecture = item.callspec.params.get("architecture") if hasattr(item, "callspec") else None
        if isinstance(architecture, str) and not knows(architecture):
            item.add_marker(pytest.mark.skip(reason=f"the installed NVRTC does not know {architecture}"))
    if torch.cuda.is_available():
        return
    # Each `torch.manual_seed` would format the stack three times, for an error of the first call on a device.
    for module in (torch.cuda, torch.xpu, torch.mtia):
        module.traceback = types.SimpleNamespace(format_stack=list)
    skip = pytest.mark.skip(reason="needs a CUDA device; run with `make gpu-test` on a machine that has one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish(session):
    # Modules and tests live until the end, so `gc.collect()` in tests need not inspect all of them again. Looking for
    # garbage among them first would take two seconds, and frees nothing.
    gc.freeze()
    # Looking for garbage by itself every 700 objects would take 3 to 4 % of the time of the tests.
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Let a worker of xdist report of each test one thing, unless it fails: reports of all phases take milliseconds."""
    options = item.config.option
    if not hasattr(item.config, "workerinput") or options.durations or options.xmlpath:
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Spare `gc.collect()` what modules have loaded since, such as those of `torch.compile`."""
    gc.freeze()


@pytest.fixture
def passes_alone(monkeypatch):
    """Let `eager` compute all calls by its passes, which tests replace by others."""
    from gatewise.functional.plan import plan_of
    from gatewise.kernels.eager import eager

    plan_of.cache_clear()
    monkeypatch.setattr(type(eager), "operator", lambda self, problem, device: None)
    yield
    plan_of.cache_clear()


@pytest.fixture(autouse=True)
def no_preference(monkeypatch):
    for name in ("GATEWISE_KERNEL", "GATEWISE_POLICY", "GATEWISE_CACHE"):
        monkeypatch.delenv(name, raising=False)
