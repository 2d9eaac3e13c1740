"""What every test relies on: no preference from outside, and GPU tests that say why they are skipped."""

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
    # Modules and tests stay to the end: each `gc.collect()` of the tests need not look through all of them again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_preference(monkeypatch):
    for name in ("GATEWISE_KERNEL", "GATEWISE_POLICY", "GATEWISE_CACHE"):
        monkeypatch.delenv(name, raising=False)
