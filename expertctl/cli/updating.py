"""``expertctl lock``, ``outdated``, ``update``: keeping a list of experts current."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.exit_codes import UNTRUSTED
from expertctl.cli.installing import (
    AcceptChanged,
    AllowBaseMismatch,
    Offline,
    age_of,
    document_of_notice,
    documents_of,
    documents_of_learnt,
    lender,
    opened_settings,
    say_notes,
    say_notices,
    target_of,
)
from expertctl.cli.output import JsonFlag, counted, emit, note, note_once, table, warn
from expertctl.errors import NotFoundError, UsageError
from expertctl.install.lock import Lock, demand_lock
from expertctl.install.notices import Notice
from expertctl.install.outdated import Standing
from expertctl.install.outdated import outdated as compare
from expertctl.install.release_age import shown
from expertctl.install.sources import open_sources
from expertctl.install.worklist import (
    Worklist,
    check_list,
    demand_project,
    find_worklist,
    install_list,
    lock_list,
    resolve_list,
)
from expertctl.reference import ANY, PackageName, Reference
from expertctl.store.pins import PROJECT


def lock(
    check: Annotated[
        bool, typer.Option("--check", help="Only tell whether expert.lock fits; no network.")
    ] = False,
    offline: Offline = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Write expert.lock for the experts.toml in this folder. Nothing is installed.

    What is locked and still fits stays; `expertctl update` moves it.

    Example: expertctl lock --check
    """
    settings = opened_settings(offline=offline)
    worklist = demand_project(settings.home, Path.cwd())
    path = worklist.file.lock_path
    if check:
        current = demand_lock(path)
        current.demand_current(worklist.file.read(), what=str(path))
        _tell_lock(path, current, [], (), written=False, as_json=as_json)
        return
    target = target_of(settings, accept_changed=accept_changed or ())
    with open_sources(settings, target.trust, tell=note_once()) as sources:
        resolved = resolve_list(worklist, target, sources, age_of(settings))
        notices = check_list(resolved, target, sources)
        changes, written = lock_list(worklist, resolved)
        sources.accept_contents(resolved.chosen, target.accept_changed)
    warn(notice.text for notice in notices)
    for text in resolved.notes:
        note(text)
    _tell_lock(path, demand_lock(path), changes, notices, written=written, as_json=as_json)


def outdated(offline: Offline = False, as_json: JsonFlag = False) -> None:
    """Show which experts are behind, yanked or revoked.

    Changes nothing that is installed. Exit 5 when the key of a version in use was revoked, or its
    content changed.

    Example: expertctl outdated
    """
    settings = opened_settings(offline=offline)
    target = target_of(settings)
    worklist = find_worklist(settings.home, Path.cwd())
    with open_sources(settings, target.trust, tell=note_once()) as sources:
        standings = compare(worklist, target, sources, age_of(settings))
    behind = [standing for standing in standings if standing.is_behind]
    if not behind:
        note(_all_current(len(standings)))
    warn(notice.text for standing in behind for notice in standing.notices)
    rows = [_row(standing) for standing in behind]
    text = table(["NAME", "CURRENT", "WANTED", "NEWEST", "NOTES"], rows) if rows else ""
    emit({"experts": [_document(standing) for standing in standings]}, text, as_json=as_json)
    if any(standing.is_refused for standing in standings):
        raise typer.Exit(UNTRUSTED)


def update(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these of the list, and what they require."),
    ] = None,
    offline: Offline = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    accept_changed: AcceptChanged = None,
    as_json: JsonFlag = False,
) -> None:
    """Install the newest versions that your list allows. Older ones stay installed.

    Example: expertctl update acme/sql
    """
    settings = opened_settings(offline=offline)
    target = target_of(settings, mismatch=allow_base_mismatch, accept_changed=accept_changed or ())
    worklist = find_worklist(settings.home, Path.cwd())
    fresh = _fresh(worklist, refs or [])
    with open_sources(settings, target.trust, tell=note_once()) as sources:
        lend = lender("updating", as_json=as_json)
        done, changes = install_list(worklist, target, sources, lend, age_of(settings), fresh=fresh)
        learnt = documents_of_learnt(done, sources)
    say_notices(done)
    say_notes(done, target)
    if not changes and not done.notices:
        note("all is current")
    document = {
        "changes": changes,
        "installed": documents_of(done.installed, settings.home),
        **learnt,
    }
    emit(document, "\n".join(changes), as_json=as_json)


def _fresh(worklist: Worklist, texts: Sequence[str]) -> list[PackageName] | None:
    """Return the packages to update; None for all."""
    if not texts:
        return None
    project = worklist.file.read()
    locked = worklist.lock()
    names = []
    for text in texts:
        reference = Reference.parse(text)
        if reference.constraint != ANY or reference.digest is not None:
            hint = f"change {worklist.file.path}, or `expertctl install {text}`"
            raise UsageError(f"{text}: `update` takes names, no versions", hint=hint)
        package = reference.package
        if project.wanted(package) is None and (locked is None or locked.locked(package) is None):
            raise NotFoundError(f"{package} is not in {worklist.file.path}", hint=_NOT_LISTED)
        names.append(package)
    return names


_NOT_LISTED = "`expertctl install` adds to the list, in a project with --save"


def _tell_lock(
    path: Path,
    lock: Lock,
    changes: Sequence[str],
    notices: Sequence[Notice],
    *,
    written: bool,
    as_json: bool,
) -> None:
    state = "written" if written else f"up to date with {PROJECT}"
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
        "notices": [document_of_notice(notice) for notice in notices],
    }
    lines = [*changes, f"{path.name} is {state}: {counted(len(lock.experts), 'expert')}"]
    emit(document, "\n".join(lines), as_json=as_json)


def _all_current(count: int) -> str:
    match count:
        case 0:
            return "the list is empty; `expertctl install acme/sql` fills it"
        case 1:
            return "the one expert is current"
        case _:
            return f"all {count} experts are current"


def _row(standing: Standing) -> list[str]:
    notes = [
        notice.kind if notice.in_use else f"{notice.ref.partition('@')[2]} {notice.kind}"
        for notice in standing.notices
    ]
    if standing.waiting is not None:
        version, until = standing.waiting
        notes.append(f"{version} waits until {shown(until)}")
    return [
        str(standing.package),
        str(standing.current),
        str(standing.wanted),
        str(standing.newest or "-"),
        ", ".join(notes),
    ]


def _document(standing: Standing) -> dict[str, object]:
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
        "notices": [document_of_notice(notice) for notice in standing.notices],
    }
