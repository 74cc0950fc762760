"""Formats plans, runs and chat turns for people: reasons, timings, memory, routed experts.

`format_routing` is the output of ``route``, `format_footer` the lines below an answer of ``run``,
`format_statistics` those of ``--stats``, `format_trace` those of ``--trace``, and `format_turn` the
line below an answer of ``chat``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from expertctl.cli.output import format_count, format_table
from expertctl.client.result import Expert, MoeUse, PlanExpert, RoutePlan, RunAnswer
from expertctl.reference import DEMO_BASE
from expertctl.settings import format_limit, format_size

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation
    from expertctl.engine.decoding import LayerTimer
    from expertctl.engine.moe.counters import RoutedExpertStats
    from expertctl.engine.result import GenerationTrace, RunResult
    from expertctl.routing.candidate import InstalledExpert, RoutingCandidate
    from expertctl.routing.plan import Plan, PlannedExpert
    from expertctl.routing.planner import Planner
    from expertctl.routing.router import RoutingResult
    from expertctl.store.base_record import StoredBase


def read_answer(result: "RunResult") -> RunAnswer:
    """Return the answer that the document of a run describes, as servers send it, too."""
    return msgspec.convert(result.to_json(), RunAnswer)


def read_routed_use(moe: "RoutedExpertStats | None") -> MoeUse | None:
    """Return the counters of routed experts that a document has."""
    return None if moe is None else msgspec.convert(moe.to_json(), MoeUse)


def format_routed_report(moe: MoeUse | None) -> Iterator[str]:
    """Yield a line about missing routed experts and their cost, if any could be missing."""
    if moe is None or moe.slots >= moe.experts:
        return
    parts = [f"{moe.in_memory} of {moe.layers * moe.experts} fit in memory"]
    parts += [f"{100 * moe.fallback_rate:.1f} % of requests missed"]
    parts += [f"{moe.lent} of {moe.misses} computed from the page cache"] if moe.lent else []
    parts += [f"{moe.waited_ms:.0f} ms waited"]
    skips = moe.miss == "skip"
    parts += [f"{100 * moe.skipped_mass:.1f} % of router weight skipped"] if skips else []
    yield f"routed experts: {', '.join(parts)}"


def format_skipped_weight(moe: MoeUse | None) -> Iterator[str]:
    """Yield a line about skipped router weight, if any, since that changes the answer."""
    if moe is not None and moe.skipped_mass:
        yield f"{100 * moe.skipped_mass:.2g} % of the weight of routed experts was skipped"


_PARTS = ("attention", "mlp", "experts")
_TOGETHER = "the time of experts is included in that of their layers"
_Rows = dict[str, dict[str, float]]


def format_trace(trace: "GenerationTrace") -> str:
    """Return milliseconds of the prompt and of one token, by layer and by kind of operation."""
    tokens = max(trace.timed_steps, 1)
    parts = [
        _format_layers("A TOKEN, ms", trace.decode, tokens),
        _format_layers("PROMPT, ms", trace.prefill, 1),
    ]
    if trace.prefill.kinds:
        parts.append(_format_operations(trace.prefill, trace.decode, tokens))
    elif trace.prefill.places:
        parts.append(_TOGETHER)
    return "\n\n".join([*(part for part in parts if part), _format_allocations(trace)])


def _format_layers(title: str, times: "LayerTimer", passes: int) -> str:
    """Return a row for each layer, and for what comes before and after the layers."""
    rows = _group_by_layer(times, passes)
    parts = [part for part in _PARTS if any(part in cells for cells in rows.values())]
    shown = [
        [
            name,
            *(_format_milliseconds(cells.get(part)) for part in parts),
            _format_milliseconds(sum(cells.values())),
        ]
        for name, cells in rows.items()
    ]
    whole = [sum(cells.get(part, 0.0) for cells in rows.values()) for part in parts]
    shown.append(
        [
            "all",
            *map(_format_milliseconds, whole),
            _format_milliseconds(times.seconds / passes * 1e3),
        ]
    )
    return format_table([title, *parts, "together"], shown) if rows else ""


def _group_by_layer(times: "LayerTimer", passes: int) -> _Rows:
    """Group the timed places into rows: a layer by its parts, anything else by its name."""
    rows: _Rows = defaultdict(lambda: defaultdict(float))
    for place, seconds in times.places.items():
        name, _, rest = place.removeprefix("layers.").partition(".")
        part = "experts" if rest.endswith("experts") else rest
        rows[f"layer {name}" if place.startswith("layers.") else name][part] += (
            seconds / passes * 1e3
        )
    return rows


def _format_operations(prompt: "LayerTimer", written: "LayerTimer", tokens: int) -> str:
    """Return the time of each kind of operation, the longest first."""
    names = sorted(
        {*prompt.kinds, *written.kinds}, key=lambda name: (-written.kinds.get(name, 0.0), name)
    )
    rows = [
        [
            name,
            _format_milliseconds(written.kinds.get(name, 0.0) / tokens * 1e3),
            _format_milliseconds(prompt.kinds.get(name, 0.0) * 1e3),
        ]
        for name in names
    ]
    return format_table(["OPERATION", "A TOKEN, ms", "PROMPT, ms"], rows)


def _format_allocations(trace: "GenerationTrace") -> str:
    found = trace.to_json()["allocations"]
    assert isinstance(found, dict)
    if not found["tokens"]:
        return "allocations per token were not counted: too few tokens were generated"
    python, native = (format_size(int(str(found[key]))) for key in ("python_bytes", "native_bytes"))
    return (
        f"a token allocates {python} in Python, {native} natively and "
        f"{found['compiled_arrays']} arrays in compiled code (medians of {found['tokens']})"
    )


def _format_milliseconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}"


_INDENT = "  "
_EXPERT_HEADER = ["", "EXPERT", "KIND", "DESCRIPTION"]
_HEADER = ["USED", "SCORE", "SHARE", "COSINE", "EXPERT"]
_GAP = 2
_SHOWN_CANDIDATES = 12
_MIN_TEXT_WIDTH = 30
"""Fewest columns for which a text that must be cut is shown at all."""
_UNLIMITED = 1 << 16
_CHECK_RESULTS = {True: "as requested", False: "not as requested", None: "none requested"}
_EMPTY_ANSWER = "the answer is empty"
_KEPT_REASON = "kept from the previous turn"
"""The reason of an expert that `expertctl.routing.session` kept."""


def format_routing(result: "RoutingResult", *, width: int, verbose: bool = False) -> str:
    """Return the plan, then the best candidates, each with its figures and the decision.

    Experts of other bases are only counted, unless ``verbose``. The closest text of an expert is
    cut at ``width`` columns; 0 means no limit.
    """
    lines = [
        f"base {result.plan.base}, encoder {result.encoder}",
        *_format_plan(result.plan, result.notes),
    ]
    looked_at = [c for c in result.candidates if verbose or not c.other_base]
    shown = [c for n, c in enumerate(looked_at) if c.chosen or n < _SHOWN_CANDIDATES]
    if shown:
        lines += ["", _format_candidates(shown, width)]
    if more := len(looked_at) - len(shown):
        lines += [f"and {more} more, which --json shows"]
    if not verbose and result.other_bases:
        lines += ["", *_format_other_bases(result.other_bases, result.plan.base)]
    return "\n".join(lines)


def _format_other_bases(counts: Mapping[str, int], here: str) -> list[str]:
    """Return a line for each other base, with the number of its experts."""
    return [
        f"{format_count(count, 'expert')} {'is' if count == 1 else 'are'} for "
        + (f"{name}, not {here}" if name != here else f"another {name} than the one here")
        for name, count in sorted(counts.items())
    ]


def _format_candidates(candidates: Sequence["RoutingCandidate"], width: int) -> str:
    rows = [_format_candidate(candidate) for candidate in candidates]
    columns = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    room = width - sum(columns) - len(columns) * _GAP if width else _UNLIMITED
    whys = [_format_reason(candidate, room) for candidate in candidates]
    cells = [[*row, why] for row, why in zip(rows, whys, strict=True)]
    return format_table([*_HEADER, "WHY"], cells, shorten=("WHY",))


def _format_candidate(candidate: "RoutingCandidate") -> list[str]:
    """Return the cells of a candidate, except the reason."""
    from expertctl.routing.score import format_score

    scored = not candidate.is_vetoed and candidate.probability is not None
    figures = (candidate.score if scored else None, candidate.probability, candidate.cosine)
    return [
        "yes" if candidate.chosen else "no",
        *("-" if figure is None else format_score(figure) for figure in figures),
        candidate.expert.ref,
    ]


def _format_reason(candidate: "RoutingCandidate", room: int) -> str:
    """Return the decision and, if there is room, the text that is closest to the prompt."""
    words = f"{candidate.short_reason}{', suspicious' if candidate.flags else ''}"
    closest = f"; closest: {candidate.text}"
    if candidate.is_vetoed or candidate.probability is None:
        return words
    if len(words) + len(closest) <= room:
        return words + closest
    left = room - len(words) - len("…")
    return f"{words}{closest[:left]}…" if left >= _MIN_TEXT_WIDTH else words


def format_footer(result: RunAnswer) -> str:
    """Return a run in a few lines: experts and why, base, tokens, speed."""
    lost = _indent("\n".join(format_skipped_weight(result.moe)))
    plan = _format_plan(result.plan, result.notes)
    return "\n".join(["", *plan, _format_figures(result), *lost])


def format_statistics(result: RunAnswer, trace: "GenerationTrace | None" = None) -> str:
    """Return everything that is known about a run."""
    plan, moved = result.plan, result.bytes_read
    read = {"from files": moved["ssd"], "compiled in memory": moved["ram"]}
    numerics = result.numerics
    loss, dtype = numerics.get("kl_divergence"), numerics["dtype"]
    dtype = dtype if loss is None else f"{dtype} (KL divergence {loss:.2g})"
    held = f"{dtype}, experts {numerics['adapter_dtype']}, by {numerics['backend']}"
    lines = [
        format_footer(result),
        f"{_INDENT}job {result.job_id}, plan {plan.identity}",
        f"{_INDENT}base {plan.base}, seed {plan.seed}, threads {result.threads}",
        f"{_INDENT}computed in {held}{', deterministic' if numerics['deterministic'] else ''}",
        *_indent("\n".join(format_routed_report(result.moe))),
        "",
        *_indent(_format_steps(result)),
        "",
        *_indent(_format_memory(result)),
        "",
        f"{_INDENT}bytes {_format_pairs({k: format_size(size) for k, size in read.items()})}",
        f"{_INDENT}cache {_format_pairs(msgspec.to_builtins(result.cache))}",
        f"{_INDENT}sampling {_format_pairs(msgspec.to_builtins(plan.params))}",
        f"{_INDENT}format {_format_check(result)}",
    ]
    if plan.experts:  # without experts the footer has the notes
        lines += [f"{_INDENT}{note}" for note in result.notes]
    if trace is not None:
        lines += ["", *_indent(format_trace(trace))]
    return "\n".join(lines)


def format_stage_times(result: RunAnswer) -> str:
    """Return the times of the stages and the use of caches, for ``--verbose``."""
    times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in result.timings_ms.items())
    return f"stages: {times}\ncache: {_format_pairs(msgspec.to_builtins(result.cache))}"


def _format_check(result: RunAnswer) -> str:
    """Return the result of the format check; an empty answer fails it whatever the format."""
    failed = result.validation_passed is False
    return (
        _EMPTY_ANSWER
        if failed and not result.text.strip()
        else _CHECK_RESULTS[result.validation_passed]
    )


def _format_steps(result: RunAnswer) -> str:
    """Return a row for each stage of a run; prefill and decode also have their tokens."""
    rates = {"prefill": result.prefill_tokens_per_s, "decode": result.decode_tokens_per_s}
    rows = []
    for name, ms in result.timings_ms.items():
        rate = rates.get(name, 0.0)
        count = round(rate * ms / 1e3)  # the rate is this number by this time
        cells = [str(count), f"{rate:.1f}"] if count else ["", ""]
        rows.append([name, f"{ms:.1f} ms", *cells])
    return format_table(["STEP", "TIME", "TOKENS", "TOKENS/S"], rows)


def _format_memory(result: RunAnswer) -> str:
    """Return the bytes of the budget that each purpose holds."""
    sizes = dict(result.memory)
    peak, budget = sizes.pop("peak"), sizes.pop("budget")
    rows = [[name, format_size(size)] for name, size in sizes.items()]
    rows += [["peak", format_size(peak)]]
    rows += [["budget", format_limit(budget)]]
    return format_table(["MEMORY", "BYTES"], rows)


def _indent(text: str) -> list[str]:
    return [f"{_INDENT}{line}" if line else "" for line in text.splitlines()]


_DEMO_NOTE = (
    f"{DEMO_BASE} is a demo of two million weights that mostly repeats the prompt;\n"
    "  `expertctl pull smollm2:135m` brings a real model"
)


def _format_plan(plan: "Plan | RoutePlan", notes: Sequence[str]) -> list[str]:
    if plan.experts:
        return [f"{_INDENT}{_format_expert(expert)}" for expert in plan.experts]
    demo = [_DEMO_NOTE] if plan.base == DEMO_BASE else []
    return [f"{_INDENT}{note}" for note in (*notes, *demo)]


def _format_expert(expert: "PlannedExpert | PlanExpert") -> str:
    weight = "" if expert.weight == 1.0 else f" x {expert.weight:g}"
    return f"{expert.ref}{weight}: {expert.reason}"


def _format_figures(result: RunAnswer) -> str:
    tokens, timings, rate = result.tokens, result.timings_ms, result.decode_tokens_per_s
    first = [f"first after {timings['ttft']:.0f} ms"] if tokens.generated else []
    speed = [f"{rate:.0f} tokens/s"] if rate else []
    parts = [
        f"{format_count(tokens.prompt, 'token')} read",
        f"{tokens.generated or 'nothing'} written ({result.finish_reason})",
        f"on {result.plan.base}",
        *speed,
        *first,
        f"{timings['total']:.0f} ms in all",
    ]
    return f"{_INDENT}{', '.join(parts)}"


def _format_pairs(values: object) -> str:
    items = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {_format_value(value)}" for name, value in items)


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(json.dumps(item, ensure_ascii=False) for item in value) or "none"
    return str(value)


CHAT_HELP = '''\
/experts              list the installed experts that fit the base; * marks those in use
/experts REF[:W] ...  answer with these experts from now on
/experts none         answer with the base alone from now on
/experts auto         choose experts automatically for each message
/system [TEXT]        show or change the system message; none removes it
/set [NAME VALUE]     show or change how tokens are sampled, such as temperature 0.7
/retry                answer the last message again
/plan                 show which experts answered the last message, and why
/plan FILE            save that plan, for `expertctl run --plan FILE`
/feedback good        rate the last answer: good or bad
/save FILE            save the conversation; /load FILE continues it
/reset, /clear        clear the conversation
/bye, /exit, /quit    leave, as the end of the input (Ctrl-D) does
A line that ends in \\ continues on the next one; """ begins and ends a text of several lines.
The tab key completes commands, experts and files. Ctrl-C stops an answer; the text so far stays.'''


_ENDS = {"length": " (cut at the limit)", "cancelled": " (interrupted)", "timeout": " (timed out)"}


def format_turn(result: RunAnswer, *, replanned: bool) -> str:
    """Return a turn in one line: experts, tokens read and written, skipped weight, speed.

    ``replanned``: the plan differs from that of the previous turn.
    """
    kept = any(expert.reason == _KEPT_REASON for expert in result.plan.experts)
    tokens, rate = result.tokens, result.decode_tokens_per_s
    parts = [
        format_plan_experts(result.plan) + (f", {_KEPT_REASON}" if kept else ""),
        f"{format_count(tokens.prompt, 'token')} of prompt{_format_reuse(result, replanned)}",
        f"{tokens.generated or 'nothing'} written{_ENDS.get(result.finish_reason, '')}",
    ]
    if rate:
        parts.append(f"{rate:.0f} tokens/s")
    parts += format_skipped_weight(result.moe)
    return f"  [{'; '.join(parts)}]"


def format_answer_plan(result: RunAnswer) -> str:
    """Return the base and the experts of an answer of a server, which keeps no candidates."""
    return "\n".join([f"base {result.plan.base}", *_format_plan(result.plan, result.notes)])


def format_plan_experts(plan: "Plan | RoutePlan") -> str:
    """Return the experts of a plan, with weights that are not 1, and its base."""
    named = (e.ref if e.weight == 1.0 else f"{e.ref} x {e.weight:g}" for e in plan.experts)
    experts = " + ".join(named)
    return f"{experts} on {plan.base}" if experts else f"{plan.base} alone"


def find_fitting_experts(
    conversation: "Conversation", planner: "Planner"
) -> "tuple[StoredBase | None, list[InstalledExpert], int]":
    """Return the base of a conversation, the installed experts that fit it, and the other count."""
    from expertctl.routing.candidate import explain_misfit

    name = conversation.base
    base = planner.bases.find(name) if name else planner.base_selector.find_default()
    installed = planner.read_inventory().experts
    if base is None:
        return None, [], len(installed)
    fitting = [e for e in installed if not explain_misfit(e, base.identity, allow_mismatch=False)]
    return base, fitting, len(installed) - len(fitting)


def format_served_experts(experts: "Sequence[Expert]", current: Sequence[str]) -> str:
    """Return the experts that fit the base of a server; the digests ``current`` are in use."""
    rows = [
        ["*" if one.content_digest in current else "", one.ref, one.kind, one.description]
        for one in experts
    ]
    return (
        format_table(_EXPERT_HEADER, rows, shorten=("DESCRIPTION",)) if rows else "no expert fits"
    )


def format_fitting_experts(conversation: "Conversation", planner: "Planner") -> str:
    """Return the installed experts that fit the base of a conversation."""
    base, fitting, others = find_fitting_experts(conversation, planner)
    if base is None:
        return "no base model is registered that a chat can use"
    rows = [
        [
            "*" if expert.digest in conversation.current_experts else "",
            expert.stored.ref,
            expert.manifest.kind,
            expert.manifest.description,
        ]
        for expert in fitting
    ]
    table = format_table(_EXPERT_HEADER, rows, shorten=("DESCRIPTION",))
    lines = [table if rows else "no expert fits"]
    lines += [f"{others} more, made for other bases than {base.name}"] if others else []
    return "\n".join(lines)


def _format_reuse(result: RunAnswer, replanned: bool) -> str:
    """Return how much of the prompt was reused, or why nothing was if the experts changed."""
    reused = result.cache.kv_reused_tokens
    if reused:
        return f" ({reused} reused)"
    return " (all read again: the experts changed)" if replanned else ""
