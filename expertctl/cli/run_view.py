"""What ``route`` and ``run`` show to a person: the plan with its reasons, and the figures."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from expertctl.cli.output import human_size, table

if TYPE_CHECKING:
    from expertctl.engine.run_result import RunResult
    from expertctl.routing.candidate import Candidate
    from expertctl.routing.plan import PlannedExpert
    from expertctl.routing.router import RoutingResult

_INDENT = "  "
_FORMS = {True: "as called for", False: "not as called for", None: "none called for"}


def routing_text(result: "RoutingResult") -> str:
    """Return the plan, then every candidate with its score and what was decided."""
    lines = [f"base {result.plan.base}, encoder {result.encoder}", *_plan_lines(result)]
    rows = [_candidate_cells(candidate) for candidate in result.candidates]
    if rows:
        lines += ["", table(["USED", "SCORE", "SHARE", "COSINE", "EXPERT", "WHY"], rows)]
    return "\n".join(lines)


def _candidate_cells(candidate: "Candidate") -> list[str]:
    """Return a row of the table; the figures have columns, so the words need not repeat them."""
    figures = (
        None if candidate.vetoed else candidate.score,
        candidate.share,
        candidate.cosine,
    )
    return [
        "yes" if candidate.chosen else "no",
        *("-" if figure is None else f"{figure:.2f}" for figure in figures),
        candidate.expert.ref,
        candidate.told,
    ]


def footer(result: "RunResult") -> str:
    """Return a run in a few lines: who answered and why, how much, how fast."""
    return "\n".join(["", *_plan_lines(result.planned.result), _figures(result)])


def statistics(result: "RunResult") -> str:
    """Return everything that is known of a run."""
    plan, document = result.planned.result.plan, result.to_json()
    sizes = {
        "budget": result.memory.budget,
        "peak": result.memory.peak,
        **{str(purpose): size for purpose, size in result.memory.held.items()},
    }
    lines = [
        footer(result),
        f"{_INDENT}job {result.job_id}, plan {plan.identity}",
        f"{_INDENT}base {plan.base}, seed {plan.seed}, threads {result.threads}",
        f"{_INDENT}timings {_pairs({k: f'{ms:.1f} ms' for k, ms in result.timings_ms.items()})}",
        f"{_INDENT}memory {_pairs({k: human_size(size) for k, size in sizes.items()})}",
        f"{_INDENT}cache {_pairs(document['cache'])}",
        f"{_INDENT}sampling {_pairs(plan.params.to_json())}",
        f"{_INDENT}form {_FORMS[result.validation_passed]}",
    ]
    if plan.experts:  # else the footer has the notes
        lines += [f"{_INDENT}{note}" for note in result.planned.result.notes]
    return "\n".join(lines)


def _plan_lines(result: "RoutingResult") -> list[str]:
    if result.plan.experts:
        return [f"{_INDENT}{_expert(expert)}" for expert in result.plan.experts]
    return [f"{_INDENT}{note}" for note in result.notes]


def _expert(expert: "PlannedExpert") -> str:
    weight = "" if expert.weight == 1.0 else f" x {expert.weight:g}"
    return f"{expert.ref}{weight}: {expert.reason}"


def _figures(result: "RunResult") -> str:
    generated, timings = result.generated, result.timings_ms
    speed = f"{generated.tokens_per_s:.0f} tokens/s" if generated.decode_steps else "one token"
    return (
        f"{_INDENT}{result.prompt_tokens} tokens read, {len(generated.tokens)} written "
        f"({generated.finish_reason}), {speed}, first after {timings['ttft']:.0f} ms, "
        f"{timings['total']:.0f} ms in all"
    )


def _pairs(values: object) -> str:
    items = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {_value(value)}" for name, value in items)


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(json.dumps(item, ensure_ascii=False) for item in value) or "none"
    return str(value)
