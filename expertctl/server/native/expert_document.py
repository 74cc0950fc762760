"""The document of an installed expert in ``/v1/experts``."""

from msgspec import Struct

from expertctl.engine.serving.expert_here import ExpertHere


class ExpertDocument(Struct, frozen=True, kw_only=True):
    """One version of one expert, and what it is to this server."""

    ref: str
    name: str
    version: str
    description: str
    license: str
    kind: str
    content_digest: str
    package_digest: str
    base: str
    size: int
    """Bytes of all its files."""
    fits: bool
    """Whether it was made for the base that is served."""
    revoked: bool
    """Whether the key that signed it was revoked."""
    in_memory: bool


class ExpertsDocument(Struct, frozen=True, kw_only=True):
    """All that are installed, by name and version."""

    base: str
    experts: tuple[ExpertDocument, ...]


def experts_document(experts: tuple[ExpertHere, ...], *, base: str) -> ExpertsDocument:
    """Return the document of what is installed."""
    documents = sorted((_document(one) for one in experts), key=lambda one: one.ref)
    return ExpertsDocument(base=base, experts=tuple(documents))


def _document(here: ExpertHere) -> ExpertDocument:
    stored, manifest = here.expert.stored, here.expert.manifest
    return ExpertDocument(
        ref=stored.ref,
        name=str(stored.package),
        version=str(stored.version),
        description=manifest.description,
        license=manifest.license,
        kind=manifest.kind,
        content_digest=str(stored.content_digest),
        package_digest=str(stored.package_digest),
        base=stored.base.name,
        size=stored.size,
        fits=here.fits,
        revoked=here.expert.revoked,
        in_memory=here.in_memory,
    )
