"""How ``base profile`` and ``base plan`` show what is known of routed experts; 80 columns."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertctl.cli.output import counted, human_limit, human_size, table

if TYPE_CHECKING:
    from expertctl.engine.moe.guide import Guide
    from expertctl.engine.moe.usage_profile import UsageProfile
    from expertctl.engine.routed_plan import RoutedPlan, WeightedPlan
    from expertctl.package.experts_config import ExpertsConfig

_MEGABYTE = 10**6
_FIRST = 8
"""How many experts of a layer are shown."""


def profile_document(
    base: str, routed: "ExpertsConfig", guide: "Guide | None"
) -> dict[str, object]:
    """Return what ``base profile show --json`` prints."""
    layers = {} if guide is None else guide.usage.layers
    return {
        "base": base,
        "experts": routed.count,
        "used": routed.used,
        "tokens": 0 if guide is None else guide.usage.prompts,
        "counted": "tokens" if guide is None else f"{_what(guide.usage)}s",
        "layers": [
            {
                "layer": number,
                "asked": len(layers.get(number, {})),
                "first": [] if guide is None else guide.usage.ranked(number),
            }
            for number in routed.layers
        ],
    }


def profile_text(base: str, routed: "ExpertsConfig", guide: "Guide | None") -> str:
    """Return a profile as a person reads it."""
    if guide is None:
        return f"nothing was learnt of {base}: a run on it learns where kernels compute it"
    usage = guide.usage
    head = ["LAYER", "ASKED FOR", "EXPERTS ASKED FOR MOST"]
    rows = [
        [
            str(number),
            f"{len(usage.layers.get(number, {}))} of {routed.count}",
            " ".join(map(str, usage.ranked(number)[:_FIRST])),
        ]
        for number in routed.layers
    ]
    learnt = f"{base}: learnt from {counted(usage.prompts, _what(usage))}"
    return f"{learnt}; the older, the less they count\n\n{table(head, rows)}"


def _what(usage: "UsageProfile") -> str:
    """Return what was counted: how many of them asked for an expert."""
    from expertctl.engine.moe.guide import TOKENS

    return "token" if usage.preset == TOKENS else "prompt"


def plan_text(plan: "RoutedPlan") -> str:
    """Return a plan as a person reads it."""
    return "\n".join(_lines(plan))


def _lines(plan: "RoutedPlan") -> Iterator[str]:
    yield f"{plan.base} in {plan.dtype}, {human_limit(plan.limit)} of memory"
    if plan.whole:
        yield "all of it fits: nothing is left on the disk"
    elif not plan.fits:
        least = f"{-(-plan.least // _MEGABYTE)}MB"  # in the form of the option
        yield f"that is too little: {least} is the least for a usual text; shorter ones take less"
        yield from _parts(plan)
    else:
        yield from _parts(plan)
        yield from _layers(plan)
    if plan.has_lanes:
        yield from _lanes(plan)


def _parts(plan: "RoutedPlan") -> Iterator[str]:
    slots, pool, size = sum(plan.plan.capacities), plan.pool, plan.block
    yield f"  {human_size(plan.rest):>10}  all that is no routed expert"
    yield f"  {human_size(slots * size):>10}  {slots} slots of {human_size(size)}"
    yield f"  {human_size(pool * size):>10}  the pool: {pool} experts that have no slot"
    yield f"  {human_size(plan.texts):>10}  a usual text: keys and values, and what it is read with"
    if plan.grows:
        yield "              a larger pool once a run has kept its copy: experts are shorter there"


def _layers(plan: "RoutedPlan") -> Iterator[str]:
    even = plan.layers[0].even
    yield ""
    yield f"what is asked for: {'nothing is known yet' if plan.known is None else plan.known}"
    yield table(
        ["LAYER", "SLOTS", "PINNED", "ASKED FOR", "SERVED BY SLOTS", f"BY {even} EACH"],
        [
            [
                str(each.layer),
                str(each.slots),
                str(each.pinned),
                f"{each.asked} of {plan.plan.experts}",
                _percent(each.served),
                _percent(each.served_even),
            ]
            for each in plan.layers
        ],
    )
    if plan.served is not None and plan.pool:
        yield (
            f"slots serve {_percent(plan.served)} of it in all, and "
            f"{_percent(plan.served_with_pool)} with a pool of those asked for most"
        )


def _lanes(plan: "RoutedPlan") -> Iterator[str]:
    yield ""
    yield "the lanes, by weighting; planned alone, for a run has one"
    yield "a layer that has experts in a lane pays for one more there, a dummy of zeros"
    yield table(
        ["WEIGHTING", "SERVED", "LANE", "EXPERTS", "BYTES", "OF WHICH DUMMIES"],
        [row for each in plan.weightings for row in _rows(each)],
    )


def _rows(each: "WeightedPlan") -> Iterator[list[str]]:
    for number, lane in enumerate(each.lanes):
        first = [each.weighting, _percent(each.served)] if number == 0 else ["", ""]
        size, dummies = human_size(lane.used), human_size(lane.dummies)
        yield [*first, lane.name, str(lane.experts), size, dummies]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
