"""``expertctl doctor`` and ``gc``: check what is installed, show memory, delete unused files."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_table,
    make_note_once,
)
from expertctl.cli.process import FAILURE, UNREACHABLE, UNTRUSTED
from expertctl.cli.progress import show_progress
from expertctl.errors import ExpertError, OfflineError, format_install_command, to_single_line
from expertctl.install.doctor import (
    Diagnosis,
    Finding,
    count_blob_bytes,
    examine_store,
    query_registries,
)
from expertctl.install.sources import open_sources
from expertctl.registry.index_store import IndexStore
from expertctl.settings import Settings, format_limit, format_size, load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.quantised_cache import collect_garbage, find_garbage
from expertctl.store.store import Store
from expertctl.store.suspicions import SuspicionStore
from expertctl.trust.trust_store import TrustStore

if TYPE_CHECKING:
    from expertctl.engine.memory.process_registry import (
        BaseSize,
        EngineRecord,
        MemoryLimits,
        MemoryReport,
    )


_SHOWN_EXPERTS = 12
"""Most experts that are shown."""
_TOKENS = 1000
_PURPOSES = ("base", "experts", "kv", "buffers")
_DTYPES = ("float32", "bf16", "int8", "int4", "gguf")


def build_memory_document(report: "MemoryReport") -> dict[str, object]:
    """Return the document of ``doctor --memory --json``; sizes in bytes."""
    limits = report.limits
    return {
        "limits": {
            "machine": limits.machine,
            "container": limits.container,
            "unused": limits.unused,
            "budget": limits.budget,
            "budget_chosen": limits.chosen,
        },
        "engines": [_build_engine_document(engine) for engine in report.engines],
        "runs": [{"size": run.size, "waits": run.is_waiting} for run in report.runs],
        "bases": [
            {
                "name": base.name,
                "on_disk": base.on_disk,
                "in_memory": dict(base.weights),
                "kv_per_token": base.token,
            }
            for base in report.bases
        ],
        "experts": [{"ref": one.ref, "in_memory": one.nbytes} for one in report.experts],
        "caches": [
            {"what": cache.what, "path": str(cache.path), "size": cache.nbytes}
            for cache in report.caches
        ],
    }


def format_memory_report(report: "MemoryReport") -> str:
    """Return the memory report as text, at most 80 columns wide."""
    parts = [
        _format_limits(report.limits),
        _format_engines(report.engines),
        *_format_waiting_runs(report),
        *_format_bases(report),
        *_format_experts(report),
        *_format_caches(report),
    ]
    if not report.has_sizes:
        command = format_install_command("engine")
        parts.append(f"the memory sizes of bases and experts need the engine:\n  {command}")
    return "\n\n".join(parts)


def _build_engine_document(engine: "EngineRecord") -> dict[str, object]:
    return {
        "pid": engine.pid,
        "answering": engine.answering,
        "budget": engine.limit,
        "held": dict(engine.held),
        "total": engine.total,
        "resident_set": engine.resident_bytes,
        "base": engine.base,
        "experts": list(engine.experts),
    }


def _format_limits(limits: "MemoryLimits") -> str:
    free = "" if limits.unused is None else f", {format_size(limits.unused)} of it unused"
    lines = [("machine", f"{format_size(limits.machine)}{free}")]
    if limits.container is not None:
        lines.append(("container", format_size(limits.container)))
    whose = "chosen" if limits.chosen else "the default, four fifths of that"
    lines.append(("budget", f"{format_limit(limits.budget)} for each engine: {whose}"))
    return "\n".join(f"{name:<9}  {text}" for name, text in lines)


def _format_engines(engines: Sequence["EngineRecord"]) -> str:
    if not engines:
        return "no engine of this home holds memory"
    header = ("PROCESS", "NOW", "BASE", "EXPERTS", "KV", "BUFFERS", "ALL", "RESIDENT")
    rows = [
        (
            str(engine.pid),
            "answers" if engine.answering else "is idle",
            *(format_size(engine.held.get(purpose, 0)) for purpose in _PURPOSES),
            format_size(engine.total),
            _format_size(engine.resident_bytes),
        )
        for engine in engines
    ]
    return "\n".join([format_table(header, rows), *map(_format_engine_contents, engines)])


def _format_engine_contents(engine: "EngineRecord") -> str:
    experts = ", ".join(engine.experts) or "no expert"
    return f"  {engine.pid}: {engine.base}, last with {experts}"


def _format_waiting_runs(report: "MemoryReport") -> Iterator[str]:
    """Yield a line about the queue of runs, if there is one."""
    waiting = [run.size for run in report.runs if run.is_waiting]
    inside = [run.size for run in report.runs if not run.is_waiting]
    if waiting:
        held = f"{format_count(len(inside), 'run')} with {format_size(sum(inside))}"
        queue = f"{len(waiting)} for {format_size(sum(waiting))}"
        yield f"waiting for memory: {queue}, behind {held}"


def _format_bases(report: "MemoryReport") -> Iterator[str]:
    if report.bases:
        header = ("BASE", "ON DISK", *map(str.upper, _DTYPES), f"{_TOKENS:,} TOKENS")
        rows = [_format_base_row(base) for base in report.bases]
        yield format_table(header, rows, shorten=("BASE",))


def _format_base_row(base: "BaseSize") -> tuple[str, ...]:
    weights = (_format_size(base.weights.get(dtype)) for dtype in _DTYPES)
    tokens = None if base.token is None else _TOKENS * base.token
    return (
        base.name,
        format_size(base.on_disk),
        *weights,
        _format_size(tokens),
    )


def _format_experts(report: "MemoryReport") -> Iterator[str]:
    if not report.experts:
        return
    shown, rest = report.experts[:_SHOWN_EXPERTS], report.experts[_SHOWN_EXPERTS:]
    rows = [(one.ref, _format_size(one.nbytes)) for one in shown]
    if rest:
        size = format_size(sum(one.nbytes or 0 for one in rest))
        rows.append((f"and {format_count(len(rest), 'smaller one')}", size))
    yield format_table(("EXPERT", "IN MEMORY"), rows)


def _format_caches(report: "MemoryReport") -> Iterator[str]:
    if report.caches:
        rows = [(cache.what, format_size(cache.nbytes), str(cache.path)) for cache in report.caches]
        yield format_table(("KEPT ON THE DISK", "SIZE", "MAY BE DELETED"), rows)


def _format_size(size: int | None) -> str:
    return "-" if size is None else format_size(size)


def doctor(
    memory: Annotated[
        bool, typer.Option("--memory", help="Show memory use instead of checking.")
    ] = False,
    online: Annotated[
        bool,
        typer.Option(
            "--online", help="Also query registries for revoked keys and yanked versions."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check everything that is installed, byte by byte.

    Exit 1 when something is broken, 5 when a key was revoked or a version changed, 6 when a
    registry could not be reached.

    Example: expertctl doctor --online --json
    """
    settings = load_settings()
    if memory:
        _report_memory(settings, as_json=as_json)
    else:
        _check_health(settings, online=online, as_json=as_json)


def _report_memory(settings: Settings, *, as_json: bool) -> None:
    from expertctl.engine.memory.process_registry import build_memory_report

    report = build_memory_report(settings.home, budget=settings.memory_budget)
    emit(build_memory_document(report), format_memory_report(report), as_json=as_json)


def _check_health(settings: Settings, *, online: bool, as_json: bool) -> None:
    home = settings.home
    store = Store(home.store)
    registry_reports = _query_registries(settings, store) if online else ()
    with show_progress("hashing", count_blob_bytes(store), as_json=as_json) as report:
        diagnosis = examine_store(
            store,
            bases=BaseStore(home.bases),
            trust=TrustStore(home.trust),
            indexes=IndexStore(home.registries),
            catalogue=Catalogue(home.index),
            suspicions=SuspicionStore(home.suspicions),
            online=registry_reports,
            progress=report,
        )
    emit(_build_health_document(diagnosis), _format_diagnosis(diagnosis), as_json=as_json)
    if diagnosis.untrusted:
        raise typer.Exit(UNTRUSTED)
    if diagnosis.unchecked:
        raise typer.Exit(UNREACHABLE)
    if not diagnosis.healthy:
        raise typer.Exit(FAILURE)


def _query_registries(settings: Settings, store: Store) -> tuple[Finding, ...]:
    if settings.offline:
        raise OfflineError(
            "`doctor --online` queries registries, and expertctl is offline",
            hint="leave out EXPERT_OFFLINE and the setting `offline`",
        )
    trust = TrustStore(settings.home.trust)
    try:
        with open_sources(settings, trust, notify=make_note_once()) as sources:
            return query_registries(store, sources)
    except ExpertError as error:  # `examine` reports a file that cannot be read
        problem = f"none was queried: {to_single_line(error.message)}"
        return (Finding("registries", problem, error.hint, broken=False, unchecked=True),)


def _build_health_document(diagnosis: Diagnosis) -> dict[str, object]:
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


def _format_diagnosis(diagnosis: Diagnosis) -> str:
    size = format_size(diagnosis.size)
    things = f"{format_count(diagnosis.experts, 'expert')}, {format_count(diagnosis.blobs, 'file')}"
    looked = f"checked {things}, {size}"
    verdict = "nothing is broken" if diagnosis.healthy else "something is broken"
    if diagnosis.unchecked:
        verdict += ", but not every registry could be reached"
    return "\n".join([*map(_format_finding, diagnosis.findings), f"{looked}: {verdict}"])


def _format_finding(finding: Finding) -> str:
    kind = "broken" if finding.broken else "unchecked" if finding.unchecked else "note"
    hint = f"\n  hint: {finding.hint}" if finding.hint else ""
    return f"{kind}: {finding.subject}: {finding.problem}{hint}"


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete files that nothing needs. Leftovers of interrupted installs are included.

    Example: expertctl gc --dry-run
    """
    home = load_settings().home
    store, bases = Store(home.store), BaseStore(home.bases)
    freed = find_garbage(store, bases) if dry_run else collect_garbage(store, bases)
    document = {
        "dry_run": dry_run,
        "blobs": [str(digest) for digest in freed.blobs],
        "folders": [str(folder) for folder in freed.folders],
        "copies": [str(copy) for copy in freed.copies],
        "size": freed.size,
    }
    verb = "would free" if dry_run else "freed"
    text = f"{verb} {format_size(freed.size)}: {len(freed.blobs)} files, "
    text += f"{len(freed.folders)} folders of killed processes"
    if freed.copies:
        text += f", {format_count(len(freed.copies), 'quantised base')} of another version"
    emit(document, text, as_json=as_json)
