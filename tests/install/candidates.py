"""What registries offer, as values."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from expertctl.errors import NotFoundError
from expertctl.install.candidate import InstallCandidate
from expertctl.install.resolve import IndexLookup
from expertctl.reference import Digest, PackageName, Reference

HOST = "hub.example"


def make_candidate(
    ref: str,
    *,
    requires: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    registry: str = HOST,
    content: str = "",
    yanked: str | None = None,
    published: datetime | None = None,
    given: bool = False,
) -> InstallCandidate:
    """A version of that name; its digests come from its ref unless ``content`` is said."""
    reference = Reference.parse(ref)
    version = reference.constraint.pinned
    assert version is not None
    return InstallCandidate(
        package=reference.package,
        version=version,
        registry=registry,
        content_digest=Digest.compute(f"content {content or ref}".encode()),
        package_digests=(Digest.compute(f"package {content or ref}".encode()),),
        requires=tuple(Reference.parse(text) for text in requires),
        conflicts=tuple(Reference.parse(text) for text in conflicts),
        published=published,
        yanked=yanked,
        is_local=given,
    )


def make_index(
    candidates: Sequence[InstallCandidate], requested: list[PackageName] | None = None
) -> IndexLookup:
    """A registry that has these, and notes what it was asked for."""

    def index(wanted: Reference, by_hand: bool) -> list[InstallCandidate]:
        package, host = wanted.package, wanted.registry
        if requested is not None:
            requested.append(package)
        found = [c for c in candidates if c.package == package and host in {None, c.registry}]
        if not found:
            raise NotFoundError(f"{host or HOST} has no {package}")
        return found

    return index
