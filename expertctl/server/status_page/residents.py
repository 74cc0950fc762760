"""Which installed experts are in memory, for the status page."""

from collections.abc import Sequence

from expertctl.engine.serving.expert_counts import ExpertCounts
from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.schema.strict_json import JsonObject, JsonValue

MAX_LISTED = 200
"""Most experts that are listed; the others are only counted."""


def residents(experts: Sequence[ExpertHere], counts: ExpertCounts) -> JsonObject:
    """Return how many experts can answer here, and those whose weights are in memory, by name."""
    here = sorted((one for one in experts if one.in_memory), key=lambda one: one.expert.ref)
    listed = list[JsonValue](_resident(one, counts) for one in here[:MAX_LISTED])
    able = sum(one.fits and not one.expert.revoked for one in experts)
    return {"able": able, "in_memory": len(here), "listed": listed}


def _resident(here: ExpertHere, counts: ExpertCounts) -> JsonObject:
    ref = here.expert.ref
    return {"ref": ref, "size": here.expert.stored.size, "requests": counts.of(ref)}
