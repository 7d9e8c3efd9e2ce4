"""Stop strings: found wherever the text is cut, and never shown in part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import InvalidRequest
from serve.text import StopStrings

TEXT = "A wide blue sky above"


def run(pieces, stop):
    stops = StopStrings(stop)
    shown = [stops.push(piece) for piece in pieces]
    return "".join([*shown, stops.flush()]), stops.matched


def cuts(text):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield from ([text[i : i + size] for i in range(0, len(text), size)] for size in range(1, len(text) + 1))


def test_sa05_the_text_ends_before_the_stop_string():
    for pieces in cuts(TEXT):
        assert run(pieces, ["lue sky"]) == ("A wide b", "lue sky")


def test_sa05_nothing_of_the_stop_string_is_shown_on_the_way():
    stops = StopStrings(["lue sky"])
    shown = ""
    for character in TEXT:
        shown += stops.push(character)
        assert "A wide b".startswith(shown)
    assert shown == "A wide b"


def test_sa07_the_token_that_completes_a_stop_string_is_known():
    """One token at a time, `matched` tells after which token the answer ends, however the tokens arrived."""
    stops = StopStrings(["lue sky"])
    tokens = ["A wi", "de bl", "ue", " sk", "y ab", "ove"]
    matched = []
    for text in tokens:
        stops.push(text)
        matched.append(stops.matched is not None)
    assert matched.index(True) == 4


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], (TEXT, None)),
        (["nowhere"], (TEXT, None)),
        (["sky abo", "blue"], ("A wide ", "blue")),
        (["sky", "lue sky"], ("A wide b", "lue sky")),  # completed together: the longer
        (["wide blue sky", "blue"], ("A wide ", "blue")),  # completed first
        (["above!"], (TEXT, None)),  # held back, then released
        (["A"], ("", "A")),
        (["e", "wi"], ("A ", "wi")),
    ],
)
def test_several_stop_strings(stop, expected):
    for pieces in cuts(TEXT):
        assert run(pieces, stop) == expected


def test_nothing_is_held_back_without_need():
    stops = StopStrings(["sky!"])
    assert stops.push("blue") == "blue"
    assert stops.push(" sky") == " "
    assert stops.push("?") == "sky?"
    assert StopStrings().push("sky") == "sky"


def test_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        StopStrings([""])


def test_stop_strings_have_limits():
    StopStrings(["x" * 1024] * 64)
    with pytest.raises(InvalidRequest, match="may have 64"):
        StopStrings(["x"] * 65)
    with pytest.raises(InvalidRequest, match="may have 1024"):
        StopStrings(["x" * 1025])


def test_a_fresh_matcher_has_its_own_state():
    first = StopStrings(["sky"])
    first.push("blue s")
    second = first.fresh()
    assert second.push("x") == "x"
    second.push("sky")
    assert (first.matched, second.matched) == (None, "sky")
    assert first.push("o") == "so" and second.fresh().matched is None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=25),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=25, max_size=25),
)
def test_the_result_does_not_depend_on_the_pieces(text, stop, sizes):
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    expected = (text, None)
    if ends:
        end, length, matched = min(ends)
        expected = (text[: end + length], matched)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    assert run(pieces, stop) == expected
