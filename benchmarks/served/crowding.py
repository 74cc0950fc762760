"""Twice as many plans as fit into the budget, against as many as fit.

Two servers with the same budget stand side by side, and take turns: clients of one go through as
many plans as fit, those of the other through twice as many. Memory is shared by experts and by kept
keys and values, which may have up to half of it (`expertctl.engine.eviction`), so there is room for
twice the plans that must fit, and for the texts that run. Packages' own bytes (the RAM tier) have
room beside the plans that are compiled of them as long as little is kept; later they are evicted
first, since plans are used more often. That so many fit and twice as many do not is not assumed
from this: the servers' counters, read around the measurement, confirm it.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import Row, Seconds, compare_times
from benchmarks.served.server import Figures, Server
from benchmarks.serving_load import Ask, closed_loop, experts, new_prompt

PROMPT, ANSWER = 64, 8
CLIENTS = 2
EACH = 16
"""How many answers a client has; as many before anything counts, so that memory is full."""
EXPERTS, PLANS = "ram", "device"
"""The tiers: of what was read, and of what is computed with."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What clients that go through so many plans got, and what that took."""

    plans: int
    first: Seconds
    """The median time to the first token."""
    reads: int
    """How many experts were read from the disk."""
    loads: int
    """How many plans were compiled."""
    evictions: int
    """How many of both were evicted."""
    requests: int

    def __str__(self) -> str:
        """Say what was counted."""
        return (
            f"{self.plans} plans, {self.requests} requests: {self.reads} experts read, "
            f"{self.loads} plans compiled, {self.evictions} evicted"
        )


def budget_for(plans: int, figures: Figures) -> int:
    """Return a budget in which so many plans stay in memory beside what is kept of texts.

    ``figures`` are those of a server that answered with such plans, and has memory for all.
    """
    plan = figures.of("expert_loaded_bytes_total", tier=PLANS) / figures.of(
        "expert_loads_total", tier=PLANS
    )
    certain = sum(figures.of("memory_bytes", owner=owner) for owner in ("base", "buffers"))
    running = CLIENTS * plan  # a text of this length takes about half as much
    return int(certain + running + 2 * (plans + 1) * plan)


def compare_crowds(
    roomy: Server, crowded: Server, *, fitting: int, rounds: int
) -> Iterator[tuple[Asked, Asked]]:
    """Let clients of one server go through as many plans as fit, of the other through twice those.

    Raises:
        SystemExit: when the former had to be loaded, or the latter had not.
    """
    _ask(roomy, fitting)
    _ask(crowded, 2 * fitting)
    for _ in range(rounds):
        few, many = _ask(roomy, fitting), _ask(crowded, 2 * fitting)
        check_crowds(few, many)
        yield few, many


def check_crowds(few: Asked, many: Asked) -> None:
    """Demand that the few fit, and the many do not.

    Raises:
        SystemExit: when that is not so.
    """
    if few.reads or few.loads:
        raise SystemExit(f"serving: these were to fit, and did not: {few}")
    if not (many.reads and many.loads and many.evictions):
        raise SystemExit(f"serving: these were not to fit, and did: {many}")


def crowding_row(pairs: Sequence[tuple[Asked, Asked]], *, target: str) -> Row:
    """Compare the times to the first token."""
    few, many = pairs[-1]
    row = compare_times(
        f"first token, {CLIENTS} clients, {many.plans} plans in turn, room for {few.plans}",
        [crowded.first for _, crowded in pairs],
        [fitting.first for fitting, _ in pairs],
        steps=1,
        rival=f"{few.plans} plans in turn",
        target=target,
    )
    return replace(row, note="; ".join(str(one) for pair in pairs for one in pair))


def _ask(server: Server, plans: int) -> Asked:
    models = experts(plans)

    def ask(number: int) -> Ask:
        return Ask(models[number % plans], ANSWER, new_prompt(PROMPT))

    server.rest()
    before = server.figures()
    _, told = closed_loop(server.url, ask, clients=CLIENTS, each=EACH)
    server.rest()
    after = server.figures()
    if any(one.status != 200 for one in told):
        raise SystemExit(f"serving: a request was not answered: {[one.status for one in told]}")

    def counted(name: str, tier: str) -> int:
        series = f"expert_{name}_total"
        return int(after.of(series, tier=tier) - before.of(series, tier=tier))

    return Asked(
        plans=plans,
        first=statistics.median(one.first for one in told),
        reads=counted("loads", EXPERTS),
        loads=counted("loads", PLANS),
        evictions=counted("evictions", EXPERTS) + counted("evictions", PLANS),
        requests=len(told),
    )
