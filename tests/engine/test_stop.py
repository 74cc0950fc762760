"""Stop strings that reach across pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.generation import MAX_STOP_LENGTH, MAX_STOPS, StopScanner
from expertctl.errors import UsageError


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.feed(piece) for piece in pieces)
    return text + scanner.finish(), scanner.found


def cut_at_stop(text: str, stops: list[str]) -> str:
    """Return a whole text up to its first stop string, by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


SHORT = st.text(alphabet="ab\n", max_size=12)


@settings(deadline=None, max_examples=400)
@given(
    pieces=st.lists(SHORT, max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
)
def test_any_split_of_any_text_ends_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    wanted = cut_at_stop(whole, stops)
    text, found = stream(pieces, stops)
    assert text == wanted
    assert (found is None) == (not any(stop in whole for stop in stops))
    if found is not None:
        assert whole.startswith(wanted + found)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.text(alphabet="abc", min_size=1, max_size=3),
)
def test_one_stop_string_cuts_where_a_plain_search_finds_it(text: str, stop: str) -> None:
    assert cut_at_stop(text, [stop]) == text.split(stop, 1)[0]
    assert stream(list(text), [stop])[0] == text.split(stop, 1)[0]


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(SHORT, max_size=8), stops=st.lists(SHORT.filter(bool), max_size=3))
def test_what_was_given_out_is_never_part_of_a_stop(pieces: list[str], stops: list[str]) -> None:
    scanner, given_out = StopScanner(stops), ""
    whole = "".join(pieces)
    for piece in pieces:
        given_out += scanner.feed(piece)
        assert cut_at_stop(whole, stops).startswith(given_out)


def test_no_more_is_held_back_than_could_become_a_stop() -> None:
    scanner = StopScanner(["</s>", "\n\n"])
    assert scanner.feed("ab</") == "ab"
    assert scanner.feed("d") == "</d"
    assert scanner.feed("\n") == ""
    assert scanner.feed("x") == "\nx"
    assert scanner.finish() == ""


def test_without_stops_nothing_is_held_back() -> None:
    assert [StopScanner([]).feed(c) for c in ("a", "", "b")] == ["a", "", "b"]


def test_a_stop_across_three_pieces_is_found() -> None:
    assert stream(["one <", "|e", "nd|> two"], ["<|end|>"]) == ("one ", "<|end|>")


def test_the_stop_that_is_complete_first_counts() -> None:
    assert stream(["abc"], ["abc", "b"]) == ("a", "b")
    assert stream(["abc"], ["bc", "abc", "c"]) == ("", "abc")


def test_after_a_stop_nothing_comes() -> None:
    scanner = StopScanner(["x"])
    assert scanner.feed("axb") == "a"
    assert scanner.feed("more") == ""
    assert scanner.finish() == ""


@pytest.mark.parametrize(
    ("stops", "problem"),
    [
        ([""], "of 0 characters"),
        (["a", "b" * (MAX_STOP_LENGTH + 1)], "of 1025 characters"),
        (["a"] * (MAX_STOPS + 1), "65 stop strings"),
    ],
)
def test_absurd_stops_are_refused(stops: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        StopScanner(stops)
