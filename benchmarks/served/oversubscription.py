"""Twice as many plans as fit into the budget, against as many as fit.

Two servers with the same budget stand side by side, and take turns: clients of one go through as
many plans as fit, those of the other through twice as many. Memory is shared by experts and by kept
keys and values, which may have up to half of it (`expertctl.engine.memory.budget`), so there is
room for twice the plans that must fit, and for the texts that run. Packages' own bytes (the RAM
tier) have room beside the plans that are compiled of them as long as little is kept; later they are
evicted first, since plans are used more often. That so many fit and twice as many do not is not
assumed from this: the servers' counters, read around the measurement, confirm it.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import Row, Seconds, compare_times
from benchmarks.served.server import GenerationServer, ServerMetrics
from benchmarks.serving_load import CompletionTask, list_expert_names, make_prompt, run_closed_loop

PROMPT, ANSWER = 64, 8
CLIENTS = 2
EACH = 16
"""How many answers a client has; as many before anything counts, so that memory is full."""
EXPERTS, PLANS = "ram", "device"
"""The tiers: of what was read, and of what is computed with."""


@dataclass(frozen=True, slots=True)
class PlanLoad:
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


def compute_budget(plans: int, figures: ServerMetrics) -> int:
    """Return a budget in which so many plans stay in memory beside what is kept of texts.

    ``figures`` are those of a server that answered with such plans, and has memory for all.
    """
    plan = figures.get("expert_loaded_bytes_total", tier=PLANS) / figures.get(
        "expert_loads_total", tier=PLANS
    )
    certain = sum(figures.get("memory_bytes", owner=owner) for owner in ("base", "buffers"))
    running = CLIENTS * plan  # a text of this length takes about half as much
    return int(certain + running + 2 * (plans + 1) * plan)


def compare_oversubscription(
    fitting_server: GenerationServer,
    oversubscribed_server: GenerationServer,
    *,
    fitting: int,
    rounds: int,
) -> Iterator[tuple[PlanLoad, PlanLoad]]:
    """Let clients of one server go through as many plans as fit, of the other through twice those.

    Raises:
        SystemExit: when the former had to be loaded, or the latter had not.
    """
    _measure_plans(fitting_server, fitting)
    _measure_plans(oversubscribed_server, 2 * fitting)
    for _ in range(rounds):
        few, many = (
            _measure_plans(fitting_server, fitting),
            _measure_plans(oversubscribed_server, 2 * fitting),
        )
        check_plan_loads(few, many)
        yield few, many


def check_plan_loads(few: PlanLoad, many: PlanLoad) -> None:
    """Demand that the few fit, and the many do not.

    Raises:
        SystemExit: when that is not so.
    """
    if few.reads or few.loads:
        raise SystemExit(f"serving: these were to fit, and did not: {few}")
    if not (many.reads and many.loads and many.evictions):
        raise SystemExit(f"serving: these were not to fit, and did: {many}")


def make_oversubscription_row(pairs: Sequence[tuple[PlanLoad, PlanLoad]], *, target: str) -> Row:
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


def _measure_plans(server: GenerationServer, plans: int) -> PlanLoad:
    models = list_expert_names(plans)

    def ask(number: int) -> CompletionTask:
        return CompletionTask(models[number % plans], ANSWER, make_prompt(PROMPT))

    server.wait_until_idle()
    before = server.read_metrics()
    _, told = run_closed_loop(server.url, ask, clients=CLIENTS, each=EACH)
    server.wait_until_idle()
    after = server.read_metrics()
    if any(one.status != 200 for one in told):
        raise SystemExit(f"serving: a request was not answered: {[one.status for one in told]}")

    def counted(name: str, tier: str) -> int:
        series = f"expert_{name}_total"
        return int(after.get(series, tier=tier) - before.get(series, tier=tier))

    return PlanLoad(
        plans=plans,
        first=statistics.median(one.first for one in told),
        reads=counted("loads", EXPERTS),
        loads=counted("loads", PLANS),
        evictions=counted("evictions", EXPERTS) + counted("evictions", PLANS),
        requests=len(told),
    )
