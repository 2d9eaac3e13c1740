"""Which words of a recording follow which tensor: found from two recordings, or refused."""

import pytest

from gatewise.kernels.cuda.nodes import Words
from gatewise.kernels.cuda.relocation import Place, Spans, places

A, B, C = 0x7F0000000000, 0x7F0000010000, 0x7F0000020000
SPANS = Spans((A, B, 0, C), (0x1000, 0x1000, 0, 0x100))
FAR = 0x500000


def nodes(*words, identity="kernel", has_gaps=False):
    return [Words(tuple(each), identity, has_gaps) for each in words]


def found(here, there, starts, spans=SPANS):
    return places(nodes(*here), spans, nodes(*there), starts)


def test_words_follow_the_tensor_that_moved():
    here, there = [[A, 7, B + 8], [A + 64, C]], [[A + FAR, 7, B + 8], [A + 64 + FAR, C]]
    assert found(here, there, (A + FAR, B, 0, C)) == {Place(0, 0): 0, Place(1, 0): 0}


def test_two_that_moved_alike_are_told_apart():
    here, there = [[A, B + 16]], [[A + FAR, B + 16 + FAR]]
    assert found(here, there, (A + FAR, B + FAR, 0, C)) == {Place(0, 0): 0, Place(0, 1): 1}


def test_the_end_of_a_tensor_is_told_by_its_distance():
    assert found([[A + 0x1000]], [[A + 0x1000 + FAR]], (A + FAR, B + 2 * FAR, 0, C)) == {Place(0, 0): 0}
    assert "word 0 of node 0" in found([[A + 0x2000]], [[A + 0x2000 + FAR]], (A + FAR, B + FAR, 0, C))


def test_a_number_that_looks_like_an_address_stays():
    assert found([[A, A + 8]], [[A + FAR, A + 8]], (A + FAR, B, 0, C)) == {Place(0, 0): 0}


@pytest.mark.parametrize("word", [A + 1, (A >> 4) + FAR, A + 2 * FAR])
def test_any_other_difference_is_refused(word):
    assert "word 1 of node 0" in found([[A, A]], [[A + FAR, word]], (A + FAR, B, 0, C))


def test_gaps_may_hold_anything_but_addresses_are_found_among_them():
    here, there = [[A, 5, B + 8, 0x7F1234567890]], [[A + FAR, 6, B + FAR, 0x7F1234000000]]
    starts = A + FAR, B, 0, C
    assert isinstance(found(here, there, starts), str)
    assert places(nodes(*here, has_gaps=True), SPANS, nodes(*there, has_gaps=True), starts) == {Place(0, 0): 0}


def test_other_kernels_are_refused():
    assert isinstance(places(nodes([A]), SPANS, nodes([A], identity="other"), SPANS.starts), str)
    assert isinstance(places(nodes([A]), SPANS, nodes([A], [A]), SPANS.starts), str)


def test_tensors_that_begin_at_one_address_are_one():
    spans = Spans((A, A, B), (16, 16, 16))
    assert places(nodes([A, B]), spans, nodes([A + FAR, B]), (A + FAR, A + FAR, B)) == {Place(0, 0): 0}


def test_spans_that_overlap():
    assert SPANS.are_apart()
    assert Spans((A, A, B), (16, 32, 16)).are_apart()
    assert Spans((A, A + 16), (16, 16)).are_apart()
    assert not Spans((A, A + 16), (17, 16)).are_apart()
    assert not Spans((A + 16, A), (16, 32)).are_apart()
