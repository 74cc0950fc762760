"""What ``route`` and ``run`` show to a person: the plan with its reasons, and the figures."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from expertctl.cli.output import counted, human_limit, human_size, table
from expertctl.cli.routed_view import loss_text, routed_text
from expertctl.routing.score import two_decimals

if TYPE_CHECKING:
    from expertctl.engine.run_result import RunResult
    from expertctl.routing.candidate import Candidate
    from expertctl.routing.plan import PlannedExpert
    from expertctl.routing.router import RoutingResult

_INDENT = "  "
_HEADER = ["USED", "SCORE", "SHARE", "COSINE", "EXPERT"]
_GAP = 2
_SHOWN_CANDIDATES = 12
_SHORTEST_TEXT = 30
"""Fewest columns for which a text that must be cut is shown at all."""
_ENDLESS = 1 << 16
_FORMS = {True: "as called for", False: "not as called for", None: "none called for"}
_EMPTY = "the answer is empty"


def routing_text(result: "RoutingResult", *, width: int, verbose: bool = False) -> str:
    """Return the plan, then the best candidates, each with its figures and the decision.

    Experts of other bases are only counted, unless ``verbose``. The closest text of an expert is
    cut where a line of ``width`` columns ends; 0: without limit.
    """
    lines = [f"base {result.plan.base}, encoder {result.encoder}", *_plan_lines(result)]
    looked_at = [c for c in result.candidates if verbose or not c.other_base]
    shown = [c for n, c in enumerate(looked_at) if c.chosen or n < _SHOWN_CANDIDATES]
    if shown:
        lines += ["", _candidate_table(shown, width)]
    if more := len(looked_at) - len(shown):
        lines += [f"and {more} more, which --json shows"]
    if not verbose and result.other_bases:
        lines += ["", *_of_other_bases(result.other_bases, result.plan.base)]
    return "\n".join(lines)


def _of_other_bases(counts: Mapping[str, int], here: str) -> list[str]:
    """Return a line for each base that experts were made for and that does not answer."""
    return [
        f"{counted(count, 'expert')} {'is' if count == 1 else 'are'} for "
        + (f"{name}, not {here}" if name != here else f"another {name} than the one here")
        for name, count in sorted(counts.items())
    ]


def _candidate_table(candidates: Sequence["Candidate"], width: int) -> str:
    rows = [_candidate_cells(candidate) for candidate in candidates]
    columns = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    room = width - sum(columns) - len(columns) * _GAP if width else _ENDLESS
    whys = [_why(candidate, room) for candidate in candidates]
    return table([*_HEADER, "WHY"], [[*row, why] for row, why in zip(rows, whys, strict=True)])


def _candidate_cells(candidate: "Candidate") -> list[str]:
    """Return the cells of a candidate, except the reason."""
    scored = not candidate.vetoed and candidate.share is not None
    figures = (candidate.score if scored else None, candidate.share, candidate.cosine)
    return [
        "yes" if candidate.chosen else "no",
        *("-" if figure is None else two_decimals(figure) for figure in figures),
        candidate.expert.ref,
    ]


def _why(candidate: "Candidate", room: int) -> str:
    """Return the decision and, if there is room, the text that is closest to the prompt."""
    words = f"{candidate.told}{', suspicious' if candidate.flags else ''}"
    closest = f"; closest: {candidate.text}"
    if candidate.vetoed or candidate.share is None:
        return words
    if len(words) + len(closest) <= room:
        return words + closest
    left = room - len(words) - len("…")
    return f"{words}{closest[:left]}…" if left >= _SHORTEST_TEXT else words


def footer(result: "RunResult") -> str:
    """Return a run in a few lines: experts and why, base, how much, how fast."""
    lost = _indented("\n".join(loss_text(result.moe)))
    return "\n".join(["", *_plan_lines(result.planned.result), _figures(result), *lost])


def statistics(result: "RunResult") -> str:
    """Return everything that is known of a run."""
    from expertctl.cli.trace_view import trace_text

    plan, document = result.planned.result.plan, result.to_json()
    moved = {"from files": result.bytes_read.ssd, "made for computing": result.bytes_read.ram}
    numerics = result.numerics
    held = f"{numerics.dtype}, experts {numerics.adapter_dtype}, by {numerics.backend}"
    lines = [
        footer(result),
        f"{_INDENT}job {result.job_id}, plan {plan.identity}",
        f"{_INDENT}base {plan.base}, seed {plan.seed}, threads {result.threads}",
        f"{_INDENT}held in {held}{', deterministic' if numerics.deterministic else ''}",
        *_indented("\n".join(routed_text(result.moe))),
        "",
        *_indented(_steps(result)),
        "",
        *_indented(_memory(result)),
        "",
        f"{_INDENT}bytes {_pairs({k: human_size(size) for k, size in moved.items()})}",
        f"{_INDENT}cache {_pairs(document['cache'])}",
        f"{_INDENT}sampling {_pairs(plan.params.to_json())}",
        f"{_INDENT}form {_form(result)}",
    ]
    if plan.experts:  # without experts the footer has the notes
        lines += [f"{_INDENT}{note}" for note in result.planned.result.notes]
    if result.trace is not None:
        lines += ["", *_indented(trace_text(result.trace))]
    return "\n".join(lines)


def _form(result: "RunResult") -> str:
    """Return the result of the form check; an empty answer fails it whatever the form."""
    failed = result.validation_passed is False
    return (
        _EMPTY if failed and not result.generated.text.strip() else _FORMS[result.validation_passed]
    )


def _steps(result: "RunResult") -> str:
    """Return a row for each step of a run; steps of the model also have their tokens."""
    generated = result.generated
    counts = {
        "prefill": (generated.prefill_tokens, generated.prefill_tokens_per_s),
        "decode": (generated.decode_steps, generated.tokens_per_s),
    }
    rows = []
    for name, ms in result.timings_ms.items():
        count, rate = counts.get(name, (0, 0.0))
        told = [str(count), f"{rate:.1f}"] if count else ["", ""]
        rows.append([name, f"{ms:.1f} ms", *told])
    return table(["STEP", "TIME", "TOKENS", "TOKENS/S"], rows)


def _memory(result: "RunResult") -> str:
    """Return how much of the budget each purpose holds."""
    sizes = {str(purpose): size for purpose, size in result.memory.held.items()}
    rows = [[name, human_size(size)] for name, size in sizes.items()]
    rows += [["peak", human_size(result.memory.peak)]]
    rows += [["budget", human_limit(result.memory.budget)]]
    return table(["MEMORY", "BYTES"], rows)


def _indented(text: str) -> list[str]:
    return [f"{_INDENT}{line}" if line else "" for line in text.splitlines()]


def _plan_lines(result: "RoutingResult") -> list[str]:
    if result.plan.experts:
        return [f"{_INDENT}{_expert(expert)}" for expert in result.plan.experts]
    return [f"{_INDENT}{note}" for note in result.notes]


def _expert(expert: "PlannedExpert") -> str:
    weight = "" if expert.weight == 1.0 else f" x {expert.weight:g}"
    return f"{expert.ref}{weight}: {expert.reason}"


def _figures(result: "RunResult") -> str:
    generated, timings = result.generated, result.timings_ms
    written = len(generated.tokens) or "nothing"
    speed = [f"{generated.tokens_per_s:.0f} tokens/s"] if generated.decode_steps else []
    first = [f"first after {timings['ttft']:.0f} ms"] if generated.tokens else []
    parts = [
        f"{counted(result.prompt_tokens, 'token')} read",
        f"{written} written ({generated.finish_reason})",
        f"on {result.planned.result.plan.base}",
        *speed,
        *first,
        f"{timings['total']:.0f} ms in all",
    ]
    return f"{_INDENT}{', '.join(parts)}"


def _pairs(values: object) -> str:
    items = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {_value(value)}" for name, value in items)


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(json.dumps(item, ensure_ascii=False) for item in value) or "none"
    return str(value)
