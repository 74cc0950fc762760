"""`Ticket`: one job on its way through the engine, and what has been gathered for it."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic as now
from typing import Literal

from expertctl.engine.backend import Model
from expertctl.engine.compose import CompiledPlan
from expertctl.engine.generate import Generated
from expertctl.engine.lent import Clock, Lent
from expertctl.engine.preparation import Prepared
from expertctl.engine.run_result import BytesRead
from expertctl.engine.serving.job import Event, Job, Sink
from expertctl.errors import CancelledError, TimedOutError
from expertctl.reference import Reference
from expertctl.routing.planner import Planned
from expertctl.routing.request import Forced

Stage = Literal["waiting", "preparing", "loading", "ready", "running", "concluding", "ended"]
Stopped = Literal["cancelled", "timeout"]


@dataclass(frozen=True, slots=True)
class InMemory:
    """A plan that is pinned, until ``pins`` are closed."""

    model: Model
    plan: CompiledPlan
    pins: ExitStack
    loads: int
    """How many experts were read for it."""
    moved: BytesRead


@dataclass(slots=True, eq=False)
class Ticket:
    """One job; in each stage one thread works at it, and hands it on."""

    job: Job
    sink: Sink
    left_line: float = field(default_factory=now)
    """When it began to be prepared; until then, when it came."""
    clock: Clock = field(default_factory=Clock)
    """Runs until its last text begins; each text has a copy from its own beginning."""
    stage: Stage = "waiting"
    is_cancelled: bool = False
    planned: Planned | None = None
    prepared: Prepared | None = None
    memory: InMemory | None = None
    lacks_since: float | None = None
    """Since when its experts find no memory."""
    lacked: int | None = None
    """How often memory had been given back when they last found too little."""
    begun: int = 0
    """How many of its texts have begun."""
    lents: dict[int, Lent] = field(default_factory=dict)
    ended: dict[int, Generated] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Who asked."""
        return self.job.owner

    @property
    def priority(self) -> int:
        """0 to 9."""
        return self.job.priority

    @property
    def cost(self) -> float:
        """How many answers it wants."""
        return float(self.job.texts)

    @property
    def refs(self) -> tuple[str, ...]:
        """The experts of its plan; until there is a plan, those that were asked for."""
        if self.planned is not None:
            return tuple(expert.ref for expert in self.planned.result.plan.experts)
        named = (one.target for one in self.job.request.experts if isinstance(one, Forced))
        return tuple(str(name.package) for name in named if isinstance(name, Reference))

    def stopped(self) -> Stopped | None:
        """Why it must not go on; None if it may."""
        if self.is_cancelled:
            return "cancelled"
        deadline = self.job.deadline
        return "timeout" if deadline is not None and now() >= deadline else None

    def demand_wanted(self) -> None:
        """Go no further with a job that is no longer wanted.

        Raises:
            CancelledError: when it was called off.
            TimedOutError: when its time is over.
        """
        match self.stopped():
            case "cancelled":
                raise CancelledError("the job was cancelled")
            case "timeout":
                raise TimedOutError(
                    "the time for this answer was over before it began",
                    hint="give it more time, or send it when fewer requests wait",
                )
            case None:
                return

    @property
    def cache_key(self) -> str | None:
        """The key of earlier texts that may begin its own; texts of one job always share one."""
        return self.own_key or self.job.request.cache_key

    @property
    def own_key(self) -> str | None:
        """A key that no other request has; None where the request brings its own."""
        return f"\0{self.job.id}" if self.job.request.cache_key is None else None

    def tell(self, event: Event) -> None:
        """Give an event to the sink of the job."""
        self.sink(event)

    def release(self) -> None:
        """Let go of what is pinned for it."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.pins.close()
