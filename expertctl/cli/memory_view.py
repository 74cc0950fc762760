"""How ``doctor --memory`` shows what holds memory; fits a terminal of 80 columns."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from expertctl.cli.output import counted, human_limit, human_size, table

if TYPE_CHECKING:
    from expertctl.engine.memory_report import BaseSize, Limits, MemoryReport
    from expertctl.engine.presence import Holding

_NAME, _SHOWN = 28, 12
"""Most columns of a name, and most experts that are shown."""
_TOKENS = 1000
_PURPOSES = ("base", "experts", "kv", "buffers")
_DTYPES = ("float32", "bf16", "int8", "int4")


def memory_document(report: "MemoryReport") -> dict[str, object]:
    """Return what ``--json`` prints, in bytes."""
    limits = report.limits
    return {
        "limits": {
            "machine": limits.machine,
            "container": limits.container,
            "unused": limits.unused,
            "budget": limits.budget,
            "budget_chosen": limits.chosen,
        },
        "engines": [_engine_document(engine) for engine in report.engines],
        "runs": [{"size": run.size, "waits": run.waits} for run in report.runs],
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


def memory_text(report: "MemoryReport") -> str:
    """Return the report as a person reads it."""
    parts = [
        _limits(report.limits),
        _engines(report.engines),
        *_runs(report),
        *_bases(report),
        *_experts(report),
        *_caches(report),
    ]
    if not report.has_sizes:
        parts.append("what bases and experts take in memory is known with the engine:\n"
                     "  pip install 'expertctl[engine]'")  # fmt: skip
    return "\n\n".join(parts)


def _engine_document(engine: "Holding") -> dict[str, object]:
    return {
        "pid": engine.pid,
        "answering": engine.answering,
        "budget": engine.limit,
        "held": dict(engine.held),
        "total": engine.total,
        "resident_set": engine.resident_set,
        "base": engine.base,
        "experts": list(engine.experts),
    }


def _limits(limits: "Limits") -> str:
    free = "" if limits.unused is None else f", {human_size(limits.unused)} of it unused"
    lines = [("machine", f"{human_size(limits.machine)}{free}")]
    if limits.container is not None:
        lines.append(("container", human_size(limits.container)))
    whose = "chosen" if limits.chosen else "four fifths of that, as nobody chose one"
    lines.append(("budget", f"{human_limit(limits.budget)} for each engine: {whose}"))
    return "\n".join(f"{name:<9}  {text}" for name, text in lines)


def _engines(engines: Sequence["Holding"]) -> str:
    if not engines:
        return "no engine of this home holds memory"
    header = ("PROCESS", "NOW", "BASE", "EXPERTS", "KV", "BUFFERS", "ALL", "RESIDENT")
    rows = [
        (
            str(engine.pid),
            "answers" if engine.answering else "is idle",
            *(human_size(engine.held.get(purpose, 0)) for purpose in _PURPOSES),
            human_size(engine.total),
            _size(engine.resident_set),
        )
        for engine in engines
    ]
    return "\n".join([table(header, rows), *map(_named, engines)])


def _named(engine: "Holding") -> str:
    experts = ", ".join(engine.experts) or "no expert"
    return f"  {engine.pid}: {engine.base}, last with {experts}"


def _runs(report: "MemoryReport") -> Iterator[str]:
    """Describe the queue of runs, if there is one."""
    waiting = [run.size for run in report.runs if run.waits]
    inside = [run.size for run in report.runs if not run.waits]
    if waiting:
        held = f"{counted(len(inside), 'run')} with {human_size(sum(inside))}"
        queue = f"{len(waiting)} for {human_size(sum(waiting))}"
        yield f"waiting for memory: {queue}, behind {held}"


def _bases(report: "MemoryReport") -> Iterator[str]:
    if report.bases:
        header = ("BASE", "ON DISK", *map(str.upper, _DTYPES), f"{_TOKENS:,} TOKENS")
        yield table(header, [_base_row(base) for base in report.bases])


def _base_row(base: "BaseSize") -> tuple[str, ...]:
    weights = (_size(base.weights.get(dtype)) for dtype in _DTYPES)
    tokens = None if base.token is None else _TOKENS * base.token
    return (_short(base.name), human_size(base.on_disk), *weights, _size(tokens))


def _experts(report: "MemoryReport") -> Iterator[str]:
    if not report.experts:
        return
    shown, rest = report.experts[:_SHOWN], report.experts[_SHOWN:]
    rows = [(one.ref, _size(one.nbytes)) for one in shown]
    if rest:
        size = human_size(sum(one.nbytes or 0 for one in rest))
        rows.append((f"and {counted(len(rest), 'smaller one')}", size))
    yield table(("EXPERT", "IN MEMORY"), rows)


def _caches(report: "MemoryReport") -> Iterator[str]:
    if report.caches:
        rows = [(cache.what, human_size(cache.nbytes), str(cache.path)) for cache in report.caches]
        yield table(("KEPT ON THE DISK", "SIZE", "MAY BE DELETED"), rows)


def _size(size: int | None) -> str:
    return "-" if size is None else human_size(size)


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
