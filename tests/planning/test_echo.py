"""Echo's rule: recompute only what releases more than it newly keeps, and no product unless it is nearly free."""

from __future__ import annotations

import dataclasses

import pytest

from gatewise.planning.echo import NEARLY_FREE, admitted
from gatewise.planning.way import Part, Recomputation, Way

USUAL = Way("kept", seconds=1.0, kept=1000)
AGAIN = Way("again", seconds=1.5, kept=100, recomputation=Recomputation(released=900, newly_kept=100))


def names(*ways, step_seconds=10.0):
    return [way.name for way in admitted(Part("part", (USUAL, *ways)), step_seconds)]


def changed(**fields):
    return dataclasses.replace(AGAIN, recomputation=dataclasses.replace(AGAIN.recomputation, **fields))


def test_what_releases_more_than_it_keeps_is_allowed():
    assert names(AGAIN) == ["kept", "again"]


@pytest.mark.parametrize("newly_kept", [900, 901])
def test_what_does_not_is_refused(newly_kept):
    assert names(changed(newly_kept=newly_kept)) == ["kept"]
    assert names(changed(newly_kept=899)) == ["kept", "again"]


def test_a_product_is_repeated_only_where_it_is_nearly_free():
    assert names(changed(product_seconds=10 * NEARLY_FREE)) == ["kept", "again"]
    assert names(changed(product_seconds=10.01 * NEARLY_FREE)) == ["kept"]
    assert names(changed(product_seconds=10.01 * NEARLY_FREE), step_seconds=20.0) == ["kept", "again"]


def test_a_way_that_is_no_slower_needs_no_reason():
    assert names(dataclasses.replace(changed(newly_kept=901), seconds=1.0)) == ["kept", "again"]


def test_a_way_that_repeats_nothing_needs_none_either():
    assert names(dataclasses.replace(AGAIN, recomputation=None)) == ["kept", "again"]


def test_the_first_way_is_always_there():
    assert names(step_seconds=0.0) == ["kept"]
