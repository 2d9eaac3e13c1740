"""First calls inside a capture: the thread's mode is another one in the block, and as before after it."""

import ctypes

import pytest

from gatewise.functional import passes


class FakeDriver:
    """Exchanges the mode of the thread, as the CUDA driver does."""

    def __init__(self):
        self.mode = 0

    def cuThreadExchangeStreamCaptureMode(self, reference):  # noqa: N802
        given = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, given.value = given.value, self.mode


def test_setting_up_is_permitted_in_the_block_only(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(passes, "_driver", lambda: driver)
    with pytest.raises(ZeroDivisionError), passes.first_calls_permitted():
        raise ZeroDivisionError(driver.mode)
    assert driver.mode == 0
    with passes.first_calls_permitted():
        assert driver.mode == passes._RELAXED
    assert driver.mode == 0
    monkeypatch.setattr(passes, "_driver", lambda: None)
    with passes.first_calls_permitted():
        assert driver.mode == 0
