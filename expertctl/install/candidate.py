"""What could be installed: one version of one package, from any source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from expertctl.digest import Digest
from expertctl.package.read import PackageContents
from expertctl.reference import PackageName, Reference, Version
from expertctl.registry.index_document import IndexDocument, Release, SignedForm
from expertctl.store.ref import LOCAL, StoredExpert

Verdict = Literal["trusted", "unknown", "revoked"]
Judge = Callable[[Release, SignedForm], Verdict]
"""Says how much the key that signed a form counts here."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One version: what it requires and refuses, and its digests."""

    package: PackageName
    version: Version
    registry: str
    content_digest: Digest
    package_digests: tuple[Digest, ...]
    """Of its signed forms, the newest of a trusted key first, which is the default."""
    requires: tuple[Reference, ...] = ()
    conflicts: tuple[Reference, ...] = ()
    base: str = ""
    """The name of the base that it was made for."""
    size: int = 0
    published: datetime | None = None
    yanked: str | None = None
    """Why it was yanked; None when it was not."""
    revoked: bool = False
    """Whether every key that signed it was revoked."""
    given: bool = False
    """Whether the bytes are here already: installed, or in a file that the user named."""

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.package}@{self.version}"

    @property
    def package_digest(self) -> Digest:
        """The digest of the form that is taken where none is named."""
        return self.package_digests[0]

    def fits(self, wanted: Reference) -> bool:
        """Tell whether this is what a reference asks for."""
        return (
            self.package == wanted.package
            and wanted.registry in {None, self.registry}
            and wanted.allows(self.version, self.content_digest, *self.package_digests)
        )

    @property
    def contradicts_itself(self) -> bool:
        """Tell whether it requires another version of its own package, which can never be met."""
        own = [wanted for wanted in self.requires if wanted.package == self.package]
        return not all(wanted.allows(self.version) for wanted in own)


def published(index: IndexDocument, registry: str, judge: Judge) -> list[Candidate]:
    """Return the versions of an index, in its order."""
    return [_of_release(index.package, release, registry, judge) for release in index.releases]


def installed(expert: StoredExpert, *, yanked: str | None = None) -> Candidate:
    """Return an installed expert as a candidate; ``yanked`` says why it was yanked."""
    return Candidate(
        package=expert.package,
        version=expert.version,
        registry=expert.registry,
        content_digest=expert.content_digest,
        package_digests=(expert.package_digest,),
        requires=_read(expert.requires),
        conflicts=_read(expert.conflicts),
        base=expert.base.name,
        size=expert.size,
        yanked=yanked,
        given=True,
    )


def in_file(contents: PackageContents) -> Candidate:
    """Return what a file holds as a candidate."""
    manifest = contents.manifest
    return Candidate(
        package=manifest.package,
        version=manifest.semver,
        registry=LOCAL,
        content_digest=contents.content_digest,
        package_digests=(contents.package_digest,),
        requires=_read(manifest.composition.requires),
        conflicts=_read(manifest.composition.conflicts),
        base=manifest.base.name,
        size=contents.size,
        given=True,
    )


def _of_release(package: PackageName, release: Release, registry: str, judge: Judge) -> Candidate:
    verdicts = {form: judge(release, form) for form in reversed(release.forms)}
    good = [form for form, verdict in verdicts.items() if verdict == "trusted"]
    rest = [form for form in verdicts if form not in good]
    return Candidate(
        package=package,
        version=release.version,
        registry=registry,
        content_digest=release.content_digest,
        package_digests=tuple(form.package_digest for form in (*good, *rest)),
        requires=_read(release.requires),
        conflicts=_read(release.conflicts),
        base=release.base.name,
        size=release.size,
        published=release.published_at,
        yanked=release.yanked,
        revoked=set(verdicts.values()) == {"revoked"},
    )


def _read(texts: Sequence[str]) -> tuple[Reference, ...]:
    return tuple(Reference.parse(text) for text in texts)
