"""A copy is flagged, never what it was copied from; honest packages are not."""

import pytest

from examples.starter.experts import EXPERTS
from expertctl.routing.manifest_lint import (
    SeenManifests,
    TextFingerprint,
    find_flags,
    fingerprint_manifest,
)
from expertctl.schema.manifest import Manifest
from tests.routing.experts import EXAMPLES, collect_manifests, make_manifest

ORIGINAL = make_manifest("acme/sql", description="Writes queries for a table.", examples=EXAMPLES)
KNOWN = collect_manifests([ORIGINAL])


def copy(*examples: str, name: str = "evil/helper", description: str = "Helps.") -> Manifest:
    return make_manifest(name, description=description, examples=examples)


def test_attack_105_copied_examples_are_flagged_with_their_source() -> None:
    (flag,) = find_flags(copy(*EXAMPLES), KNOWN)
    assert (flag.code, flag.other) == ("copied", "acme/sql")
    assert flag.sentence == "8 of its 8 examples are those of acme/sql"


@pytest.mark.parametrize(
    "disguise",
    [
        "please {} right now",
        "{}!!!",
        "  {}\t",
        "\u200b{}",
    ],
)
def test_attack_105_copies_with_words_around_them_are_flagged(disguise: str) -> None:
    hidden = [disguise.format(text.upper()) for text in EXAMPLES]
    assert "copied" in {flag.code for flag in find_flags(copy(*hidden), KNOWN)}


def test_attack_105_other_numbers_make_no_other_example() -> None:
    assert TextFingerprint.from_text("users over 30") == TextFingerprint.from_text("users over 64")
    assert TextFingerprint.from_text("users over 30") != TextFingerprint.from_text("users under 30")


def test_attack_105_a_copied_description_is_flagged() -> None:
    (flag,) = find_flags(copy(description="writes QUERIES, for a table"), KNOWN)
    assert flag.sentence == "its description is that of acme/sql"


def test_attack_105_examples_of_several_others_are_flagged() -> None:
    dates = make_manifest(
        "time/dates", description="Writes dates.", examples=("what day is it today",)
    )
    known = collect_manifests([ORIGINAL, dates])
    (flag,) = find_flags(copy(EXAMPLES[0], EXAMPLES[1], "what day is it today", "sing"), known)
    assert flag.sentence == "3 of its 4 examples are those of acme/sql and 1 more"


def test_one_shared_example_is_no_copy() -> None:
    others = ("sing me a song", "play some jazz", "turn it up", "who is this")
    assert find_flags(copy(EXAMPLES[0], *others), KNOWN) == ()


def test_short_descriptions_may_be_the_same() -> None:
    known = collect_manifests([copy(description="Converts units.")])
    assert find_flags(copy(name="acme/units", description="Converts units."), known) == ()


def test_a_publisher_may_repeat_himself() -> None:
    assert find_flags(make_manifest("acme/sql", "2.0.0", examples=EXAMPLES), KNOWN) == ()
    assert find_flags(make_manifest("acme/sql-large", examples=EXAMPLES), KNOWN) == ()


def test_attack_105_what_came_first_is_not_flagged_for_its_copy() -> None:
    known = collect_manifests([ORIGINAL, copy(*EXAMPLES)])
    assert find_flags(ORIGINAL, known) == ()
    assert find_flags(make_manifest("acme/sql", "1.1.0", examples=EXAMPLES), known) == ()


def test_starter_experts_of_different_publishers_are_no_copies() -> None:
    known = SeenManifests()
    for number, task in enumerate(EXPERTS):
        made = make_manifest(
            f"p{number}/{task.short_name}", description=task.description, examples=task.examples
        )
        assert find_flags(made, known) == ()
        known.add(made)


def test_a_huge_manifest_has_few_marks() -> None:
    text = " ".join(f"word{n}" for n in range(400))
    huge = copy(*(f"{text} {n} end" for n in range(200)))
    assert len(fingerprint_manifest(huge)) <= 201 * 33
