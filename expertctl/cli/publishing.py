"""``expertctl publish`` and ``yank``: change what a registry offers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.connection import RegistryOption, connected, connected_for
from expertctl.cli.output import JsonFlag, emit, human_size, note, progress, table
from expertctl.cli.target import reading
from expertctl.errors import ExpertError, UsageError, combine_errors
from expertctl.reference import Reference, Version
from expertctl.registry import package_pages
from expertctl.registry.answers import is_ours
from expertctl.registry.publish import (
    Destination,
    Parcel,
    Shipment,
    check_shipment,
    examine,
    in_order,
    plan_shipment,
    send,
)
from expertctl.registry.tokens import whoami
from expertctl.settings import Settings, load_settings
from expertctl.trust.policy import TrustStore

_NOW = {"new": "published", "signed anew": "signed anew", "published": "already published"}
_THEN = {
    "new": "would be published",
    "signed anew": "would be signed anew",
    "published": "already published",
}


def publish(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Signed .expert files.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent, and the space left.")
    ] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Publish packages to a registry. Each is checked first; a published version never changes.

    Example: expertctl publish sql-1.0.0.expert
    """
    settings = load_settings()
    trust = TrustStore(settings.home.trust)
    read = [_read(path, trust, as_json=as_json) for path in files]
    problems = [problem for _, found in read for problem in found]
    if problems and not dry_run:
        raise combine_errors("nothing was published", problems)
    parcels = in_order([parcel for parcel, _ in read])
    namespaces = {parcel.package.namespace for parcel in parcels}
    if dry_run:
        problems += _problems_there(settings, parcels, registry)
        if problems:
            raise combine_errors("this would not be published", problems)
    with connected_for(settings, namespaces, registry) as connection:
        api = connection.api if is_ours(connection.api) else None
        to = Destination(connection.oci, api, settings.home.registries)
        user = whoami(api).user if api is not None else None
        note(f"publishing to {to.host}" + (f" as {user}" if user else ""))
        shipments = [_shipped(each, to, dry_run=dry_run, as_json=as_json) for each in parcels]
    if to.api is None:
        note(f"{to.host} has no index of experts: others install this by its digest")
    words = _THEN if dry_run else _NOW
    document = {
        "registry": to.host,
        "user": user,
        "dry_run": dry_run,
        "packages": [_document(each, to.host, words[each.state]) for each in shipments],
    }
    shown = _plan_text if dry_run else _done_text
    text = "\n\n".join(shown(each, to.host, words[each.state]) for each in shipments)
    emit(document, text, as_json=as_json)


def yank(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A version: acme/sql@1.0.0.")],
    reason: Annotated[
        str, typer.Option("--reason", help="Why; everybody who asks for it is told.")
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let the version count again.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Withdraw a version from new installs. Only who has it in a lock file is still given it.

    Example: expertctl yank acme/sql@1.0.0 --reason "drops rows"
    """
    if undo == bool(reason):
        raise UsageError("say why with --reason TEXT, or take it back with --undo")
    wanted = Reference.parse(ref)
    version = exact(wanted)
    with connected(load_settings(), wanted, registry) as connection:
        if undo:
            package_pages.unyank(connection.api, wanted.package, version)
        else:
            package_pages.yank(connection.api, wanted.package, version, reason)
    name = f"{wanted.package}@{version}"
    document = {"ref": name, "registry": connection.host, "yanked": reason or None}
    done = "counts again" if undo else f"was yanked: {reason}"
    emit(document, f"{name} {done}", as_json=as_json)


def exact(wanted: Reference) -> Version:
    """Return the one version that a reference names.

    Raises:
        UsageError: when it names no version, or a range.
    """
    version = wanted.constraint.pinned
    if version is None:
        hint = f"write {wanted.package}@1.0.0"
        raise UsageError(f"{wanted} does not name one version", hint=hint)
    return version


def _read(path: Path, trust: TrustStore, *, as_json: bool) -> tuple[Parcel, list[ExpertError]]:
    with reading("checking", path, as_json=as_json) as report:
        return examine(path, trust, progress=report)


def _problems_there(
    settings: Settings, parcels: Sequence[Parcel], registry: str | None
) -> list[ExpertError]:
    """Return all that a registry has against these packages, or why it cannot be asked."""
    found = dict[str, ExpertError]()
    try:
        with connected_for(settings, {p.package.namespace for p in parcels}, registry) as there:
            api = there.api if is_ours(there.api) else None
            to = Destination(there.oci, api, settings.home.registries)
            for parcel in parcels:
                found |= {each.message: each for each in check_shipment(parcel, to)[1]}
    except ExpertError as error:
        found[error.message] = error
    return list(found.values())


def _shipped(parcel: Parcel, to: Destination, *, dry_run: bool, as_json: bool) -> Shipment:
    """Plan the upload of one package, and send it unless this is a dry run."""
    shipment = plan_shipment(parcel, to)
    if not dry_run:
        with progress(f"publishing {parcel.ref}", shipment.size, as_json=as_json) as report:
            send(shipment, to, progress=report)
    return shipment


def _document(shipment: Shipment, host: str, outcome: str) -> dict[str, object]:
    parcel, room = shipment.parcel, shipment.room
    return {
        "ref": parcel.ref,
        "path": str(parcel.path),
        "outcome": outcome,
        "content_digest": str(parcel.contents.content_digest),
        "package_digest": str(parcel.contents.package_digest),
        "signer": parcel.signer,
        "sent": [{"digest": str(digest), "size": size} for digest, size in shipment.missing],
        "bytes": shipment.size,
        "quota": room.quota if room is not None else None,
        "used": room.used if room is not None else None,
        "install": _install_line(shipment, host),
    }


def _done_text(shipment: Shipment, host: str, outcome: str) -> str:
    contents = shipment.parcel.contents
    lines = [
        f"{outcome}: {shipment.parcel.ref} on {host}, {_sent(shipment, 'sent')}",
        f"content  {contents.content_digest}",
        f"package  {contents.package_digest}",
        f"signer   {shipment.parcel.signer}",
        f"install  {_install_line(shipment, host)}",
    ]
    return "\n".join(lines)


def _plan_text(shipment: Shipment, host: str, outcome: str) -> str:
    head = f"{outcome}: {shipment.parcel.ref} on {host}, {_sent(shipment, 'to send')}"
    return "\n".join([head, *_room_lines(shipment), table(*_rows(shipment))])


def _rows(shipment: Shipment) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    missing = dict(shipment.missing)
    names = {f.digest: f.path for f in reversed(shipment.parcel.contents.layout.layers)}
    rows = [
        [
            names.get(digest, "(configuration)"),
            human_size(size),
            "travels" if digest in missing else "is there",
            digest.hex[:12],
        ]
        for digest, size in shipment.parcel.blobs
    ]
    return ["FILE", "SIZE", "STATE", "DIGEST"], rows


def _room_lines(shipment: Shipment) -> list[str]:
    room, left = shipment.room, shipment.left
    if room is None or room.quota is None or left is None:
        return []
    name = room.name
    used = f"{name}: {human_size(room.used)} of {human_size(room.quota)} used"
    fits = f", {human_size(left)} left"
    short = "; this may not fit" if shipment.size > left else ""
    return [f"{used}{fits}{short}"]


def _sent(shipment: Shipment, word: str) -> str:
    count = len(shipment.missing)
    files = f"{count} of {len(shipment.parcel.blobs)} blobs"
    return f"{files} {word}, {human_size(shipment.size)}"


def _install_line(shipment: Shipment, host: str) -> str:
    """Return the command that installs it; without an index it names the digest."""
    parcel = shipment.parcel
    if shipment.room is None:
        return f"expertctl install {host}/{parcel.package}@{parcel.contents.package_digest}"
    return f"expertctl install {host}/{parcel.ref}"
