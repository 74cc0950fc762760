"""Who may answer at all, and what a prompt rules out, as the router applies it."""

from dataclasses import replace

import pytest

from expertctl.digest import Digest
from expertctl.reference import Reference, parse_target
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.request import ForcedExpert
from tests.routing.experts import (
    PROMPT,
    SORT,
    Router,
    find_candidate,
    list_refs,
    make_content_digest,
    make_sort_expert,
)


def test_an_excluded_keyword_refuses(router: Router) -> None:
    result = router(make_sort_expert(exclude_keywords=("numbers",)))
    assert (
        find_candidate(result, "acme/sort").reason
        == "not for prompts with 'numbers', according to its manifest"
    )
    assert ", which is not for prompts with" in result.notes[-1]


def test_letters_of_a_language_that_an_expert_does_not_speak_rule_it_out(router: Router) -> None:
    prompt = f"{PROMPT} Отсортируй эти числа по возрастанию, пожалуйста"
    silent = router(make_sort_expert(languages=("en", "de")), prompt=prompt)
    assert list_refs(silent) == []
    assert (
        find_candidate(silent, "acme/sort").reason
        == "not for prompts in 'ru', according to its manifest"
    )
    speaks = router(make_sort_expert(languages=("en", "ru-RU")), prompt=prompt)
    assert not find_candidate(speaks, "acme/sort").is_vetoed
    assert not find_candidate(router(make_sort_expert(), prompt=prompt), "acme/sort").is_vetoed


def test_words_of_another_language_rule_nobody_out(router: Router) -> None:
    prompt = "Bitte sortiere mir diese Zahlen: Sort these numbers: 8, 3, 99"
    assert list_refs(router(make_sort_expert(languages=("en",)), prompt=prompt)) == [
        "acme/sort@1.0.0"
    ]


def test_a_hint_that_does_not_hold_rules_out_however_close_the_prompt_is(router: Router) -> None:
    result = router(make_sort_expert(hint="has_code=true"), prompt=SORT[0])
    candidate = find_candidate(result, "acme/sort")
    assert list_refs(result) == []
    assert candidate.reason == "its hint 'has_code=true' excludes this prompt"
    assert (candidate.is_vetoed, candidate.is_ineligible, candidate.hint) == (True, False, False)
    assert (candidate.probability, candidate.score) == (None, 0.0)


def test_who_is_ruled_out_does_not_stand_in_the_way_of_others(router: Router) -> None:
    result = router(make_sort_expert(exclude_keywords=("numbers",)), make_sort_expert("zed/sort"))
    assert list_refs(result) == ["zed/sort@1.0.0"]
    assert find_candidate(result, "zed/sort").score > 0.9


def test_keywords_of_stop_words_alone_never_match(router: Router) -> None:
    stuffed = make_sort_expert(keywords=("what is the", "of", "a"))
    assert (
        find_candidate(router(stuffed, prompt="What is the point of a poem"), "acme").keywords == ()
    )


@pytest.mark.parametrize(
    ("expert", "reason"),
    [
        (
            make_sort_expert(signer=None),
            "refused: unsigned experts are used only when they are named",
        ),
        (make_sort_expert(revoked=True), "refused: the key that signed it was revoked"),
        (
            make_sort_expert(arch=Digest.compute(b"other")),
            "refused: was made for acme/tiny, not for acme/tiny",
        ),
        (make_sort_expert(version="2.0.0-rc.1"), "a prerelease is used only when it is named"),
    ],
)
def test_an_expert_that_may_not_be_used_says_why(
    router: Router, expert: InstalledExpert, reason: str
) -> None:
    result = router(expert)
    assert list_refs(result) == []
    assert find_candidate(result, "acme/sort").reason.startswith(reason)
    assert result.notes[-1] == (
        "the base answers alone: no installed expert was made for this version of acme/tiny; the "
        "closest is acme/sort@1.0.0, made for acme/tiny: `--expert acme/sort@1.0.0` uses it "
        "on its own base"
        if reason.startswith("refused: was made for")
        else "the base answers alone: no installed expert may be used; `expertctl route` says why"
    )


def test_the_newest_version_that_may_be_used_answers(router: Router) -> None:
    versions = [
        make_sort_expert(version="1.9.0"),
        make_sort_expert(version="1.10.0"),
        make_sort_expert(version="2.0.0", arch=Digest.compute(b"other")),
        make_sort_expert(version="3.0.0", revoked=True),
    ]
    result = router(*versions)
    assert list_refs(result) == ["acme/sort@1.10.0"]
    assert find_candidate(result, "acme/sort@1.9.0").reason == "older than acme/sort@1.10.0"


def test_a_base_mismatch_can_be_allowed_and_is_warned_of(router: Router) -> None:
    other = make_sort_expert(arch=Digest.compute(b"other"))
    result = router(other, allow_base_mismatch=True)
    assert list_refs(result) == ["acme/sort@1.0.0"]
    assert any("base mismatch allowed" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    "target", ["acme/sort", "acme/sort@^1", str(make_content_digest("acme/sort@1.0.0"))]
)
def test_an_expert_can_be_excluded(router: Router, target: str) -> None:
    result = router(make_sort_expert(), exclude=(parse_target(target),))
    assert list_refs(result) == []
    assert find_candidate(result, "acme/sort").reason == "excluded by the user"


def test_an_exclusion_by_constraint_leaves_other_versions(router: Router) -> None:
    experts = [make_sort_expert(version="1.0.0"), make_sort_expert(version="2.0.0")]
    assert list_refs(router(*experts, exclude=(Reference.parse("acme/sort@>=2"),))) == [
        "acme/sort@1.0.0"
    ]
    newest = make_sort_expert(version="3.0.0-rc.1")
    assert list_refs(router(newest, exclude=(Reference.parse("acme/sort"),))) == []


def test_a_newer_version_from_another_registry_does_not_answer_for_the_own_one(
    router: Router,
) -> None:
    """An explicit install from elsewhere adds a version; what prompts get stays the same."""
    own = make_sort_expert(version="1.0.0")
    other = replace(make_sort_expert(version="9.0.0"), home="hub.example")
    result = router(own, other)
    assert list_refs(result) == ["acme/sort@1.0.0"]
    told = find_candidate(result, "acme/sort@9.0.0").reason
    assert told == "from local; acme/sort@1.0.0 is from hub.example, its own registry"
    named = router(own, other, force=(ForcedExpert(Reference.parse("acme/sort"), 1.0),))
    assert list_refs(named) == ["acme/sort@1.0.0"]
    asked = router(own, other, force=(ForcedExpert(Reference.parse("acme/sort@^9"), 1.0),))
    assert list_refs(asked) == ["acme/sort@9.0.0"]
    assert list_refs(router(other)) == ["acme/sort@9.0.0"]
