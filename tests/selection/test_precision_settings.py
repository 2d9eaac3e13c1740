"""The TF32 setting in effect: PyTorch's older setting and its newer one."""

import pytest
import torch

from gatewise import LSTM, explain
from gatewise.contract.device import tf32_allowed, tf32_products_allowed

newer = pytest.mark.skipif(
    not hasattr(getattr(torch.backends.cudnn, "rnn", None), "fp32_precision"),
    reason="this PyTorch has only the older setting",
)


@pytest.mark.parametrize("allowed", [True, False])
def test_the_older_setting(allowed):
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        assert tf32_allowed() == allowed
        assert explain(LSTM(4, 8), (2, 3, 4), device="h200").problem.allow_tf32 == allowed


@newer
@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("ieee", False)])
def test_the_newer_setting(precision, allowed):
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    rnn.fp32_precision = precision  # monkeypatch would delete it at the end, which PyTorch 2.9 refuses
    try:
        assert tf32_allowed() == allowed
    finally:
        rnn.fp32_precision = before


@pytest.fixture(params=["allow_tf32", pytest.param("fp32_precision", marks=newer)])
def setting(request):
    """A setting of matrix products, which is restored at the end of the test."""
    before = getattr(torch.backends.cuda.matmul, request.param)
    yield request.param
    setattr(torch.backends.cuda.matmul, request.param, before)


@pytest.mark.parametrize("allowed", [True, False])
def test_matrix_products_have_settings_of_their_own(setting, allowed):
    value = allowed if setting == "allow_tf32" else "tf32" if allowed else "ieee"
    setattr(torch.backends.cuda.matmul, setting, value)
    with torch.backends.cudnn.flags(allow_tf32=not allowed):
        assert tf32_products_allowed() == allowed
        assert tf32_allowed() != allowed
