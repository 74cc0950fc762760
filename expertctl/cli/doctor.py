"""``expertctl doctor``: what is wrong, and the way out; ``--memory``: what holds memory."""

from typing import Annotated

import typer

from expertctl.cli.exit_codes import FAILURE, UNREACHABLE, UNTRUSTED
from expertctl.cli.output import JsonFlag, counted, emit, human_size, note_once, progress
from expertctl.errors import ExpertError, OfflineError
from expertctl.install.doctor import Diagnosis, Finding, ask_registries, blob_bytes, examine
from expertctl.install.sources import open_sources
from expertctl.plain_text import one_line
from expertctl.registry.index_store import IndexStore
from expertctl.settings import Settings, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.store import Store
from expertctl.store.suspicions import Suspicions
from expertctl.trust.policy import TrustStore


def doctor(
    memory: Annotated[
        bool, typer.Option("--memory", help="Say what holds which memory, and check nothing.")
    ] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Also ask registries what was revoked or yanked.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check everything that is installed, byte by byte.

    Exit 1 when something is broken, 5 when a key was revoked or a version changed, 6 when a
    registry could not be asked.

    Example: expertctl doctor --online --json
    """
    settings = load_settings()
    if memory:
        _memory(settings, as_json=as_json)
    else:
        _health(settings, online=online, as_json=as_json)


def _memory(settings: Settings, *, as_json: bool) -> None:
    from expertctl.cli.memory_view import memory_document, memory_text
    from expertctl.engine.memory_report import memory_report

    report = memory_report(settings.home, budget=settings.memory_budget)
    emit(memory_document(report), memory_text(report), as_json=as_json)


def _health(settings: Settings, *, online: bool, as_json: bool) -> None:
    home = settings.home
    store = Store(home.store)
    said = _asked(settings, store) if online else ()
    with progress("hashing", blob_bytes(store), as_json=as_json) as report:
        diagnosis = examine(
            store,
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            indexes=IndexStore(home.registries),
            catalogue=Catalogue(home.index),
            suspicions=Suspicions(home.suspicions),
            online=said,
            progress=report,
        )
    emit(_document(diagnosis), _text(diagnosis), as_json=as_json)
    if diagnosis.untrusted:
        raise typer.Exit(UNTRUSTED)
    if diagnosis.unchecked:
        raise typer.Exit(UNREACHABLE)
    if not diagnosis.healthy:
        raise typer.Exit(FAILURE)


def _asked(settings: Settings, store: Store) -> tuple[Finding, ...]:
    if settings.offline:
        raise OfflineError(
            "`doctor --online` asks registries, and expertctl is offline",
            hint="leave out EXPERT_OFFLINE and the setting `offline`",
        )
    trust = TrustStore(settings.home.trust)
    try:
        with open_sources(settings, trust, tell=note_once()) as sources:
            return ask_registries(store, sources)
    except ExpertError as error:  # `examine` reports a file that cannot be read
        problem = f"none was asked: {one_line(error.message)}"
        return (Finding("registries", problem, error.hint, broken=False, unchecked=True),)


def _document(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "healthy": diagnosis.healthy,
        "experts": diagnosis.experts,
        "blobs": diagnosis.blobs,
        "size": diagnosis.size,
        "unchecked": diagnosis.unchecked,
        "findings": [
            {
                "subject": f.subject,
                "problem": f.problem,
                "hint": f.hint,
                "broken": f.broken,
                "untrusted": f.untrusted,
                "unchecked": f.unchecked,
            }
            for f in diagnosis.findings
        ],
    }


def _text(diagnosis: Diagnosis) -> str:
    size = human_size(diagnosis.size)
    things = f"{counted(diagnosis.experts, 'expert')}, {counted(diagnosis.blobs, 'file')}"
    looked = f"checked {things}, {size}"
    verdict = "nothing is broken" if diagnosis.healthy else "something is broken"
    if diagnosis.unchecked:
        verdict += ", but not every registry could be asked"
    return "\n".join([*map(_line, diagnosis.findings), f"{looked}: {verdict}"])


def _line(finding: Finding) -> str:
    kind = "broken" if finding.broken else "unchecked" if finding.unchecked else "note"
    hint = f"\n  hint: {finding.hint}" if finding.hint else ""
    return f"{kind}: {finding.subject}: {finding.problem}{hint}"
