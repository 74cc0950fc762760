"""``expertctl lock``, ``outdated``, ``update`` and ``why``: the list of wanted experts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.completion import complete_experts
from expertctl.cli.install import (
    AcceptChanged,
    AllowBaseMismatch,
    Offline,
    build_findings_document,
    build_install_context,
    build_installed_documents,
    build_notice_document,
    get_release_age,
    load_command_settings,
    make_progress_factory,
    print_notes,
    print_notices,
)
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_table,
    make_note_once,
    note,
    warn,
)
from expertctl.cli.process import UNTRUSTED
from expertctl.errors import NotFoundError, UsageError
from expertctl.install.candidate import format_moment
from expertctl.install.installed_experts import InstallReason, Requirer, SignerTrust
from expertctl.install.installed_experts import explain_install as explain
from expertctl.install.notices import Notice
from expertctl.install.outdated import OutdatedEntry
from expertctl.install.outdated import find_outdated as compare
from expertctl.install.project_file import LockFile, require_lock
from expertctl.install.requirement_list import (
    RequirementList,
    check_requirement_list,
    find_requirement_list,
    install_requirement_list,
    lock_requirement_list,
    require_project,
    resolve_requirement_list,
)
from expertctl.install.sources import open_sources
from expertctl.reference import ANY, PackageName, Reference, parse_target
from expertctl.settings import load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.pins import PROJECT_FILE
from expertctl.store.preference import (
    VersionUsage,
    describe_version_usage,
    find_working_folder,
    read_preference,
)
from expertctl.store.refs import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore


def lock(
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check whether expert.lock is up to date; no network."),
    ] = False,
    offline: Offline = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Write expert.lock for the experts.toml in this folder. Nothing is installed.

    Locked versions that still fit are kept; `expertctl update` updates them.

    Example: expertctl lock --check
    """
    settings = load_command_settings(offline=offline)
    worklist = require_project(settings.home, Path.cwd())
    path = worklist.file.lock_path
    if check:
        current = require_lock(path)
        current.check_current(worklist.file.read(), what=str(path))
        _print_lock(path, current, [], (), written=False, as_json=as_json)
        return
    target = build_install_context(settings, accept_changed=accept_changed or ())
    with open_sources(settings, target.trust, notify=make_note_once()) as sources:
        resolved = resolve_requirement_list(worklist, target, sources, get_release_age(settings))
        notices = check_requirement_list(resolved, target, sources)
        changes, written = lock_requirement_list(worklist, resolved)
        sources.accept_contents(resolved.chosen, target.accept_changed)
    warn(notice.text for notice in notices)
    for text in resolved.notes:
        note(text)
    _print_lock(path, require_lock(path), changes, notices, written=written, as_json=as_json)


def outdated(offline: Offline = False, as_json: JsonFlag = False) -> None:
    """Show which experts are behind, yanked or revoked.

    Nothing is changed. Exit 5 when the key of a version in use was revoked, or its content changed.

    Example: expertctl outdated
    """
    settings = load_command_settings(offline=offline)
    target = build_install_context(settings)
    worklist = find_requirement_list(settings.home, Path.cwd())
    with open_sources(settings, target.trust, notify=make_note_once()) as sources:
        standings = compare(worklist, target, sources, get_release_age(settings))
    behind = [standing for standing in standings if standing.is_behind]
    if not behind:
        note(_format_all_current(len(standings)))
    warn(notice.text for standing in behind for notice in standing.notices)
    rows = [_format_standing(standing) for standing in behind]
    text = format_table(["NAME", "CURRENT", "WANTED", "NEWEST", "NOTES"], rows) if rows else ""
    emit(
        {"experts": [_build_standing_document(standing) for standing in standings]},
        text,
        as_json=as_json,
    )
    if any(standing.is_refused for standing in standings):
        raise typer.Exit(UNTRUSTED)


def update(
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_experts,
            help="Update only these, and what they require.",
        ),
    ] = None,
    offline: Offline = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Install the newest versions that your list allows. Older ones stay installed.

    Example: expertctl update acme/sql
    """
    settings = load_command_settings(offline=offline)
    target = build_install_context(
        settings, mismatch=allow_base_mismatch, accept_changed=accept_changed or ()
    )
    worklist = find_requirement_list(settings.home, Path.cwd())
    fresh = _parse_update_names(worklist, refs or [])
    with open_sources(settings, target.trust, notify=make_note_once()) as sources:
        open_progress = make_progress_factory("updating", as_json=as_json)
        done, changes = install_requirement_list(
            worklist, target, sources, open_progress, get_release_age(settings), fresh=fresh
        )
        learnt = build_findings_document(done, sources)
    print_notices(done)
    print_notes(done, target)
    if not changes and not done.notices:
        note("everything is up to date")
    document = {
        "changes": changes,
        "installed": build_installed_documents(done.installed, settings.home),
        **learnt,
    }
    emit(document, "\n".join(changes), as_json=as_json)


def _parse_update_names(
    worklist: RequirementList, texts: Sequence[str]
) -> list[PackageName] | None:
    """Return the packages to update; None for all."""
    if not texts:
        return None
    project = worklist.file.read()
    locked = worklist.load_lock()
    names = []
    for text in texts:
        reference = Reference.parse(text)
        if reference.constraint != ANY or reference.digest is not None:
            hint = f"change {worklist.file.path}, or `expertctl install {text}`"
            raise UsageError(f"{text}: `update` takes names without versions", hint=hint)
        package = reference.package
        if project.find(package) is None and (locked is None or locked.find(package) is None):
            raise NotFoundError(f"{package} is not in {worklist.file.path}", hint=_NOT_LISTED)
        names.append(package)
    return names


_NOT_LISTED = "`expertctl install` adds to the list, in a project with --save"


def _print_lock(
    path: Path,
    lock: LockFile,
    changes: Sequence[str],
    notices: Sequence[Notice],
    *,
    written: bool,
    as_json: bool,
) -> None:
    state = "written" if written else f"up to date with {PROJECT_FILE}"
    experts = [
        {
            "name": str(locked.package),
            "version": str(locked.version),
            "registry": locked.registry,
            "package_digest": str(locked.package_digest),
            "content_digest": str(locked.content_digest),
            "base": locked.base,
        }
        for locked in lock.experts
    ]
    document = {
        "path": str(path),
        "written": written,
        "changes": list(changes),
        "experts": experts,
        "notices": [build_notice_document(notice) for notice in notices],
    }
    lines = [*changes, f"{path.name} is {state}: {format_count(len(lock.experts), 'expert')}"]
    emit(document, "\n".join(lines), as_json=as_json)


def _format_all_current(count: int) -> str:
    match count:
        case 0:
            return "nothing to update: `expertctl install acme/sql` adds to the list"
        case 1:
            return "the one expert of the list is up to date"
        case _:
            return f"all {count} experts of the list are up to date"


def _format_standing(standing: OutdatedEntry) -> list[str]:
    notes = [
        notice.kind if notice.in_use else f"{notice.ref.partition('@')[2]} {notice.kind}"
        for notice in standing.notices
    ]
    if standing.waiting is not None:
        version, until = standing.waiting
        notes.append(f"{version} waits until {format_moment(until)}")
    return [
        str(standing.package),
        str(standing.current),
        str(standing.wanted),
        str(standing.newest or "-"),
        ", ".join(notes),
    ]


def _build_standing_document(standing: OutdatedEntry) -> dict[str, object]:
    waiting = None
    if standing.waiting is not None:
        version, until = standing.waiting
        waiting = {"version": str(version), "until": until.isoformat()}
    return {
        "name": str(standing.package),
        "current": str(standing.current),
        "wanted": str(standing.wanted),
        "newest": str(standing.newest) if standing.newest else None,
        "waiting": waiting,
        "yanked": standing.yanked,
        "revoked": any(n.kind == "revoked" and n.in_use for n in standing.notices),
        "changed": any(n.kind == "changed" and n.in_use for n in standing.notices),
        "notices": [build_notice_document(notice) for notice in standing.notices],
    }


def why(
    ref: Annotated[
        str,
        typer.Argument(metavar="REF", help="An installed expert.", autocompletion=complete_experts),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Show why an expert is installed. Shows what requires it, who signed it, and what needs it.

    Example: expertctl why acme/sql
    """
    home = load_settings().home
    preference = read_preference(home, find_working_folder())
    store = Store(home.store, preference)
    expert, now = store.find(parse_target(ref)), store.scan()
    if expert not in now.experts:
        raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile")
    warn([*(damaged.warning for damaged in now.damaged), *preference.pins.problems])
    found = explain(
        expert,
        installed=now.experts,
        bases=BaseStore(home.bases).list_bases(),
        trust=TrustStore(home.trust).read(),
    )
    usage = describe_version_usage(expert, now.experts, preference)
    emit(
        {**_build_why_document(found), **asdict(usage)}, _format_why(found, usage), as_json=as_json
    )


def _build_why_document(found: InstallReason) -> dict[str, object]:
    expert, base = found.expert, found.expert.base
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "registry": expert.registry,
        "required_by": [_build_requirer_document(requirer) for requirer in found.required_by],
        "breaks": list(found.breaks),
        "signature": _build_vouching_document(found.vouching) if found.vouching else None,
        "base": {"name": base.name, "revision": base.revision, "here": list(found.bases)},
        "warnings": list(expert.warnings),
    }


def _build_requirer_document(requirer: Requirer) -> dict[str, object]:
    chain = [{"ref": link.ref, "requires": link.wanted} for link in requirer.chain]
    return {"ref": requirer.ref, "chain": chain}


def _build_vouching_document(vouching: SignerTrust) -> dict[str, object]:
    grant = vouching.grant
    return {
        "key_id": vouching.key_id,
        "name": vouching.name,
        "trusted": grant is not None and vouching.revoked is None,
        "namespace": grant.namespace if grant else None,
        "only_listed_content": grant is not None and grant.content_digests is not None,
        "revoked": vouching.revoked,
    }


def _format_why(found: InstallReason, usage: VersionUsage) -> str:
    expert = found.expert
    lines = [expert.ref, *_format_usage(expert, usage), *_format_requirers(found)]
    lines.append(_format_source(expert.registry))
    lines.append(_format_vouching(found.vouching, expert.package.namespace))
    lines.append(_format_base(found))
    if found.breaks:
        lines.append(f"without it these will not run: {', '.join(found.breaks)}")
    else:
        lines.append("nothing else needs it to run")
    return "\n  ".join([*lines, *(f"warning: {warning}" for warning in expert.warnings)])


def _format_usage(expert: StoredExpert, usage: VersionUsage) -> list[str]:
    """Return whether this version is used where none is named; nothing where that is clear."""
    if usage.used and not (usage.others or usage.pinned) and usage.yanked is None:
        return []
    if usage.used:
        line = "used if no version is named"
    elif usage.used_instead is not None:
        line = f"not used if no version is named: {usage.used_instead} is"
    else:
        line = "used only if named: it is a prerelease"
    if usage.pinned is not None:
        line += f"; pinned by {usage.pinned}"
    if usage.yanked is not None:
        why = f": {usage.yanked}" if usage.yanked else ""
        line += f"; it was yanked{why}, `expertctl remove {expert.ref}` removes it"
    return [line]


def _format_requirers(found: InstallReason) -> list[str]:
    """Format each chain from the requirer down: ``acme/top@1.0.0 → acme/middle@^1 → acme/sql``."""
    chains = [
        " → ".join([requirer.ref, *(link.wanted for link in requirer.chain)])
        for requirer in found.required_by
    ]
    return [f"required by {chain}" for chain in chains] or ["nothing requires it"]


def _format_source(registry: str) -> str:
    return "installed from a file" if registry == LOCAL else f"installed from {registry}"


def _format_vouching(vouching: SignerTrust | None, namespace: str) -> str:
    if vouching is None:
        return "not signed: installed with --allow-unsigned"
    key = f"{vouching.name or 'a key'} ({vouching.key_id})"
    if vouching.revoked is not None:
        return f"signed by {key}, which was revoked: {vouching.revoked or 'no reason given'}"
    if vouching.grant is None:
        return f"signed by {key}, which is no longer trusted for {namespace}/*"
    limits = ", for listed contents only" if vouching.grant.content_digests is not None else ""
    return f"signed by {key}, which is trusted for {namespace}/*{limits}"


def _format_base(found: InstallReason) -> str:
    base = found.expert.base
    label = base.name + (f"@{base.revision[:12]}" if base.revision else "")
    if not found.bases:
        return f"made for the base {label}, which is not registered"
    others = [name for name in found.bases if name != base.name]
    return f"made for the base {label}, which is registered{f' as {others[0]}' if others else ''}"
