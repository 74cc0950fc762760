"""What ``expertctl bench`` shows to a person."""

from typing import TYPE_CHECKING

from expertctl.cli.output import human_size, printable, table

if TYPE_CHECKING:
    from expertctl.engine.bench_result import Measured, Row

_HEADER = ["WHAT", "THREADS", "MEDIAN", "QUARTILES", "ROOF", "SHARE", "LIMIT"]
_FOOT = [
    "The roof is what memory, or arithmetic, of this machine allows with as many",
    "threads; the share is how much of it was reached, round by round.",
]


def bench_text(found: "Measured") -> str:
    """Return what was measured, then a row for each figure; it fits into 80 columns."""
    rows = [_cells(row) for row in found.rows]
    return "\n".join([*_head(found), "", table(_HEADER, rows), "", *_FOOT])


def _head(found: "Measured") -> list[str]:
    work = found.work()
    parts = {
        "weights": work.weight_bytes,
        "experts": work.expert_bytes,
        "keys and values": work.kv_bytes,
    }
    told = ", ".join(f"{name} {human_size(size)}" for name, size in parts.items() if size)
    return [
        printable(f"{found.what}, {found.dtype}"),
        f"{found.costs.numbers / 1e6:.1f} million weights are multiplied for a token",
        f"a token behind {found.context} reads {human_size(work.nbytes)}: {told}",
        printable(f"on {found.cpu}"),
    ]


def _cells(row: "Row") -> list[str]:
    reach = row.reach
    return [
        f"{row.case}, {row.unit}",
        f"{row.threads}",
        _figure(row.rate.median),
        f"{_figure(row.rate.low)} to {_figure(row.rate.high)}",
        "" if row.roof is None else _figure(row.roof),
        "" if reach is None else f"{reach.share.median:.2f}",
        "" if reach is None else reach.bound,
    ]


def _figure(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"
