"""Packages are judged once, in the order in which they came."""

import random
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.routing.advice import advice
from expertctl.routing.encoder import find_minilm
from expertctl.routing.index import RoutingIndex
from expertctl.routing.minilm import open_minilm
from expertctl.routing.suspicion import RULES
from expertctl.routing.vetting import BATCH, advise, suspicions_of, vet, vet_again
from expertctl.schema.manifest import Manifest
from expertctl.store.suspicions import Verdict
from tests.routing.copied import EXAMPLES
from tests.routing.experts import content_digest, manifest
from tests.routing.unrelated import UNRELATED

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

SQL = manifest("acme/sql", description="Writes queries for a table.", examples=EXAMPLES)
COPY = manifest("evil/helper", description="Helps.", examples=EXAMPLES)


def experts(*manifests: Manifest) -> dict[Digest, Manifest]:
    return {content_digest(made.ref): made for made in manifests}


def codes(index: RoutingIndex, *manifests: Manifest) -> dict[str, list[str]]:
    """Install these together; return the codes of their flags."""
    made = experts(*manifests)
    index.add(made)
    found = vet(made, index)
    return {made[d].name: sorted({f.code for f in flags}) for d, flags in found.items()}


def test_attack_105_a_copy_is_flagged_and_the_original_is_not(index: RoutingIndex) -> None:
    assert codes(index, SQL) == {"acme/sql": []}
    assert codes(index, COPY) == {"evil/helper": ["copied", "near-copy"]}
    assert codes(index, SQL, COPY)["acme/sql"] == []
    assert list(suspicions_of(index).flagged()) == [content_digest(COPY.ref)]


def test_of_those_that_come_together_the_first_is_the_original(index: RoutingIndex) -> None:
    assert codes(index, SQL, COPY) == {"acme/sql": [], "evil/helper": ["copied", "near-copy"]}


def test_attack_105_a_later_version_of_the_original_is_no_copy(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    later = manifest("acme/sql", "2.0.0", description=SQL.description, examples=EXAMPLES)
    assert codes(index, later) == {"acme/sql": []}


def test_attack_105_a_harmless_first_version_makes_no_later_copy_good(index: RoutingIndex) -> None:
    assert codes(index, manifest("evil/helper", "0.1.0", description="Helps."), SQL) == {
        "evil/helper": [],
        "acme/sql": [],
    }
    assert codes(index, COPY) == {"evil/helper": ["copied", "near-copy"]}


def test_attack_105_the_original_comes_back_unflagged(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    index.remove([content_digest(SQL.ref)])
    assert codes(index, SQL) == {"acme/sql": []}


def test_what_is_judged_is_not_judged_again(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    before = suspicions_of(index).path.stat().st_mtime_ns
    assert codes(index, SQL, COPY)["evil/helper"] == ["copied", "near-copy"]
    assert suspicions_of(index).path.stat().st_mtime_ns == before


def test_other_rules_judge_again(index: RoutingIndex) -> None:
    index.add(experts(SQL))
    old = Verdict(content_digest(SQL.ref), SQL.name, (), 0, frozenset())
    suspicions_of(index).add([old])
    codes(index, SQL)
    assert suspicions_of(index).verdicts(experts(SQL))[content_digest(SQL.ref)].rules == RULES


def test_a_copy_is_forgiven_when_the_original_is_gone_for_good(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    index.rebuild(experts(COPY))
    assert vet_again(experts(COPY), index) == {content_digest(COPY.ref): ()}
    assert suspicions_of(index).flagged() == {}


def test_making_the_record_again_keeps_the_order_that_is_given(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    suspicions_of(index).path.unlink()
    found = vet_again(experts(SQL, COPY), index)
    assert found[content_digest(SQL.ref)] == ()
    assert found[content_digest(COPY.ref)] != ()


def test_a_near_copy_is_flagged_by_its_vectors(index: RoutingIndex) -> None:
    codes(index, SQL)
    turned = [" ".join(reversed(text.split(" ", 1))) for text in EXAMPLES]
    flags = codes(index, manifest("evil/helper", description="Helps.", examples=tuple(turned)))
    assert "near-copy" in flags["evil/helper"]


def test_a_manifest_without_vectors_is_judged_by_its_texts(index: RoutingIndex) -> None:
    codes(index, SQL)
    assert [f.code for f in vet(experts(COPY), index)[content_digest(COPY.ref)]] == ["copied"]


@pytest.mark.parametrize("count", [BATCH - 1, BATCH + 1, 2 * BATCH + 3])
def test_many_that_come_together_are_all_judged(index: RoutingIndex, count: int) -> None:
    draw = random.Random(count)
    words = [f"word{n}" for n in range(4000)]
    made = [
        manifest(
            f"p{n}/e{n}",
            description=" ".join(draw.sample(words, 6)),
            examples=tuple(" ".join(draw.sample(words, 9)) for _ in range(3)),
        )
        for n in range(count - 1)
    ]
    copy = manifest("evil/last", description="Helps.", examples=made[0].routing.examples)
    flagged = {name: found for name, found in codes(index, *made, copy).items() if found}
    assert flagged == {"evil/last": ["copied", "near-copy"]}
    suspicions_of(index).check_integrity()


@pytest.mark.skipif(MINILM is None, reason="needs the weights of MiniLM")
def test_attack_105_a_package_about_everything_is_flagged_and_a_wide_field_is_not(
    tmp_path: Path,
) -> None:
    assert MINILM is not None
    index = RoutingIndex(tmp_path, open_minilm(MINILM))
    wide = [
        manifest(f"p{n}/wide", description=field, examples=tuple(" ".join(t.split()).split("; ")))
        for n, (field, t) in enumerate(FIELDS.items())
    ]
    all_of_it = manifest("evil/all", description="A helper for anything.", examples=UNRELATED)
    flagged = {name: found for name, found in codes(index, *wide, all_of_it).items() if found}
    assert flagged == {"evil/all": ["grab-all"]}


def test_a_persons_own_package_is_not_flagged_for_what_it_repeats(index: RoutingIndex) -> None:
    codes(index, SQL)
    made = experts(COPY)
    index.add(made)
    assert vet(made, index, own=set(made)) == {content_digest(COPY.ref): ()}
    assert suspicions_of(index).flagged() == {}


def test_an_own_copy_takes_no_text_from_who_brought_it_first(index: RoutingIndex) -> None:
    made = experts(COPY)
    codes(index, SQL)
    index.add(made)
    vet(made, index, own=set(made))
    stranger = manifest("bob/sql", description="Bob helps.", examples=EXAMPLES)
    assert codes(index, stranger) == {"bob/sql": ["copied", "near-copy"]}
    (verdict,) = suspicions_of(index).verdicts(experts(stranger)).values()
    assert {flag.other for flag in verdict.flags} == {"acme/sql"}


def test_a_package_whose_key_becomes_ones_own_is_judged_again(index: RoutingIndex) -> None:
    assert codes(index, SQL, COPY)["evil/helper"] != []
    made = experts(COPY)
    assert vet(made, index, own=set(made)) == {content_digest(COPY.ref): ()}
    assert suspicions_of(index).flagged() == {}


def test_reindex_keeps_own_packages_unflagged(index: RoutingIndex) -> None:
    codes(index, SQL, COPY)
    found = vet_again(experts(SQL, COPY), index, own={content_digest(COPY.ref)})
    assert found == {content_digest(SQL.ref): (), content_digest(COPY.ref): ()}


def test_advice_finds_what_others_would_see_and_remembers_nothing(index: RoutingIndex) -> None:
    codes(index, SQL)
    before = suspicions_of(index).path.read_bytes()
    assert sorted({flag.code for flag in advise(COPY, index)}) == ["copied", "near-copy"]
    assert advise(SQL, index) == ()
    assert suspicions_of(index).path.read_bytes() == before
    assert len(index.positions([content_digest(COPY.ref)])) == 0


def test_advice_does_not_compare_with_ones_own_packages(index: RoutingIndex) -> None:
    codes(index, SQL)
    published = manifest("bob/sql", description="Writes queries for a table.", examples=EXAMPLES)
    assert advise(published, index) != ()
    assert advise(published, index, own={content_digest(SQL.ref)}) == ()


@pytest.mark.skipif(MINILM is None, reason="needs the weights of MiniLM")
def test_a_style_expert_of_ones_own_is_only_advised_of(tmp_path: Path) -> None:
    """What a style expert is for is no subject, so its examples are about everything."""
    assert MINILM is not None
    index = RoutingIndex(tmp_path, open_minilm(MINILM))
    style = manifest("me/upper", description="A helper for anything.", examples=UNRELATED)
    made = experts(style)
    (line,) = advice(style, advise(style, index))
    assert line.startswith("me/upper will be flagged where others install it (grab-all): its exam")
    assert line.endswith("; keep to examples of one kind, and say in the description what they "
                         "have in common")  # fmt: skip
    index.add(made)
    assert vet(made, index, own=set(made)) == {content_digest(style.ref): ()}
    stranger = manifest("evil/all", description="A helper for all.", examples=UNRELATED)
    assert codes(index, stranger) == {"evil/all": ["grab-all", "near-copy"]}
