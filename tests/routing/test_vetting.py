"""Packages are judged once, in the order in which they came."""

import random
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.routing.encoder import find_minilm
from expertctl.routing.index import RoutingIndex
from expertctl.routing.manifest_lint import RULES_VERSION, advise_publisher
from expertctl.routing.minilm import open_minilm
from expertctl.routing.vetting import (
    VETTING_BATCH,
    open_suspicions,
    preview_flags,
    revet_experts,
    vet_experts,
)
from expertctl.schema.manifest import Manifest
from expertctl.store.suspicions import PackageVerdict
from tests.routing.experts import EXAMPLES, UNRELATED, make_content_digest, make_manifest

MINILM = find_minilm()
FIELDS = {
    "Helps with Python code.": """
        write a function that reverses a string; how do I read a csv file in pandas; fix this bug:
        list index out of range; sort a dictionary by value; explain list comprehensions; make a
        class for a bank account; why does my loop never end; unit test for this function; parse
        json from an API; decorator that measures time""",
    "Answers medical questions.": """
        what are the symptoms of flu; is ibuprofen safe with alcohol; how long does a broken arm
        take to heal; normal blood pressure for a 40 year old; side effects of metformin; when
        should I see a doctor about a cough; what does an MRI show; vaccines for a newborn; how
        to treat a burn; can stress cause headaches""",
    "Helps in the kitchen.": """
        how long do I boil eggs; substitute for buttermilk; what goes with salmon; make a shopping
        list for lasagna; my bread did not rise; how to sharpen a knife; vegan dinner ideas; what
        temperature for roast chicken; can I freeze soup; difference between baking soda and
        baking powder""",
}
"""Honest packages whose examples have little in common but their field."""

SQL = make_manifest("acme/sql", description="Writes queries for a table.", examples=EXAMPLES)
COPY = make_manifest("evil/helper", description="Helps.", examples=EXAMPLES)


def experts(*manifests: Manifest) -> dict[Digest, Manifest]:
    return {make_content_digest(made.ref): made for made in manifests}


def codes(index: RoutingIndex, *manifests: Manifest) -> dict[str, list[str]]:
    """Install these together; return the codes of their flags."""
    made = experts(*manifests)
    index.add(made)
    found = vet_experts(made, index)
    return {made[d].name: sorted({f.code for f in flags}) for d, flags in found.items()}


def test_attack_105_a_copy_is_flagged_and_the_original_is_not(index: RoutingIndex) -> None:
    assert codes(index, SQL) == {"acme/sql": []}
    assert codes(index, COPY) == {"evil/helper": ["copied", "near-copy"]}
    assert codes(index, SQL, COPY)["acme/sql"] == []
    assert list(open_suspicions(index).read_flagged()) == [make_content_digest(COPY.ref)]


def test_of_those_that_come_together_the_first_is_the_original(index: RoutingIndex) -> None:
    assert codes(index, SQL, COPY) == {"acme/sql": [], "evil/helper": ["copied", "near-copy"]}


def test_attack_105_a_later_version_of_the_original_is_no_copy(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    later = make_manifest("acme/sql", "2.0.0", description=SQL.description, examples=EXAMPLES)
    assert codes(index, later) == {"acme/sql": []}


def test_attack_105_a_harmless_first_version_makes_no_later_copy_good(index: RoutingIndex) -> None:
    assert codes(index, make_manifest("evil/helper", "0.1.0", description="Helps."), SQL) == {
        "evil/helper": [],
        "acme/sql": [],
    }
    assert codes(index, COPY) == {"evil/helper": ["copied", "near-copy"]}


def test_attack_105_the_original_comes_back_unflagged(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    index.remove([make_content_digest(SQL.ref)])
    assert codes(index, SQL) == {"acme/sql": []}


def test_what_is_judged_is_not_judged_again(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    before = open_suspicions(index).path.stat().st_mtime_ns
    assert codes(index, SQL, COPY)["evil/helper"] == ["copied", "near-copy"]
    assert open_suspicions(index).path.stat().st_mtime_ns == before


def test_other_rules_judge_again(index: RoutingIndex) -> None:
    index.add(experts(SQL))
    old = PackageVerdict(make_content_digest(SQL.ref), SQL.name, (), 0, frozenset())
    open_suspicions(index).add([old])
    codes(index, SQL)
    assert (
        open_suspicions(index).find_verdicts(experts(SQL))[make_content_digest(SQL.ref)].rules
        == RULES_VERSION
    )


def test_a_copy_is_forgiven_when_the_original_is_gone_for_good(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    index.rebuild(experts(COPY))
    assert revet_experts(experts(COPY), index) == {make_content_digest(COPY.ref): ()}
    assert open_suspicions(index).read_flagged() == {}


def test_making_the_record_again_keeps_the_order_that_is_given(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    open_suspicions(index).path.unlink()
    found = revet_experts(experts(SQL, COPY), index)
    assert found[make_content_digest(SQL.ref)] == ()
    assert found[make_content_digest(COPY.ref)] != ()


def test_a_near_copy_is_flagged_by_its_vectors(index: RoutingIndex) -> None:
    codes(index, SQL)
    turned = [" ".join(reversed(text.split(" ", 1))) for text in EXAMPLES]
    flags = codes(index, make_manifest("evil/helper", description="Helps.", examples=tuple(turned)))
    assert "near-copy" in flags["evil/helper"]


def test_a_manifest_without_vectors_is_judged_by_its_texts(index: RoutingIndex) -> None:
    codes(index, SQL)
    assert [f.code for f in vet_experts(experts(COPY), index)[make_content_digest(COPY.ref)]] == [
        "copied"
    ]


@pytest.mark.all
@pytest.mark.parametrize("count", [VETTING_BATCH - 1, VETTING_BATCH + 1, 2 * VETTING_BATCH + 3])
def test_many_that_come_together_are_all_judged(index: RoutingIndex, count: int) -> None:
    draw = random.Random(count)
    words = [f"word{n}" for n in range(4000)]
    made = [
        make_manifest(
            f"p{n}/e{n}",
            description=" ".join(draw.sample(words, 6)),
            examples=tuple(" ".join(draw.sample(words, 9)) for _ in range(3)),
        )
        for n in range(count - 1)
    ]
    copy = make_manifest("evil/last", description="Helps.", examples=made[0].routing.examples)
    flagged = {name: found for name, found in codes(index, *made, copy).items() if found}
    assert flagged == {"evil/last": ["copied", "near-copy"]}
    open_suspicions(index).check_integrity()


@pytest.mark.skipif(MINILM is None, reason="needs the weights of MiniLM")
def test_attack_105_a_package_about_everything_is_flagged_and_a_wide_field_is_not(
    tmp_path: Path,
) -> None:
    assert MINILM is not None
    index = RoutingIndex(tmp_path, open_minilm(MINILM))
    wide = [
        make_manifest(
            f"p{n}/wide", description=field, examples=tuple(" ".join(t.split()).split("; "))
        )
        for n, (field, t) in enumerate(FIELDS.items())
    ]
    all_of_it = make_manifest("evil/all", description="A helper for anything.", examples=UNRELATED)
    flagged = {name: found for name, found in codes(index, *wide, all_of_it).items() if found}
    assert flagged == {"evil/all": ["grab-all"]}


def test_a_persons_own_package_is_not_flagged_for_what_it_repeats(index: RoutingIndex) -> None:
    codes(index, SQL)
    made = experts(COPY)
    index.add(made)
    assert vet_experts(made, index, own=set(made)) == {make_content_digest(COPY.ref): ()}
    assert open_suspicions(index).read_flagged() == {}


def test_an_own_copy_takes_no_text_from_who_brought_it_first(index: RoutingIndex) -> None:
    made = experts(COPY)
    codes(index, SQL)
    index.add(made)
    vet_experts(made, index, own=set(made))
    stranger = make_manifest("bob/sql", description="Bob helps.", examples=EXAMPLES)
    assert codes(index, stranger) == {"bob/sql": ["copied", "near-copy"]}
    (verdict,) = open_suspicions(index).find_verdicts(experts(stranger)).values()
    assert {flag.other for flag in verdict.flags} == {"acme/sql"}


def test_a_package_whose_key_becomes_ones_own_is_judged_again(index: RoutingIndex) -> None:
    assert codes(index, SQL, COPY)["evil/helper"] != []
    made = experts(COPY)
    assert vet_experts(made, index, own=set(made)) == {make_content_digest(COPY.ref): ()}
    assert open_suspicions(index).read_flagged() == {}


def test_reindex_keeps_own_packages_unflagged(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    found = revet_experts(experts(SQL, COPY), index, own={make_content_digest(COPY.ref)})
    assert found == {make_content_digest(SQL.ref): (), make_content_digest(COPY.ref): ()}


def test_advice_finds_what_others_would_see_and_remembers_nothing(index: RoutingIndex) -> None:
    codes(index, SQL)
    before = open_suspicions(index).path.read_bytes()
    assert sorted({flag.code for flag in preview_flags(COPY, index)}) == ["copied", "near-copy"]
    assert preview_flags(SQL, index) == ()
    assert open_suspicions(index).path.read_bytes() == before
    assert len(index.find_positions([make_content_digest(COPY.ref)])) == 0


def test_advice_does_not_compare_with_ones_own_packages(index: RoutingIndex) -> None:
    codes(index, SQL)
    published = make_manifest(
        "bob/sql", description="Writes queries for a table.", examples=EXAMPLES
    )
    assert preview_flags(published, index) != ()
    assert preview_flags(published, index, own={make_content_digest(SQL.ref)}) == ()


def test_advice_does_not_compare_with_files_that_were_only_run(index: RoutingIndex) -> None:
    earlier = make_manifest("me/sql", description="Writes queries.", examples=EXAMPLES)
    index.add(experts(earlier))
    again = make_manifest("me/sql", description="Writes queries for tables.", examples=EXAMPLES)
    assert preview_flags(again, index) != ()
    assert preview_flags(again, index, among=set()) == ()
    assert preview_flags(again, index, among=experts(earlier)) != ()


@pytest.mark.skipif(MINILM is None, reason="needs the weights of MiniLM")
def test_a_style_expert_of_ones_own_is_only_advised_of(tmp_path: Path) -> None:
    """What a style expert is for is no subject, so its examples are about everything."""
    assert MINILM is not None
    index = RoutingIndex(tmp_path, open_minilm(MINILM))
    style = make_manifest("me/upper", description="A helper for anything.", examples=UNRELATED)
    made = experts(style)
    (line,) = advise_publisher(style, preview_flags(style, index))
    assert line.startswith("me/upper will be flagged where others install it (grab-all): its exam")
    assert line.endswith("; keep to examples of one kind, and say in the description what they "
                         "have in common")  # fmt: skip
    index.add(made)
    assert vet_experts(made, index, own=set(made)) == {make_content_digest(style.ref): ()}
    stranger = make_manifest("evil/all", description="A helper for all.", examples=UNRELATED)
    assert codes(index, stranger) == {"evil/all": ["grab-all", "near-copy"]}
