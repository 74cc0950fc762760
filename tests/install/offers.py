"""What registries offer, as values."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.install.candidate import Candidate
from expertctl.install.resolve import Index
from expertctl.reference import PackageName, Reference

HOST = "hub.example"


def a_candidate(
    ref: str,
    *,
    requires: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    registry: str = HOST,
    content: str = "",
    yanked: str | None = None,
    published: datetime | None = None,
    given: bool = False,
) -> Candidate:
    """A version of that name; its digests come from its ref unless ``content`` is said."""
    reference = Reference.parse(ref)
    version = reference.constraint.pinned
    assert version is not None
    return Candidate(
        package=reference.package,
        version=version,
        registry=registry,
        content_digest=Digest.of(f"content {content or ref}".encode()),
        package_digests=(Digest.of(f"package {content or ref}".encode()),),
        requires=tuple(Reference.parse(text) for text in requires),
        conflicts=tuple(Reference.parse(text) for text in conflicts),
        published=published,
        yanked=yanked,
        given=given,
    )


def index_of(offered: Sequence[Candidate], asked: list[PackageName] | None = None) -> Index:
    """A registry that has these, and notes what it was asked for."""

    def index(wanted: Reference, by_hand: bool) -> list[Candidate]:
        package, host = wanted.package, wanted.registry
        if asked is not None:
            asked.append(package)
        found = [c for c in offered if c.package == package and host in {None, c.registry}]
        if not found:
            raise NotFoundError(f"{host or HOST} has no {package}")
        return found

    return index
