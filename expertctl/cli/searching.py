"""``expertctl search`` and ``info``: what a registry offers, shown as plain text only."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from expertctl.cli.connection import Connection, RegistryOption, connected, is_any_meant
from expertctl.cli.info_view import Offer, info_document, info_text, judged
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.errors import NotFoundError, RegistryError, UsageError
from expertctl.package.read import names_file
from expertctl.plain_text import one_line
from expertctl.reference import Reference, Version
from expertctl.registry.package_pages import Hit, package_page, version_page
from expertctl.registry.package_pages import search as find
from expertctl.settings import Home, Settings, load_settings
from expertctl.store.flags import read_flagged
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store

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
    with connected(load_settings(), None, registry) as connection:
        found = find(connection.api, text, limit=limit)
    document = {
        "registry": connection.host,
        "results": [asdict(hit) for hit in found.results],
        "more": found.next is not None,
    }
    if not found.results:
        note(f"nothing on {connection.host} fits {text!r}{_unseen(connection)}")
    emit(document, _hits_text(found.results), as_json=as_json)
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
    there = (_offered_besides if here else _offered)(settings, wanted, registry)
    known = judged(there, settings.home) if there is not None else None
    flagged = read_flagged(settings.home.flagged)
    document = info_document(wanted.package, there, known, here, flagged)
    emit(document, info_text(wanted.package, there, known, here, flagged), as_json=as_json)


def _offered(settings: Settings, wanted: Reference, registry: str | None) -> Offer:
    with connected(settings, wanted, registry) as connection:
        return _ask(connection, wanted)


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


def _ask(connection: Connection, wanted: Reference) -> Offer:
    """Return a package with one of its versions: the named one, else the newest."""
    page = package_page(connection.api, wanted.package)
    fitting = [r for r in page.versions if wanted.allows(Version.parse(r.version))]
    newest = next((r for r in fitting if r.version == page.latest), None)
    chosen = newest or max(fitting, key=lambda r: Version.parse(r.version), default=None)
    if chosen is None:
        have = ", ".join(one_line(release.version) for release in page.versions[:10])
        message = f"{connection.host} has no {wanted.package} that fits {wanted.constraint}"
        raise NotFoundError(message, hint=f"it has {have or 'no version'}")
    version = version_page(connection.api, wanted.package, Version.parse(chosen.version))
    return Offer(connection.host, page, version)


def _installed(home: Home, wanted: Reference) -> list[StoredExpert]:
    experts = Store(home.store).scan().experts
    return [expert for expert in experts if expert.package == wanted.package]


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
            _cut(one_line(hit.description)),
        ]
        for hit in hits
    ]
    header = ["NAME", "VERSION", "KIND", "BASE", "DOWNLOADS", "DESCRIPTION"]
    return table(header, rows) if rows else ""


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
