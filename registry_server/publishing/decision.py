"""What a push of a version means, decided from values alone.

A version never changes: what comes later under its name is the same content, or refused. The same
content with a new signature is a new *signed form* of the release, and becomes the one that counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from expertctl.digest import Digest
from expertctl.errors import ConflictError, UsageError
from expertctl.reference import PackageName, Version

MAX_VERSION = 128
"""What an OCI tag can hold."""


class Step(StrEnum):
    """What has to be written."""

    RELEASE = "release"
    """A version that was not there."""
    SIGNATURE = "signature"
    """The release is there, and this signed form of it becomes the newest."""
    NOTHING = "nothing"
    """It was published before."""


@dataclass(frozen=True, slots=True)
class Form:
    """A signed form of a release: its package digest, and the id of the key that signed."""

    package_digest: Digest
    signer: str


@dataclass(frozen=True, slots=True)
class Released:
    """What is known of a version; forms in their order, the newest last."""

    version: str
    content_digest: Digest
    forms: tuple[Form, ...]


def exact_version(tag: str) -> Version:
    """Read the one spelling of a version that a tag may have.

    Raises:
        UsageError: for every other text: `v1.0.0`, `1.0`, `01.0.0`, digits of other scripts.
    """
    version = Version.parse(tag)
    if len(tag) > MAX_VERSION or str(version) != tag:
        raise UsageError(f"{tag[:80]!r} cannot be published: at most {MAX_VERSION} characters")
    return version


def decide(
    name: PackageName,
    wanted: Released,
    known: Sequence[Released],
    *,
    revoked: Collection[str],
) -> Step:
    """Return what a push leads to.

    ``wanted`` has one form; ``known`` is what there is under its version, whatever the case of the
    letters; ``revoked`` holds the ids of revoked keys.

    Raises:
        ConflictError: when the version is there with other content, or in another spelling.
    """
    _demand_one_spelling(name, wanted.version, known)
    if not known:
        return Step.RELEASE
    (existing,) = known
    if existing.content_digest != wanted.content_digest:
        raise ConflictError(
            f"{name}@{wanted.version} is published with other content, and versions never change",
            hint="publish your change under a higher version; `yank` hides the old one",
        )
    return _step(wanted.forms[-1], existing.forms, revoked)


def _step(form: Form, forms: Sequence[Form], revoked: Collection[str]) -> Step:
    """An older form counts again only when the newest can no longer be believed."""
    if form not in forms:
        return Step.SIGNATURE
    newest = forms[-1]
    again = form != newest and newest.signer in revoked
    return Step.SIGNATURE if again else Step.NOTHING


def _demand_one_spelling(name: PackageName, version: str, known: Sequence[Released]) -> None:
    for other in known:
        if other.version != version:
            raise ConflictError(
                f"{name}@{version} differs from the published {other.version} in case alone",
                hint=f"take another version than {other.version}",
            )
