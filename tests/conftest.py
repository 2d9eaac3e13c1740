"""Settings for all tests: no preferences from the environment, and GPU tests that state why they are skipped."""

import gc

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; run with `make gpu-test` on a machine that has one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish(session):
    # Modules and tests live until the end, so `gc.collect()` in tests need not inspect all of them again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_preference(monkeypatch):
    for name in ("GATEWISE_KERNEL", "GATEWISE_POLICY", "GATEWISE_CACHE"):
        monkeypatch.delenv(name, raising=False)
