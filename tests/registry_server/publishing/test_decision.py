"""What a push means, as a pure function of what is known."""

import pytest

from expertctl.errors import ConflictError, UsageError
from expertctl.reference import Digest, PackageName
from registry_server.publishing.push import (
    PublishedRelease,
    PushAction,
    ReleaseForm,
    decide_push,
    parse_exact_version,
)

SQL = PackageName("acme", "sql")
ONE, TWO = Digest.compute(b"one"), Digest.compute(b"two")
A, B, C = (ReleaseForm(Digest.compute(text), text.decode()) for text in (b"a", b"b", b"c"))


def released(
    *forms: ReleaseForm, version: str = "1.0.0", content: Digest = ONE
) -> PublishedRelease:
    return PublishedRelease(version, content, forms)


def test_a_version_that_is_not_there_is_a_release() -> None:
    assert decide_push(SQL, released(A), [], revoked=[]) is PushAction.RELEASE


def test_the_same_package_again_is_nothing() -> None:
    assert decide_push(SQL, released(A), [released(A)], revoked=[]) is PushAction.NOTHING


def test_the_same_content_with_another_signature_is_a_signature() -> None:
    assert decide_push(SQL, released(B), [released(A)], revoked=[]) is PushAction.SIGNATURE


def test_an_older_signature_again_does_not_undo_the_newer_one() -> None:
    assert decide_push(SQL, released(A), [released(A, B)], revoked=[]) is PushAction.NOTHING


def test_an_older_signature_counts_again_when_the_newest_was_revoked() -> None:
    assert (
        decide_push(SQL, released(A), [released(A, B)], revoked=[B.signer]) is PushAction.SIGNATURE
    )


def test_the_newest_signature_again_is_nothing_even_when_an_older_one_was_revoked() -> None:
    assert decide_push(SQL, released(B), [released(A, B)], revoked=[A.signer]) is PushAction.NOTHING


@pytest.mark.parametrize("form", [A, B, C])
def test_other_content_for_a_version_is_refused(form: ReleaseForm) -> None:
    with pytest.raises(ConflictError, match="versions never change") as caught:
        decide_push(SQL, released(form, content=TWO), [released(A, B)], revoked=[])
    assert "higher version" in caught.value.hint


def test_a_version_that_differs_in_case_alone_is_refused() -> None:
    there = [released(A, version="1.0.0-RC.1")]
    with pytest.raises(ConflictError, match="in case alone"):
        decide_push(SQL, released(A, version="1.0.0-rc.1"), there, revoked=[])


@pytest.mark.parametrize(
    "tag",
    [
        "1.0",
        "1",
        "v1.0.0",
        "V1.0.0",
        "01.0.0",
        "1.00.0",
        "1.0.0+build",
        "1.0.0-",
        "1.0.0-01",
        "1.0.0 ",
        " 1.0.0",
        "1.0.0\n",
        "\u0661.0.0",
        "\uff11.0.0",
        "1.0.\u00b2",
        "latest",
        "",
        "1.0.0-" + "a" * 200,
        "1.0.0-" + "a" * 123,
        "../1.0.0",
        "sha256:" + "0" * 64,
    ],
)
def test_a_version_has_one_spelling(tag: str) -> None:
    with pytest.raises(UsageError):
        parse_exact_version(tag)


@pytest.mark.parametrize("tag", ["0.0.0", "1.2.3", "10.20.30", "1.0.0-rc.1", "1.0.0-x-y.7"])
def test_strict_versions_are_read(tag: str) -> None:
    assert str(parse_exact_version(tag)) == tag
