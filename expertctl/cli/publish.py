"""``expertctl publish`` and ``yank``: change what a registry offers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.connection import RegistryOption, connect, connect_for_namespaces
from expertctl.cli.output import JsonFlag, emit, format_table, note
from expertctl.cli.package_view import show_reading_progress
from expertctl.cli.progress import show_progress
from expertctl.errors import ExpertError, UsageError, combine_errors
from expertctl.reference import Reference, Version
from expertctl.registry.accounts import fetch_identity
from expertctl.registry.client import has_expert_api, unyank_version, yank_version
from expertctl.registry.publish import (
    PublishPackage,
    PublishTarget,
    UploadPlan,
    check_upload,
    examine_publish_package,
    plan_upload,
    publish_package,
    sort_by_requirements,
)
from expertctl.settings import Settings, format_size, load_settings
from expertctl.trust.trust_store import TrustStore

_OUTCOMES = {"new": "published", "signed anew": "signed anew", "published": "already published"}
_DRY_RUN_OUTCOMES = {
    "new": "would be published",
    "signed anew": "would be signed anew",
    "published": "already published",
}


def publish(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Signed .expert files.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded, and the space left.")
    ] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Publish packages to a registry. Each is checked first; a published version never changes.

    Example: expertctl publish sql-1.0.0.expert
    """
    settings = load_settings()
    trust = TrustStore(settings.home.trust)
    read = [_read_package(path, trust, as_json=as_json) for path in files]
    problems = [problem for _, found in read for problem in found]
    if problems and not dry_run:
        raise combine_errors("nothing was published", problems)
    to_publish = sort_by_requirements([source for source, _ in read])
    namespaces = {source.package.namespace for source in to_publish}
    if dry_run:
        problems += _find_registry_problems(settings, to_publish, registry)
        if problems:
            raise combine_errors("this would not be published", problems)
    with connect_for_namespaces(settings, namespaces, registry) as connection:
        api = connection.api if has_expert_api(connection.api) else None
        to = PublishTarget(connection.oci, api, settings.home.registries)
        user = fetch_identity(api).user if api is not None else None
        note(f"publishing to {to.host}" + (f" as {user}" if user else ""))
        uploads = [_publish_one(each, to, dry_run=dry_run, as_json=as_json) for each in to_publish]
    if to.api is None:
        note(f"{to.host} has no signed index, so install by digest")
    words = _DRY_RUN_OUTCOMES if dry_run else _OUTCOMES
    document = {
        "registry": to.host,
        "user": user,
        "dry_run": dry_run,
        "packages": [_build_publish_document(each, to.host, words[each.state]) for each in uploads],
    }
    shown = _format_upload_plan if dry_run else _format_published
    text = "\n\n".join(shown(each, to.host, words[each.state]) for each in uploads)
    emit(document, text, as_json=as_json)


def yank(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A version: acme/sql@1.0.0.")],
    reason: Annotated[
        str, typer.Option("--reason", help="The reason, shown to everyone who requests it.")
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Make the version available again.")] = False,
    registry: RegistryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Withdraw a version from new installs. Existing lock files still get it.

    Example: expertctl yank acme/sql@1.0.0 --reason "drops rows"
    """
    if undo == bool(reason):
        raise UsageError("give either --reason TEXT or --undo")
    wanted = Reference.parse(ref)
    version = get_exact_version(wanted)
    with connect(load_settings(), wanted, registry) as connection:
        if undo:
            unyank_version(connection.api, wanted.package, version)
        else:
            yank_version(connection.api, wanted.package, version, reason)
    name = f"{wanted.package}@{version}"
    document = {"ref": name, "registry": connection.host, "yanked": reason or None}
    done = "is available again" if undo else f"was yanked: {reason}"
    emit(document, f"{name} {done}", as_json=as_json)


def get_exact_version(wanted: Reference) -> Version:
    """Return the one version that a reference names.

    Raises:
        UsageError: when it names no version, or a range.
    """
    version = wanted.constraint.pinned
    if version is None:
        hint = f"write {wanted.package}@1.0.0"
        raise UsageError(f"{wanted} does not name one version", hint=hint)
    return version


def _read_package(
    path: Path, trust: TrustStore, *, as_json: bool
) -> tuple[PublishPackage, list[ExpertError]]:
    with show_reading_progress("checking", path, as_json=as_json) as report:
        return examine_publish_package(path, trust, progress=report)


def _find_registry_problems(
    settings: Settings, to_publish: Sequence[PublishPackage], registry: str | None
) -> list[ExpertError]:
    """Return the reasons why a registry would refuse packages, or why it cannot be reached."""
    found = dict[str, ExpertError]()
    try:
        with connect_for_namespaces(
            settings, {p.package.namespace for p in to_publish}, registry
        ) as there:
            api = there.api if has_expert_api(there.api) else None
            to = PublishTarget(there.oci, api, settings.home.registries)
            for source in to_publish:
                found |= {each.message: each for each in check_upload(source, to)[1]}
    except ExpertError as error:
        found[error.message] = error
    return list(found.values())


def _publish_one(
    source: PublishPackage, to: PublishTarget, *, dry_run: bool, as_json: bool
) -> UploadPlan:
    """Plan the upload of one package, and upload it unless this is a dry run."""
    upload = plan_upload(source, to)
    if not dry_run:
        with show_progress(f"publishing {source.ref}", upload.size, as_json=as_json) as report:
            publish_package(upload, to, progress=report)
    return upload


def _build_publish_document(upload: UploadPlan, host: str, outcome: str) -> dict[str, object]:
    source, room = upload.source, upload.namespace
    return {
        "ref": source.ref,
        "path": str(source.path),
        "outcome": outcome,
        "content_digest": str(source.contents.content_digest),
        "package_digest": str(source.contents.package_digest),
        "signer": source.signer,
        "sent": [{"digest": str(digest), "size": size} for digest, size in upload.missing],
        "bytes": upload.size,
        "quota": room.quota if room is not None else None,
        "used": room.used if room is not None else None,
        "install": _format_install_command(upload, host),
    }


def _format_published(upload: UploadPlan, host: str, outcome: str) -> str:
    contents = upload.source.contents
    lines = [
        f"{outcome}: {upload.source.ref} on {host}, {_format_sent(upload, 'sent')}",
        f"content  {contents.content_digest}",
        f"package  {contents.package_digest}",
        f"signer   {upload.source.signer}",
        f"install  {_format_install_command(upload, host)}",
    ]
    return "\n".join(lines)


def _format_upload_plan(upload: UploadPlan, host: str, outcome: str) -> str:
    head = f"{outcome}: {upload.source.ref} on {host}, {_format_sent(upload, 'to send')}"
    return "\n".join([head, *_format_quota(upload), format_table(*_build_blob_rows(upload))])


def _build_blob_rows(upload: UploadPlan) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    missing = dict(upload.missing)
    names = {f.digest: f.path for f in reversed(upload.source.contents.layout.layers)}
    rows = [
        [
            names.get(digest, "(configuration)"),
            format_size(size),
            "to upload" if digest in missing else "present",
            digest.hex[:12],
        ]
        for digest, size in upload.source.blobs
    ]
    return ["FILE", "SIZE", "STATE", "DIGEST"], rows


def _format_quota(upload: UploadPlan) -> list[str]:
    room, left = upload.namespace, upload.remaining_quota
    if room is None or room.quota is None or left is None:
        return []
    name = room.name
    used = f"{name}: {format_size(room.used)} of {format_size(room.quota)} used"
    fits = f", {format_size(left)} left"
    short = "; this may not fit" if upload.size > left else ""
    return [f"{used}{fits}{short}"]


def _format_sent(upload: UploadPlan, word: str) -> str:
    count = len(upload.missing)
    files = f"{count} of {len(upload.source.blobs)} blobs"
    return f"{files} {word}, {format_size(upload.size)}"


def _format_install_command(upload: UploadPlan, host: str) -> str:
    """Return the command that installs it; without a signed index it names the digest."""
    source = upload.source
    if upload.namespace is None:
        return f"expertctl install {host}/{source.package}@{source.contents.package_digest}"
    return f"expertctl install {host}/{source.ref}"
