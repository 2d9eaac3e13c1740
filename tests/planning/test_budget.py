"""Memory budgets as text."""

from __future__ import annotations

import pytest

from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.planning.budget import CONTEXT_BYTES, bytes_of

H200 = Device.named("h200")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("7.5GiB", 15 << 29),
        ("512MiB", 512 << 20),
        ("900 MB", 900 * 10**6),
        ("1TB", 10**12),
        ("123456", 123456),
    ],
)
def test_a_size_is_read(text, count):
    assert bytes_of(text, H200) == count


def test_auto_leaves_a_tenth_and_the_context():
    assert bytes_of("auto", H200) == int(0.9 * H200.memory_bytes) - CONTEXT_BYTES
    assert bytes_of("auto", Device("cpu", "invented", memory_bytes=1000)) == 900
    assert bytes_of("auto", Device("cpu", "invented")) is None


@pytest.mark.parametrize("text", ["", "lots", "8 parsecs", "-1GB", "0GB", "GB", "8GB please", 8e9, 0, None])
def test_anything_else_is_refused(text):
    with pytest.raises(ArgumentError, match=r"`memory_budget` must be 'auto' or a size such as 8GB or 7\.5GiB, got"):
        bytes_of(text, H200)
