"""Alternating measurement, and the document that every benchmark prints.

The machine is shared and noisy, so two workloads are measured A B A B and only the ratio of their
medians counts; its spread is the quartiles of the ratios of neighbouring runs.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

Seconds = float
Run = Callable[[], Seconds]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; nothing is measured if the rival is not installed."""

    case: str
    ours: float | None
    rival: str
    theirs: float | None
    unit: str
    better: str
    ratio: float | None
    spread: tuple[float, float] | None
    target: str | None = None
    ok: bool | None = None
    note: str | None = None


def time_action(action: Callable[[], object]) -> Run:
    """Turn an action into a run that returns its wall time in seconds."""

    def run() -> Seconds:
        gc.collect()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return run


def compare(
    case: str, ours: Run, theirs: Run, *, rival: str, rounds: int, target: str | None = None
) -> Row:
    """Measure two runs alternately, after one warm-up of each; smaller is better."""
    ours(), theirs()
    pairs = [_run_pair(ours, theirs, swapped=bool(i % 2)) for i in range(rounds)]
    mine, other = zip(*pairs, strict=True)
    return compare_times(case, mine, other, steps=1, rival=rival, target=target)


def take_turns(runs: Mapping[str, Run], *, rounds: int) -> dict[str, list[Seconds]]:
    """Measure several runs in turn, after one warm-up of each; the first one changes each round."""
    names = list(runs)
    for run in runs.values():
        run()
    found: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(runs[name]())
    return found


def compare_rates(
    case: str,
    ours: Sequence[Seconds],
    theirs: Sequence[Seconds],
    *,
    work: tuple[float, float],
    rival: str,
    unit: str,
    target: str | None = None,
) -> Row:
    """Compare two rates per second in runs of `take_turns`; ``work`` is the work of one run."""
    rates = [
        [amount / seconds for seconds in side]
        for amount, side in zip(work, (ours, theirs), strict=True)
    ]
    mine, other = (statistics.median(side) for side in rates)
    ratios = sorted(a / b for a, b in zip(*rates, strict=True))
    row = Row(
        case=case,
        ours=round(mine, 2),
        rival=rival,
        theirs=round(other, 2),
        unit=unit,
        better="higher",
        ratio=round(mine / other, 3),
        spread=(round(_quantile(ratios, 0.25), 3), round(_quantile(ratios, 0.75), 3)),
    )
    return judge(row, target) if target else row


def compare_times(
    case: str,
    ours: Sequence[Seconds],
    theirs: Sequence[Seconds],
    *,
    steps: int,
    rival: str,
    target: str | None = None,
) -> Row:
    """Compare the times per step of two workloads in runs of `take_turns`."""
    mine, other = (statistics.median(side) / steps for side in (ours, theirs))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    row = Row(
        case=case,
        ours=round(mine * 1000, 3),
        rival=rival,
        theirs=round(other * 1000, 3),
        unit="ms",
        better="lower",
        ratio=round(mine / other, 3),
        spread=(round(_quantile(ratios, 0.25), 3), round(_quantile(ratios, 0.75), 3)),
    )
    return judge(row, target) if target else row


def judge(row: Row, target: str) -> Row:
    """Return whether the ratio meets a target such as ``<= 1.5``."""
    operator, bound = target.split()
    ratio = row.ratio
    met = ratio is not None and (
        ratio <= float(bound) if operator == "<=" else ratio >= float(bound)
    )
    return replace(row, target=target, ok=met)


def make_absent_row(case: str, *, rival: str, install: str, target: str | None = None) -> Row:
    """The row of a rival that is not installed, with the command that installs it."""
    return Row(case, None, rival, None, "ms", "lower", None, None, target, False, install)


def main(name: str, measure: Callable[[int], Sequence[Row]], *, rounds: int) -> None:
    """Command line of one benchmark: ``--json`` for the document, else a table."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    document: dict[str, object] = {
        "name": name,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in measure(options.rounds)],
    }
    print(json.dumps(document) if options.json else format_table(document))


def describe_machine() -> dict[str, object]:
    """The machine and versions of the measurement."""
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    return {
        "cpu": _read_cpu_name(),
        "threads": threads,
        "device": "cpu",
        "python": platform.python_version(),
    }


def format_table(document: dict[str, object]) -> str:
    """The document as a table for people."""
    header = ("case", "ours", "theirs", "rival", "ratio", "spread", "target", "ok")
    lines = [header, *(_format_cells(row) for row in document["rows"])]  # type: ignore[attr-defined]  # rows is a list
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    body = "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )
    notes = [f"  {row['case']}: {row['note']}" for row in document["rows"] if row["note"]]  # type: ignore[attr-defined]  # rows is a list
    return "\n".join([f"{document['name']}  {document['machine']}", body, *notes])


def _format_cells(row: dict[str, object]) -> tuple[str, ...]:
    ok = {True: "yes", False: "NO", None: "-"}[row["ok"]]  # type: ignore[index]  # bool or None
    figures = ["-" if f is None else f"{f} {row['unit']}" for f in (row["ours"], row["theirs"])]
    rest = ["-" if row[key] is None else str(row[key]) for key in ("ratio", "spread", "target")]
    return (str(row["case"]), *figures, str(row["rival"]), *rest, ok)


def _run_pair(ours: Run, theirs: Run, *, swapped: bool) -> tuple[Seconds, Seconds]:
    if swapped:
        other = theirs()
        return ours(), other
    return ours(), theirs()


def _quantile(values: Sequence[float], share: float) -> float:
    position = share * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def _read_cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or sys.platform
