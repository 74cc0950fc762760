"""``expertctl search`` and ``info``: what a registry offers, shown as plain text only."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from expertctl.cli.completion import complete_packages
from expertctl.cli.connection import Connection, RegistryOption, connect, has_registry
from expertctl.cli.output import JsonFlag, emit, format_fields, format_table, note, print_message
from expertctl.cli.package_view import build_manifest_rows
from expertctl.digest import Digest
from expertctl.errors import (
    BaseMismatchError,
    NotFoundError,
    RegistryError,
    TrustError,
    UsageError,
    to_single_line,
)
from expertctl.package.compatibility import check_expert_base
from expertctl.package.read import is_file_name
from expertctl.reference import PackageName, Reference, Version
from expertctl.registry.client import (
    PackageHit,
    PackageSummary,
    PackageVersion,
    VersionSummary,
    fetch_package,
    fetch_version,
    mark_revoked_hits,
    mark_revoked_versions,
)
from expertctl.registry.client import search_packages as find
from expertctl.routing.manifest_lint import find_flags
from expertctl.schema.manifest import Manifest, build_manifest
from expertctl.settings import Home, Settings, format_size, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.preference import (
    Flag,
    FlagsByDigest,
    VersionPreference,
    find_working_folder,
    flags_to_json,
    read_flags,
    read_preference,
)
from expertctl.store.refs import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.store.suspicions import SuspicionStore
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore


@dataclass(frozen=True, slots=True)
class PackageOffer:
    """The page of a package in a registry, and one of its versions."""

    host: str
    page: PackageSummary
    version: VersionSummary

    @property
    def release(self) -> PackageVersion:
        """The release of that version."""
        return self.version.release


@dataclass(frozen=True, slots=True)
class InstalledVersions:
    """The installed versions of a package, and what is known about them."""

    experts: tuple[StoredExpert, ...]
    flagged: FlagsByDigest
    preference: VersionPreference
    manifest: Manifest | None = None
    """That of the version that is used, if no registry says more."""

    @property
    def used(self) -> StoredExpert | None:
        """The version that is used where none is named."""
        return next(iter(self.preference.select_used(self.experts).values()), None)


@dataclass(frozen=True, slots=True)
class OfferAssessment:
    """What this machine knows about a version on offer."""

    manifest: Manifest
    trusted: bool
    """Whether the key of its signer is trusted here."""
    to_be_pinned: bool
    """Whether the first install from there pins the namespace's keys from its index."""
    base: str | None
    """The base on this machine that it fits."""
    flags: tuple[Flag, ...]
    """What looks suspicious compared with what is installed."""


def assess_offer(offer: PackageOffer, home: Home) -> OfferAssessment:
    """Compare a version on offer with the keys and bases of this machine."""
    what = f"{offer.host}: expert.json of {offer.page.name[:80]}"
    manifest = build_manifest(offer.version.manifest, what=what)
    record = TrustStore(home.trust).read()
    namespace = manifest.package.namespace
    known = record.find_registry(offer.host) is not None
    to_be_pinned = known and not record.is_pinned(offer.host, namespace)
    trusted = _is_trusted(manifest, offer, record)
    found = find_flags(manifest, SuspicionStore(home.suspicions))
    return OfferAssessment(
        manifest, trusted, to_be_pinned, _find_fitting_base(manifest, home), found
    )


def _is_trusted(manifest: Manifest, offer: PackageOffer, record: TrustRecord) -> bool:
    signer, digest = offer.release.signer, Digest.parse(offer.release.content_digest)
    package, host = manifest.package, offer.host
    try:
        record.authorise(signer or "", package=package, content_digest=digest, registry=host)
    except TrustError:
        return False
    return True


def _find_fitting_base(manifest: Manifest, home: Home) -> str | None:
    for base in BaseStore(home.bases).list_bases():
        try:
            check_expert_base(manifest, base.identity)
        except BaseMismatchError:
            continue
        return base.name
    return None


def build_info_document(
    package: PackageName,
    offer: PackageOffer | None,
    assessment: OfferAssessment | None,
    local: InstalledVersions,
) -> dict[str, object]:
    """Return the document of ``info --json``."""
    installed = [
        {
            "version": str(expert.version),
            "registry": expert.registry,
            "content_digest": str(expert.content_digest),
            "package_digest": str(expert.package_digest),
            "suspicions": flags_to_json(local.flagged.get(expert.content_digest, ())),
            "yanked": local.preference.find_yank_reason(expert),
            "revoked": local.preference.signers.has_revoked(expert),
            "used": local.used == expert,
        }
        for expert in local.experts
    ]
    there = None
    if offer is not None and assessment is not None:
        there = {
            "registry": offer.host,
            **asdict(offer.page),
            "shown": {
                **asdict(offer.release),
                "manifest": offer.version.manifest,
                "trusted": assessment.trusted,
                "to_be_pinned": assessment.to_be_pinned,
                "base_here": assessment.base,
                "suspicions": flags_to_json(assessment.flags),
            },
            "install": _format_install_command(offer),
        }
    return {"name": str(package), "offer": there, "installed": installed}


def format_info(
    package: PackageName,
    offer: PackageOffer | None,
    assessment: OfferAssessment | None,
    local: InstalledVersions,
) -> str:
    """Return the package, its offer and its installed versions as text."""
    rows = [["name", str(package)]]
    if offer is not None and assessment is not None:
        rows += _build_offer_rows(offer, assessment)
    elif local.manifest is not None:
        rows += build_manifest_rows(local.manifest)
    rows += [["installed", _format_installed(expert, local)] for expert in local.experts]
    suspicions = [flag for e in local.experts for flag in local.flagged.get(e.content_digest, ())]
    suspicions = suspicions or list(assessment.flags if assessment is not None else ())
    rows += [["suspicious", flag.sentence] for flag in suspicions]
    head = format_fields([(name, to_single_line(value)) for name, value in rows])
    return f"{head}\n\n{_format_versions(offer.page)}" if offer is not None else head


def _format_installed(expert: StoredExpert, local: InstalledVersions) -> str:
    yanked = local.preference.find_yank_reason(expert)
    revoked = "" if local.preference.signers.has_revoked(expert) else None
    unused = "" if local.used == expert else ", unused"
    state = _format_state(yanked=yanked, revoked=revoked)
    source = "a file" if expert.registry == LOCAL else expert.registry
    return f"{expert.version} from {source}{unused}{state}, {expert.content_digest}"


def _build_offer_rows(offer: PackageOffer, assessment: OfferAssessment) -> list[list[str]]:
    version = offer.release
    rows = [
        ["registry", offer.host],
        ["shown", f"{version.version}{_format_release_state(version)}"],
        *build_manifest_rows(assessment.manifest),
        ["base here", assessment.base or "no; `expertctl base add` adds it"],
        ["size", format_size(version.size)],
        ["owners", ", ".join(offer.page.owners)],
        ["signed by", f"{version.signer or 'nobody'}, {_format_trust(assessment)}"],
        ["content", version.content_digest],
        ["package", version.package_digest],
        [
            "install",
            _format_install_command(offer) or "refused, as the key that signed it was revoked",
        ],
    ]
    return [row for row in rows if row[1]]


def _format_trust(assessment: OfferAssessment) -> str:
    if assessment.trusted:
        return "trusted here"
    return "to be pinned at the first install" if assessment.to_be_pinned else "not trusted here"


def _format_versions(page: PackageSummary) -> str:
    rows = [
        [
            to_single_line(release.version),
            to_single_line(release.published[:10]),
            format_size(release.size),
            str(release.downloads),
            to_single_line((release.signer or "-").removeprefix("sha256:")[:12]),
            to_single_line(_format_release_state(release).strip(" ()")),
        ]
        for release in page.versions
    ]
    header = ["VERSION", "PUBLISHED", "SIZE", "DOWNLOADS", "SIGNER", "STATE"]
    return format_table(header, rows, shorten=("STATE",))


def _format_release_state(release: PackageVersion) -> str:
    return _format_state(yanked=release.yanked, revoked=release.revoked)


def _format_state(*, yanked: str | None, revoked: str | None) -> str:
    """Return why not to use a version, with the reasons; empty if there is nothing."""
    facts = [("yanked", yanked), ("key revoked", revoked)]
    reasons = [f"{what}: {why}" if why else what for what, why in facts if why is not None]
    return f" ({', '.join(reasons)})" if reasons else ""


def _format_install_command(offer: PackageOffer) -> str | None:
    """Return the command that installs the version; None where it would be refused."""
    if offer.release.revoked is not None:
        return None
    return f"expertctl install {offer.host}/{offer.page.name}@{offer.release.version}"


DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def search(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="A word of the name, description or keywords.")
    ],
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MAX_LIMIT, help="Maximum number of results.")
    ] = DEFAULT_LIMIT,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Search the packages of a registry. Names, descriptions and keywords are searched.

    Example: expertctl search sql
    """
    settings = load_settings()
    with connect(settings, None, registry) as connection:
        found = find(connection.api, text, limit=limit)
    hits = mark_revoked_hits(
        found.results, TrustStore(settings.home.trust).read(), host=connection.host
    )
    document = {
        "registry": connection.host,
        "results": [asdict(hit) for hit in hits],
        "more": found.next is not None,
    }
    if not hits:
        note(f"nothing on {connection.host} matches {text!r}{_format_login_hint(connection)}")
    emit(document, _format_hits(hits), as_json=as_json)
    if found.next is not None:
        print_message(
            f"there are more than {limit}; use `--limit {MAX_LIMIT}` or a more specific text"
        )


def info(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", autocompletion=complete_packages, help="A package, or a version of one."
        ),
    ],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a registry says about a package. Installed versions are shown, too.

    Example: expertctl info acme/sql
    """
    if is_file_name(ref):
        hint = f"`expertctl inspect {ref}` shows what is in it"
        raise UsageError(f"{ref} is a file, and info takes the name of a package", hint=hint)
    settings, wanted = load_settings(), Reference.parse(ref)
    here = _read_installed(settings.home, wanted)
    there = (_fetch_offer_if_any if here.experts else _fetch_offer)(settings, wanted, registry)
    known = assess_offer(there, settings.home) if there is not None else None
    if there is None and here.used is not None:
        store = Store(settings.home.store)
        here = replace(here, manifest=store.read_manifest(here.used))
    document = build_info_document(wanted.package, there, known, here)
    emit(document, format_info(wanted.package, there, known, here), as_json=as_json)


def _fetch_offer(settings: Settings, wanted: Reference, registry: str | None) -> PackageOffer:
    record = TrustStore(settings.home.trust).read()
    with connect(settings, wanted, registry) as connection:
        return _fetch_version(connection, wanted, record)


def _fetch_offer_if_any(
    settings: Settings, wanted: Reference, registry: str | None
) -> PackageOffer | None:
    """Return the offer for an installed package; if there is none, note why and return None."""
    if not has_registry(settings, wanted, registry):
        print_message("showing only installed versions: no registry is set")
        return None
    try:
        return _fetch_offer(settings, wanted, registry)
    except (NotFoundError, RegistryError) as error:
        print_message(f"showing only installed versions: {error.message}")
        return None


def _fetch_version(connection: Connection, wanted: Reference, record: TrustRecord) -> PackageOffer:
    """Return a package with one version: the named one, else the newest that is not withdrawn."""
    host, package = connection.host, wanted.package
    page = fetch_package(connection.api, package)
    versions = mark_revoked_versions(page.versions, record, namespace=package.namespace, host=host)
    page = replace(page, versions=versions)
    fitting = [r for r in versions if wanted.allows(Version.parse(r.version))]
    chosen = max(fitting, key=lambda r: _rank_release(r, page.latest), default=None)
    if chosen is None:
        have = ", ".join(to_single_line(release.version) for release in page.versions[:10])
        message = f"{connection.host} has no {wanted.package} that fits {wanted.constraint}"
        raise NotFoundError(message, hint=f"it has {have or 'no version'}")
    version = fetch_version(connection.api, package, Version.parse(chosen.version))
    return PackageOffer(
        host, page, replace(version, release=_copy_revocation(version.release, chosen))
    )


def _rank_release(release: PackageVersion, latest: str | None) -> tuple[bool, bool, bool, Version]:
    """Return a sort key: sound versions first; of them the registry's latest, or the newest."""
    version = Version.parse(release.version)
    return release.is_sound, release.version == latest, not version.prerelease, version


def _copy_revocation(release: PackageVersion, listed: PackageVersion) -> PackageVersion:
    return replace(release, revoked=listed.revoked)


def _read_installed(home: Home, wanted: Reference) -> InstalledVersions:
    experts = Store(home.store).scan().experts
    same = tuple(expert for expert in experts if expert.package == wanted.package)
    return InstalledVersions(
        same, read_flags(home.flagged), read_preference(home, find_working_folder())
    )


def _format_login_hint(connection: Connection) -> str:
    """Return a hint that a login may show more, if the user is not logged in."""
    if connection.logged_in:
        return ""
    return f" in public; `expertctl login {connection.host}` may show more"


def _format_hits(hits: Sequence[PackageHit]) -> str:
    rows = [
        [
            to_single_line(hit.name),
            to_single_line(hit.version),
            to_single_line("+".join(hit.kinds)),
            to_single_line(hit.base),
            str(hit.downloads),
            _format_hit_state(hit) + to_single_line(hit.description),
        ]
        for hit in hits
    ]
    header = ["NAME", "VERSION", "KIND", "BASE", "DOWNLOADS", "DESCRIPTION"]
    return format_table(header, rows, shorten=("BASE", "DESCRIPTION")) if rows else ""


def _format_hit_state(hit: PackageHit) -> str:
    if hit.revoked is None:
        return ""
    why = f": {to_single_line(hit.revoked)}" if hit.revoked else ""
    return f"(key revoked{why}) "
