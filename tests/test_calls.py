import gc

import pytest

from tests.calls import profile


def test_what_garbage_collection_calls_is_not_noted():
    called = []

    def callback(phase, info):
        called.append(phase)

    def allocate():
        return [[] for _ in range(20 * gc.get_threshold()[0])]

    gc.callbacks.append(callback)
    seen = []
    try:
        profile(allocate, lambda frame, event, argument: seen.append(frame.f_code))
        assert allocate.__code__ in seen
        assert callback.__code__ not in seen
        allocate()
        assert called  # this many lists do start a collection
    finally:
        gc.callbacks.remove(callback)


def test_the_collector_runs_again_also_after_an_error():
    with pytest.raises(KeyError):
        profile(lambda: {}["missing"], lambda *arguments: None)
    assert gc.isenabled()
