"""Twice as many plans as fit into the budget, against as many as fit.

Two servers with the same budget run side by side, and are measured in turns: clients of one cycle
through as many plans as fit, those of the other through twice as many. Experts share memory with
cached keys and values, which may use up to half of it (`expertctl.engine.memory.budget`), so the
budget is twice the size of the plans that must fit, plus the running sequences. Packages' own bytes
(the RAM tier) fit beside the plans compiled from them as long as few keys and values are cached;
later they are evicted first, since plans are used more often. The counters of the servers, read
around the measurement, confirm that so many plans fit and twice as many do not.
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
"""Number of answers of a client; the same number is generated before, so that memory is full."""
EXPERTS, PLANS = "ram", "device"
"""The tiers: package bytes, and compiled plans."""


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """The results of clients that cycle through so many plans."""

    plans: int
    first: Seconds
    """The median time to the first token."""
    reads: int
    """Number of experts that were read from the disk."""
    loads: int
    """Number of plans that were compiled."""
    evictions: int
    """Number of evictions of both."""
    requests: int

    def __str__(self) -> str:
        """Describe the counts."""
        return (
            f"{self.plans} plans, {self.requests} requests: {self.reads} experts read, "
            f"{self.loads} plans compiled, {self.evictions} evicted"
        )


def compute_budget(plans: int, figures: ServerMetrics) -> int:
    """Return a budget in which so many plans stay in memory beside cached keys and values.

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
    """Run clients of one server with as many plans as fit, of the other with twice as many.

    Raises:
        SystemExit: when the former had to be loaded, or the latter did not.
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
    """Require that the smaller number of plans fits, and the larger does not.

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
