"""A routing result as a person reads it: the plan, then one line for every other expert."""

from expertctl.routing.candidate import Candidate
from expertctl.routing.plan import Plan
from expertctl.routing.router import RoutingResult

MAX_REFUSALS = 10


def explain(result: RoutingResult) -> str:
    """Return the text of ``route``: what will answer and why, and why the others do not."""
    lines = [*_plan_lines(result.plan), *_refusal_lines(result.candidates)]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(lines)


def summary(plan: Plan) -> str:
    """Return the plan in a few words: ``acme/sql@1.0.0 on acme/tiny``."""
    names = [e.ref if e.weight == 1 else f"{e.ref}:{e.weight:g}" for e in plan.experts]
    return f"{' + '.join(names)} on {plan.base}" if names else f"{plan.base} alone"


def _plan_lines(plan: Plan) -> list[str]:
    lines = [f"plan: {summary(plan)}"]
    lines += [f"  {i}. {e.ref}  {e.reason}" for i, e in enumerate(plan.experts, 1)]
    params = plan.params
    drawn = "greedy" if params.is_greedy else f"temperature {params.temperature:g}"
    lines.append(f"  {drawn}, at most {params.max_tokens} tokens, seed {plan.seed}")
    return lines


def _refusal_lines(candidates: tuple[Candidate, ...]) -> list[str]:
    refused = [candidate for candidate in candidates if not candidate.chosen]
    if not refused:
        return []
    lines = [f"  {c.expert.ref}  {c.reason}" for c in refused[:MAX_REFUSALS]]
    rest = len(refused) - MAX_REFUSALS
    more = [f"  … and {rest} more, see --json"] if rest > 0 else []
    return ["not used:", *lines, *more]
