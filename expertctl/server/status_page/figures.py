"""The numbers behind the status page, as ``/status/data`` gives them.

Sizes are in bytes, times in seconds. Counts are since the start, so that the difference of two
readings shows what happened in between.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from expertctl.engine.serving.snapshot import Snapshot
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.status_page.routed import routed


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """How many texts have had a first token, and the sum of their times to it."""

    count: int
    seconds: float

    def to_json(self) -> JsonObject:
        """Return the ``ttft`` object."""
        return {"count": self.count, "seconds": self.seconds}


def figures(now: Snapshot, first_tokens: FirstTokens) -> JsonObject:
    """Return the numbers of a snapshot, by subject."""
    kv_held = now.held["kv"]
    return {
        "jobs": _jobs(now),
        "tokens": {
            "prompt": now.counts.prompt_tokens,
            "reused": now.totals.reused_tokens,
            "answer": now.counts.step_rows,
        },
        "steps": {"count": now.counts.steps, "rows": now.counts.step_rows},
        "ttft": first_tokens.to_json(),
        "memory": {
            "limit": now.limit,
            "peak": now.peak,
            "held": {str(purpose): size for purpose, size in now.held.items()},
        },
        "kv": {
            "limit": now.kv_limit,
            "in_use": now.kv_in_use,
            "kept": max(0, kv_held - now.kv_in_use),
            "kept_limit": now.kv_kept_limit,
        },
        "tiers": {tier: dict(asdict(traffic)) for tier, traffic in now.traffic.items()},
        "experts": _experts(now),
        "routed": routed(now),
    }


def _jobs(now: Snapshot) -> JsonObject:
    totals = now.totals
    return {
        "waiting": now.waiting,
        "preparing": now.preparing,
        "running": now.running,
        "rows": now.rows,
        "finished": totals.finished,
        "failed": totals.failed,
        "cancelled": totals.cancelled,
        "refused": totals.refused,
    }


def _experts(now: Snapshot) -> list[JsonValue]:
    """List the experts of running texts and of prepared jobs, the busiest first.

    An expert counts once for each plan, however often the plan names it.
    """
    running, prepared = _times(now.running_plans), _times(now.waiting_plans)
    busiest = sorted(running | prepared, key=lambda ref: (-running[ref], -prepared[ref], ref))
    return [
        {
            "ref": ref,
            "running": running[ref],
            "prepared": prepared[ref],
            "requests": now.totals.experts.of(ref),
        }
        for ref in busiest
    ]


def _times(plans: Iterable[tuple[str, ...]]) -> Counter[str]:
    return Counter(ref for plan in plans for ref in set(plan))
