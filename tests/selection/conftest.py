"""Measured calls for tests, many of which forget what this process has read of them."""

import functools

import pytest

from gatewise.selection import points

read_once = functools.cache(points.read)


@pytest.fixture(autouse=True)
def each_text_is_read_once(monkeypatch):
    """Read each text once for all tests: it has thousands of calls, which nothing changes."""
    monkeypatch.setattr(points, "read", lambda lines: read_once(tuple(lines)))
