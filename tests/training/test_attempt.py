"""The processes of one attempt of torchrun find each other, whatever earlier attempts left in its store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from gatewise.contract.errors import ProcessFailed
from gatewise.training.attempt import attempt_of

COUNT = 3


def names(store, ranks=range(COUNT), seconds=20.0):
    """Return the names that processes find which start at the same time."""
    with ThreadPoolExecutor(COUNT) as pool:
        return [each.result() for each in [pool.submit(attempt_of, store, rank, COUNT, seconds) for rank in ranks]]


def test_all_find_one_name_and_another_in_each_attempt():
    store, found = HashStore(), []
    for _ in range(3):
        together = names(store)
        assert len(set(together)) == 1
        found += together[:1]
    assert len(set(found)) == 3


@pytest.mark.parametrize("late", range(COUNT))
def test_a_process_that_is_late_is_not_replaced_by_its_predecessor(late):
    """The token of the last attempt is still in the store, and the others must not go on with it."""
    store = HashStore()
    (before, *_) = names(store)
    found = {}

    def start(rank):
        found[rank] = attempt_of(store, rank, COUNT, 20.0)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(COUNT) if rank != late]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not found, "they wait"
    start(late)
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == 1
    assert before not in found.values()


def test_a_process_that_ended_while_it_waited_is_left_out():
    store = HashStore()
    with pytest.raises(ProcessFailed):
        attempt_of(store, 1, COUNT, 0.1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attempt_of, store, 0, COUNT, 20.0)
        with pytest.raises(ProcessFailed):
            attempt_of(store, 2, COUNT, 0.3)  # with which rank 0 makes a list that holds the token of the ended rank 1
        assert not first.done()
        found = names(store, ranks=(1, 2))
        assert [first.result(), *found] == [found[0]] * COUNT


def test_a_process_that_never_starts_is_an_error_and_no_hang(capsys):
    with pytest.raises(ProcessFailed, match=r"process 0 must start together with the other 2 processes, .* 0\.2 sec"):
        attempt_of(HashStore(), 0, COUNT, 0.2)
    assert "Read what torchrun printed on every machine" in capsys.readouterr().err
