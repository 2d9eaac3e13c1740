"""Signals outside of training, and in it."""

from __future__ import annotations

import signal

import pytest

from gatewise.training.interruption import interruptible, terminable


def test_sigterm_is_ctrl_c_outside_of_training():
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []
    with pytest.raises(KeyboardInterrupt), terminable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_is_there_stays():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with terminable():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_in_training_the_first_sigterm_is_a_request_and_the_second_ends_the_program():
    with pytest.raises(KeyboardInterrupt), terminable(), interruptible() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        signal.raise_signal(signal.SIGTERM)
