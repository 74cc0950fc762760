"""Who may answer at all, and what a prompt rules out, as the router applies it."""

from dataclasses import replace

import pytest

from expertctl.digest import Digest
from expertctl.reference import Reference
from expertctl.routing.candidate import Installed
from expertctl.routing.request import Forced, parse_target
from tests.routing.experts import content_digest
from tests.routing.routed import PROMPT, SORT, Router, of, refs, sorting


def test_an_excluded_keyword_refuses(router: Router) -> None:
    result = router(sorting(exclude_keywords=("numbers",)))
    assert of(result, "acme/sort").reason == "not for prompts with 'numbers', says its manifest"
    assert ", which is not for prompts with" in result.notes[-1]


def test_letters_of_a_language_that_an_expert_does_not_speak_rule_it_out(router: Router) -> None:
    prompt = f"{PROMPT} Отсортируй эти числа по возрастанию, пожалуйста"
    silent = router(sorting(languages=("en", "de")), prompt=prompt)
    assert refs(silent) == []
    assert of(silent, "acme/sort").reason == "not for prompts in 'ru', says its manifest"
    speaks = router(sorting(languages=("en", "ru-RU")), prompt=prompt)
    assert not of(speaks, "acme/sort").vetoed
    assert not of(router(sorting(), prompt=prompt), "acme/sort").vetoed


def test_words_of_another_language_rule_nobody_out(router: Router) -> None:
    prompt = "Bitte sortiere mir diese Zahlen: Sort these numbers: 8, 3, 99"
    assert refs(router(sorting(languages=("en",)), prompt=prompt)) == ["acme/sort@1.0.0"]


def test_a_hint_that_does_not_hold_rules_out_however_close_the_prompt_is(router: Router) -> None:
    result = router(sorting(hint="has_code=true"), prompt=SORT[0])
    candidate = of(result, "acme/sort")
    assert refs(result) == []
    assert candidate.reason == "not for this prompt, says its hint 'has_code=true'"
    assert (candidate.vetoed, candidate.barred, candidate.hint) == (True, False, False)
    assert (candidate.share, candidate.score) == (None, 0.0)


def test_who_is_ruled_out_does_not_stand_in_the_way_of_others(router: Router) -> None:
    result = router(sorting(exclude_keywords=("numbers",)), sorting("zed/sort"))
    assert refs(result) == ["zed/sort@1.0.0"]
    assert of(result, "zed/sort").score > 0.9


def test_keywords_of_stop_words_alone_never_match(router: Router) -> None:
    stuffed = sorting(keywords=("what is the", "of", "a"))
    assert of(router(stuffed, prompt="What is the point of a poem"), "acme").keywords == ()


@pytest.mark.parametrize(
    ("expert", "reason"),
    [
        (sorting(signer=None), "refused: unsigned experts are used only when they are named"),
        (sorting(revoked=True), "refused: the key that signed it was revoked"),
        (sorting(arch=Digest.of(b"other")), "refused: was made for acme/tiny, not for acme/tiny"),
        (sorting(version="2.0.0-rc.1"), "a prerelease is used only when it is named"),
    ],
)
def test_an_expert_that_may_not_be_used_says_why(
    router: Router, expert: Installed, reason: str
) -> None:
    result = router(expert)
    assert refs(result) == []
    assert of(result, "acme/sort").reason.startswith(reason)
    assert result.notes[-1] == (
        "the base answers alone: no installed expert was made for acme/tiny as it is here; the "
        "closest is acme/sort@1.0.0, made for acme/tiny: `--expert acme/sort@1.0.0` asks for it "
        "and its base"
        if reason.startswith("refused: was made for")
        else "the base answers alone: no installed expert may be used; `expertctl route` says why"
    )


def test_the_newest_version_that_may_be_used_answers(router: Router) -> None:
    versions = [
        sorting(version="1.9.0"),
        sorting(version="1.10.0"),
        sorting(version="2.0.0", arch=Digest.of(b"other")),
        sorting(version="3.0.0", revoked=True),
    ]
    result = router(*versions)
    assert refs(result) == ["acme/sort@1.10.0"]
    assert of(result, "acme/sort@1.9.0").reason == "older than acme/sort@1.10.0"


def test_a_base_mismatch_can_be_allowed_and_is_warned_of(router: Router) -> None:
    other = sorting(arch=Digest.of(b"other"))
    result = router(other, allow_base_mismatch=True)
    assert refs(result) == ["acme/sort@1.0.0"]
    assert any("base mismatch allowed" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    "target", ["acme/sort", "acme/sort@^1", str(content_digest("acme/sort@1.0.0"))]
)
def test_an_expert_can_be_excluded(router: Router, target: str) -> None:
    result = router(sorting(), exclude=(parse_target(target),))
    assert refs(result) == []
    assert of(result, "acme/sort").reason == "excluded by the user"


def test_an_exclusion_by_constraint_leaves_other_versions(router: Router) -> None:
    experts = [sorting(version="1.0.0"), sorting(version="2.0.0")]
    assert refs(router(*experts, exclude=(Reference.parse("acme/sort@>=2"),))) == [
        "acme/sort@1.0.0"
    ]
    newest = sorting(version="3.0.0-rc.1")
    assert refs(router(newest, exclude=(Reference.parse("acme/sort"),))) == []


def test_a_newer_version_from_another_registry_does_not_answer_for_the_own_one(
    router: Router,
) -> None:
    """An explicit install from elsewhere adds a version; what prompts get stays the same."""
    own = sorting(version="1.0.0")
    other = replace(sorting(version="9.0.0"), home="hub.example")
    result = router(own, other)
    assert refs(result) == ["acme/sort@1.0.0"]
    told = of(result, "acme/sort@9.0.0").reason
    assert told == "from local; acme/sort@1.0.0 is from hub.example, its own registry"
    named = router(own, other, force=(Forced(Reference.parse("acme/sort"), 1.0),))
    assert refs(named) == ["acme/sort@1.0.0"]
    asked = router(own, other, force=(Forced(Reference.parse("acme/sort@^9"), 1.0),))
    assert refs(asked) == ["acme/sort@9.0.0"]
    assert refs(router(other)) == ["acme/sort@9.0.0"]
