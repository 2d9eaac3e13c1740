"""Signals outside of training, and in it."""

from __future__ import annotations

import signal

import pytest

from gatewise.training.interruption import interruptible, terminable


def test_sigterm_is_ctrl_c_outside_of_training():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_break_off_the_cleanup():
    cleaned = []

    def program():
        with terminable():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
    with terminable(), interruptible() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
