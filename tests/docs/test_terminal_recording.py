"""The recording of the README: what real commands print, in a picture that needs nothing else."""

import re
from xml.etree import ElementTree

import pytest

from scripts.terminal_recording import (
    PICTURE,
    RecordedCommand,
    draw_recording,
    mask_times,
    record_commands,
)

MAX_BYTES = 300_000
SVG = "{http://www.w3.org/2000/svg}"
PICTURE_TEXT = PICTURE.read_text(encoding="utf-8")
COMMANDS = [RecordedCommand('expertctl run "a < b"', ("x  &  y", "", "  12 tokens/s, 3 ms"))]


def read_transcript(picture: str) -> str:
    return ElementTree.fromstring(picture).findtext(f"{SVG}desc") or ""


def test_the_picture_needs_no_script_no_font_and_no_other_file() -> None:
    assert len(PICTURE_TEXT.encode()) < MAX_BYTES
    names = {
        element.tag.removeprefix(SVG) for element in ElementTree.fromstring(PICTURE_TEXT).iter()
    }
    assert names == {"svg", "title", "desc", "style", "rect", "text"}
    assert re.findall(r"url\(|href|@import|@font-face|<script|\son\w+=", PICTURE_TEXT) == []


def test_the_picture_follows_the_colour_scheme_and_respects_reduced_motion() -> None:
    style = ElementTree.fromstring(PICTURE_TEXT).findtext(f"{SVG}style") or ""
    still, _, moving = style.partition("@media (prefers-reduced-motion:no-preference)")
    assert "prefers-color-scheme:dark" in still
    assert "animation" not in still
    assert "infinite" not in moving


def test_every_character_that_was_printed_is_in_the_picture() -> None:
    picture = draw_recording(COMMANDS)
    drawn = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert drawn == ["$", 'expertctl run "a < b"', "x  &  y", "12 tokens/s, 3 ms"]
    assert read_transcript(picture) == '$ expertctl run "a < b"\nx  &  y\n\n  12 tokens/s, 3 ms'
    assert picture == draw_recording(COMMANDS)


def test_only_measured_times_are_masked() -> None:
    assert mask_times("14 written, 587 tokens/s, first after 260 ms") == (
        "14 written, … tokens/s, first after … ms"
    )


@pytest.mark.all
def test_the_commands_still_print_what_the_picture_shows() -> None:
    now = read_transcript(draw_recording(record_commands()))
    assert mask_times(now) == mask_times(read_transcript(PICTURE_TEXT)), (
        "run `python -m scripts.terminal_recording`"
    )
