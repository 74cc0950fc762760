"""A further prompt of a conversation: routed anew; where that finds no expert, the old ones stay.

"And now the other way round" names nothing to choose an expert by, but it belongs to what was said
before.
"""

from collections.abc import Sequence
from dataclasses import replace

from expertctl.errors import NotFoundError
from expertctl.routing.candidate import Installed
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Planned
from expertctl.routing.request import Forced, RouteRequest
from expertctl.routing.session import PlanningSession
from expertctl.store.store import Store

KEPT = "kept from the turn before"


def plan_follow_up(
    session: PlanningSession,
    request: RouteRequest,
    before: Plan,
    *,
    base: str | None = None,
    files: Sequence[Installed] = (),
) -> Planned:
    """Plan a prompt that follows one answered by the plan ``before``.

    Raises:
        ExpertError: as `PlanningSession.recall` does, also when an expert of that plan is gone.
    """
    planned = session.recall(request, base=base, files=files)
    if planned.experts or request.base_alone or not before.experts:
        return planned
    _demand_installed(session.planner.store, before)
    force = tuple(Forced(expert.content_digest, expert.weight) for expert in before.experts)
    kept = session.recall(replace(request, force=force), base=base or before.base, files=files)
    experts = tuple(replace(expert, reason=KEPT) for expert in kept.result.plan.experts)
    result = replace(
        kept.result,
        plan=replace(kept.result.plan, experts=experts),
        candidates=tuple(candidate.accepted(KEPT) for candidate in kept.result.candidates),
    )
    return replace(kept, result=result)


def _demand_installed(store: Store, plan: Plan) -> None:
    """Demand the experts of a plan, found by digest; the error names the one that is gone."""
    for expert in plan.experts:
        try:
            store.find(expert.content_digest)
        except NotFoundError as error:
            raise NotFoundError(
                f"{expert.ref}, which answered the turn before, is not installed any more",
                hint="begin anew, or name the experts that shall answer",
            ) from error
