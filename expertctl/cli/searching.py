"""``expertctl search`` and ``info``: what a registry offers, shown as plain text only."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import typer

from expertctl.cli.connection import Connection, RegistryOption, connected, is_any_meant
from expertctl.cli.info_view import Here, Offer, info_document, info_text, judged
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.errors import NotFoundError, RegistryError, UsageError
from expertctl.package.read import names_file
from expertctl.plain_text import one_line
from expertctl.reference import Reference, Version
from expertctl.registry.package_pages import (
    Hit,
    Release,
    marked,
    package_page,
    version_page,
    with_revocations,
)
from expertctl.registry.package_pages import search as find
from expertctl.settings import Home, Settings, load_settings
from expertctl.store.flags import read_flagged
from expertctl.store.preference import read_preference, working_folder
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

LIMIT = 20
MAX_LIMIT = 100
_WIDEST = 60
"""Most letters of a description in a table."""


def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A word of what it is or does.")],
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=MAX_LIMIT, help="How many to show.")
    ] = LIMIT,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Search the packages of a registry. Names, descriptions and keywords are searched.

    Example: expertctl search sql
    """
    settings = load_settings()
    with connected(settings, None, registry) as connection:
        found = find(connection.api, text, limit=limit)
    hits = marked(found.results, TrustStore(settings.home.trust).read(), host=connection.host)
    document = {
        "registry": connection.host,
        "results": [asdict(hit) for hit in hits],
        "more": found.next is not None,
    }
    if not hits:
        note(f"nothing on {connection.host} fits {text!r}{_unseen(connection)}")
    emit(document, _hits_text(hits), as_json=as_json)
    if found.next is not None:
        note(f"there are more than {limit}; `--limit {MAX_LIMIT}`, or say more exactly what")


def info(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A package, or a version of one.")],
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a registry says about a package. What is here of it is shown, too.

    Example: expertctl info acme/sql
    """
    if names_file(ref):
        hint = f"`expertctl inspect {ref}` shows what is in it"
        raise UsageError(f"{ref} is a file, and info tells of packages by their names", hint=hint)
    settings, wanted = load_settings(), Reference.parse(ref)
    here = _installed(settings.home, wanted)
    there = (_offered_besides if here.experts else _offered)(settings, wanted, registry)
    known = judged(there, settings.home) if there is not None else None
    document = info_document(wanted.package, there, known, here)
    emit(document, info_text(wanted.package, there, known, here), as_json=as_json)


def _offered(settings: Settings, wanted: Reference, registry: str | None) -> Offer:
    record = TrustStore(settings.home.trust).read()
    with connected(settings, wanted, registry) as connection:
        return _ask(connection, wanted, record)


def _offered_besides(settings: Settings, wanted: Reference, registry: str | None) -> Offer | None:
    """Return the offer for an installed package; if there is none, say why and return None."""
    if not is_any_meant(settings, wanted, registry):
        note("only what is installed: no registry is set")
        return None
    try:
        return _offered(settings, wanted, registry)
    except (NotFoundError, RegistryError) as error:
        note(f"only what is installed: {error.message}")
        return None


def _ask(connection: Connection, wanted: Reference, record: TrustRecord) -> Offer:
    """Return a package with one of its versions: the named one, else the newest that is sound."""
    host, package = connection.host, wanted.package
    page = package_page(connection.api, package)
    versions = with_revocations(page.versions, record, namespace=package.namespace, host=host)
    page = replace(page, versions=versions)
    fitting = [r for r in versions if wanted.allows(Version.parse(r.version))]
    chosen = max(fitting, key=lambda r: _worth(r, page.latest), default=None)
    if chosen is None:
        have = ", ".join(one_line(release.version) for release in page.versions[:10])
        message = f"{connection.host} has no {wanted.package} that fits {wanted.constraint}"
        raise NotFoundError(message, hint=f"it has {have or 'no version'}")
    version = version_page(connection.api, package, Version.parse(chosen.version))
    return Offer(host, page, replace(version, release=_same_revocation(version.release, chosen)))


def _worth(release: Release, latest: str | None) -> tuple[bool, bool, bool, Version]:
    """Return a sort key: sound versions first; of them the registry's latest, or the newest."""
    version = Version.parse(release.version)
    return release.is_sound, release.version == latest, not version.prerelease, version


def _same_revocation(release: Release, listed: Release) -> Release:
    return replace(release, revoked=listed.revoked)


def _installed(home: Home, wanted: Reference) -> Here:
    experts = Store(home.store).scan().experts
    same = tuple(expert for expert in experts if expert.package == wanted.package)
    return Here(same, read_flagged(home.flagged), read_preference(home, working_folder()))


def _unseen(connection: Connection) -> str:
    """Say that a login may show more, if the user is not logged in."""
    if connection.logged_in:
        return ""
    return f" for everybody to read; `expertctl login {connection.host}` may show more"


def _hits_text(hits: Sequence[Hit]) -> str:
    rows = [
        [
            one_line(hit.name),
            one_line(hit.version),
            one_line("+".join(hit.kinds)),
            one_line(hit.base),
            str(hit.downloads),
            _cut(_state(hit) + one_line(hit.description)),
        ]
        for hit in hits
    ]
    header = ["NAME", "VERSION", "KIND", "BASE", "DOWNLOADS", "DESCRIPTION"]
    return table(header, rows) if rows else ""


def _state(hit: Hit) -> str:
    if hit.revoked is None:
        return ""
    why = f": {one_line(hit.revoked)}" if hit.revoked else ""
    return f"(key revoked{why}) "


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
