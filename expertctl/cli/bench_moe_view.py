"""What ``expertctl bench moe`` shows to a person."""

from typing import TYPE_CHECKING

from expertctl.cli.output import human_size, printable, table

if TYPE_CHECKING:
    from expertctl.engine.routed_bench_result import RoutedMeasured, RoutedRow

_HEADER = ["RESIDENT", "MISS", "WRITE", "READ", "HITS", "MISSED", "LEFT OUT", "WAITED", "MEMORY"]
_FOOT = [
    "WRITE and READ are tokens a second. HITS: of all choices of tokens, those whose",
    "expert was in memory. MISSED: of the different experts that one pass asked for,",
    "those that were not. LEFT OUT: of the weights of routers, those of experts that",
    "were left out. WAITED: for experts, for each token that was written; what was",
    "waited while prompts were read is in READ alone.",
]


def bench_moe_text(found: "RoutedMeasured") -> str:
    """Return what was measured, then a row for each way to hold the experts; in 80 columns."""
    rows = [_cells(found, row) for row in found.rows]
    return "\n".join([*_head(found), "", table(_HEADER, rows), "", *_FOOT])


def _head(found: "RoutedMeasured") -> list[str]:
    return [
        printable(f"{found.what}, {found.dtype}"),
        f"{found.layers} layers of {found.experts} routed experts, of which a token uses "
        f"{found.used}",
        found.texts,
        *_start(found),
        printable(f"on {found.device or f'{found.cpu}, threads: {found.threads}'}"),
    ]


def _start(found: "RoutedMeasured") -> list[str]:
    """Say which options of the start were given, and how much may be left out where any may."""
    wishes = found.start
    told = [] if wishes.profile is None else [f"begins with {wishes.profile}"]
    told += [] if wishes.pins is None else [f"pins {wishes.pins}"]
    told += [f"exchanges {wishes.exchange:g}"] if wishes.exchange else []
    told += ["all slots filled first"] if wishes.warmup == "full" else []
    cap = found.skip_cap
    told += [] if cap is None else [f"leaves out up to {cap:g} of a token's weights"]
    told += [] if found.cold == "auto" else [f"cold experts: {found.cold}"]
    return [printable("; ".join(told))] if told else []


def _cells(found: "RoutedMeasured", row: "RoutedRow") -> list[str]:
    holding = row.holding
    residence = row.report.residence
    return [
        f"{residence.slots} of {residence.experts}",
        "" if holding.is_whole else holding.miss,
        _figure(row.rate.median),
        _figure(row.read_rate),
        _percent(row.hit_rate),
        _percent(row.report.fallback_rate),
        _percent(row.report.skipped_mass),
        f"{row.waited_ms_per_token:.2f} ms",
        human_size(row.memory),
    ]


def _figure(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
