"""Markers in text that arrives in pieces."""

import tracemalloc

import pytest

from serve.text.markers import MarkerSet


@pytest.mark.parametrize("markers", [("<a", "<a>"), ("<a>", "<a")])
def test_the_longest_marker_is_waited_for(markers):
    found = MarkerSet(markers)
    assert found.search("x<a") == (1, None)
    assert found.search("x<a", final=True) == (1, "<a")
    assert found.search("x<a>") == (1, "<a>")
    assert found.search("x<a!") == (1, "<a")


def test_the_leftmost_marker_comes_first_and_the_end_waits():
    found = MarkerSet(("<a>", "<bc>"))
    assert found.search("1<bc>2<a>") == (1, "<bc>")
    assert found.search("1<bc>2<a>", start=5) == (6, "<a>")
    assert found.search("1<bc>2<a>3<b", start=9) == (10, None)
    assert found.search("1<bc>2<a>3<b", start=9, final=True) == (12, None)
    assert [found.held(text) for text in ("", "x", "<", "x<b", "<bc", "<bc>")] == [0, 0, 1, 2, 3, 0]


def test_an_empty_set_finds_nothing():
    assert MarkerSet(()).search("<a>") == (3, None)
    assert MarkerSet(()).held("<") == 0


def test_replace():
    assert MarkerSet(("<a>", "<a>b")).replace("x<a>b<a>", str.upper) == "x<A>B<A>"


def test_long_markers_cost_no_more_memory_than_their_length():
    markers = tuple(f"{i}" + "x" * 2000 for i in range(10))
    tracemalloc.start()
    assert MarkerSet(markers).held("y3" + "x" * 1500) == 1501
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
