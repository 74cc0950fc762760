"""How ``expertctl info`` shows a package: what the registry says, and what is known here."""

from dataclasses import asdict, dataclass

from expertctl.cli.output import human_size, table
from expertctl.cli.package_view import manifest_rows
from expertctl.digest import Digest
from expertctl.errors import BaseMismatchError, TrustError
from expertctl.package.compatibility import check_base
from expertctl.plain_text import one_line
from expertctl.reference import PackageName
from expertctl.registry.package_pages import PackagePage, Release, VersionPage
from expertctl.routing.suspicion import flags
from expertctl.schema.manifest import Manifest, manifest_of
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.flags import Flag, Flagged, flag_documents
from expertctl.store.preference import Preference
from expertctl.store.ref import StoredExpert
from expertctl.store.suspicions import Suspicions
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord


@dataclass(frozen=True, slots=True)
class Offer:
    """The page of a package in a registry, and one of its versions."""

    host: str
    page: PackagePage
    version: VersionPage

    @property
    def release(self) -> Release:
        """The release of that version."""
        return self.version.release


@dataclass(frozen=True, slots=True)
class Here:
    """The installed versions of a package, and what is known of them."""

    experts: tuple[StoredExpert, ...]
    flagged: Flagged
    preference: Preference

    @property
    def used(self) -> StoredExpert | None:
        """The version that is used where none is named."""
        return next(iter(self.preference.used(self.experts).values()), None)


@dataclass(frozen=True, slots=True)
class Known:
    """What this machine knows about a version on offer."""

    manifest: Manifest
    trusted: bool
    """Whether the key of its signer is trusted here."""
    to_be_pinned: bool
    """Whether the first install from there takes the namespace's keys from its index."""
    base: str | None
    """The base on this machine that it fits."""
    flags: tuple[Flag, ...]
    """What looks suspicious compared with what is installed."""


def judged(offer: Offer, home: Home) -> Known:
    """Compare a version on offer with what is trusted and added here."""
    what = f"{offer.host}: expert.json of {offer.page.name[:80]}"
    manifest = manifest_of(offer.version.manifest, what=what)
    record = TrustStore(home.trust).read()
    namespace = manifest.package.namespace
    known = record.registry(offer.host) is not None
    to_be_pinned = known and not record.is_pinned(offer.host, namespace)
    trusted = _is_trusted(manifest, offer, record)
    found = flags(manifest, Suspicions(home.suspicions))
    return Known(manifest, trusted, to_be_pinned, _base_here(manifest, home), found)


def _is_trusted(manifest: Manifest, offer: Offer, record: TrustRecord) -> bool:
    signer, digest = offer.release.signer, Digest.parse(offer.release.content_digest)
    package, host = manifest.package, offer.host
    try:
        record.authorise(signer or "", package=package, content_digest=digest, registry=host)
    except TrustError:
        return False
    return True


def _base_here(manifest: Manifest, home: Home) -> str | None:
    for base in BaseStore(home.bases).bases():
        try:
            check_base(manifest, base.identity)
        except BaseMismatchError:
            continue
        return base.name
    return None


def info_document(
    package: PackageName,
    offer: Offer | None,
    known: Known | None,
    here: Here,
) -> dict[str, object]:
    """Return the document of a package."""
    installed = [
        {
            "version": str(expert.version),
            "registry": expert.registry,
            "content_digest": str(expert.content_digest),
            "package_digest": str(expert.package_digest),
            "suspicions": flag_documents(here.flagged.get(expert.content_digest, ())),
            "yanked": here.preference.yank_reason(expert),
            "revoked": here.preference.signers.has_revoked(expert),
            "used": here.used == expert,
        }
        for expert in here.experts
    ]
    there = None
    if offer is not None and known is not None:
        there = {
            "registry": offer.host,
            **asdict(offer.page),
            "shown": {
                **asdict(offer.release),
                "manifest": offer.version.manifest,
                "trusted": known.trusted,
                "to_be_pinned": known.to_be_pinned,
                "base_here": known.base,
                "suspicions": flag_documents(known.flags),
            },
            "install": _install_line(offer),
        }
    return {"name": str(package), "offer": there, "installed": installed}


def info_text(
    package: PackageName,
    offer: Offer | None,
    known: Known | None,
    here: Here,
) -> str:
    """Return the same for people."""
    rows = [["name", str(package)]]
    if offer is not None and known is not None:
        rows += _offer_rows(offer, known)
    rows += [["installed", _installed_line(expert, here)] for expert in here.experts]
    odd = [flag for e in here.experts for flag in here.flagged.get(e.content_digest, ())]
    odd = odd or list(known.flags if known is not None else ())
    rows += [["suspicious", flag.sentence] for flag in odd]
    width = max(len(name) for name, _ in rows)
    head = "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in rows)
    return f"{head}\n\n{_versions(offer.page)}" if offer is not None else head


def _installed_line(expert: StoredExpert, here: Here) -> str:
    yanked = here.preference.yank_reason(expert)
    revoked = "" if here.preference.signers.has_revoked(expert) else None
    unused = "" if here.used == expert else ", unused"
    state = _state(yanked=yanked, revoked=revoked)
    return f"{expert.version} from {expert.registry}{unused}{state}, {expert.content_digest}"


def _offer_rows(offer: Offer, known: Known) -> list[list[str]]:
    version = offer.release
    rows = [
        ["registry", offer.host],
        ["shown", f"{version.version}{_state_of(version)}"],
        *manifest_rows(known.manifest),
        ["base here", known.base or "no; `expertctl base add` adds it"],
        ["size", human_size(version.size)],
        ["owners", ", ".join(offer.page.owners)],
        ["signed by", f"{version.signer or 'nobody'}, {_trust_words(known)}"],
        ["content", version.content_digest],
        ["package", version.package_digest],
        ["install", _install_line(offer) or "refused, as the key that signed it was revoked"],
    ]
    return [row for row in rows if row[1]]


def _trust_words(known: Known) -> str:
    if known.trusted:
        return "trusted here"
    return "to be pinned at the first install" if known.to_be_pinned else "not trusted here"


def _versions(page: PackagePage) -> str:
    rows = [
        [
            one_line(release.version),
            one_line(release.published[:10]),
            human_size(release.size),
            str(release.downloads),
            one_line((release.signer or "-").removeprefix("sha256:")[:12]),
            one_line(_state_of(release).strip(" ()")),
        ]
        for release in page.versions
    ]
    return table(["VERSION", "PUBLISHED", "SIZE", "DOWNLOADS", "SIGNER", "STATE"], rows)


def _state_of(release: Release) -> str:
    return _state(yanked=release.yanked, revoked=release.revoked)


def _state(*, yanked: str | None, revoked: str | None) -> str:
    """Say what speaks against a version, with the reasons; empty when nothing does."""
    facts = [("yanked", yanked), ("key revoked", revoked)]
    told = [f"{what}: {why}" if why else what for what, why in facts if why is not None]
    return f" ({', '.join(told)})" if told else ""


def _install_line(offer: Offer) -> str | None:
    """Return the command that installs the version; None where it would be refused."""
    if offer.release.revoked is not None:
        return None
    return f"expertctl install {offer.host}/{offer.page.name}@{offer.release.version}"
