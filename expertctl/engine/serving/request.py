"""Jobs of the serving engine: their events, their state, and what is counted about them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import monotonic as now
from typing import Literal

from expertctl.engine.adapters.compile import CompiledPlan
from expertctl.engine.generation import DEFAULT_STOP_RULES, GenerationOutput, StopRules
from expertctl.engine.memory.adapter_cache import TierTraffic
from expertctl.engine.memory.budget import Purpose
from expertctl.engine.moe.counters import CounterSnapshot, RoutedExpertStats
from expertctl.engine.preparation import PreparedRequest
from expertctl.engine.request import RunRequest
from expertctl.engine.result import BytesRead, RunResult
from expertctl.engine.result_builder import GenerationContext, StageTimer
from expertctl.engine.running_batch import StepCounters
from expertctl.engine.running_sequence import OutputDelta, StopReason
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.errors import CancelledError, ExpertError, TimedOutError
from expertctl.reference import Reference
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.plan import Plan
from expertctl.routing.planner import PlannedPrompt
from expertctl.routing.request import ForcedExpert

DEFAULT_PRIORITY = 5
"""Of 0 to 9; 9 is served first."""
CheckFunction = Callable[[str], FormatCheck | str]
"""Checks the format of an answer; called once, with the whole answer.

Where no format was requested, it returns the part of the answer for the default check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A request to the serving engine, with its owner.

    Scheduling is fair among owners; the caller ensures that cache keys begin with ``owner``.
    ``deadline`` is a time of `time.monotonic`, at which the answer ends as it is.
    """

    id: str
    request: RunRequest
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    answers: int = 1
    """Number of answers, each sampled with its own seed."""
    logprobs: int | None = None
    """Number of likeliest tokens reported with each sampled one; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; None: they are not scored."""
    stop_rules: StopRules = DEFAULT_STOP_RULES
    remember: bool = True
    """Whether it is recorded as a use of its experts."""
    check: CheckFunction | None = None
    """None: the format that the experts or the prompt require."""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The plan is made and the prompt is being read."""

    plan: Plan
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt whose KV was reused."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All answers of a job, in order."""

    results: tuple[RunResult, ...]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Why there is no answer, or no complete one."""

    error: ExpertError


JobEvent = JobStarted | OutputDelta | JobFinished | JobFailed
"""`JobFinished` or `JobFailed` is the last event, and comes once; a job that is cancelled after it
started gets `JobFinished`."""
TokenSink = Callable[[JobEvent], None]
"""Called by one engine thread at a time; returns at once and never raises."""


RequestStage = Literal["waiting", "preparing", "loading", "ready", "running", "concluding", "ended"]


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan that is pinned until ``pins`` are closed."""

    plan: CompiledPlan
    pins: ExitStack
    loads: int
    """Number of experts that were read for it."""
    bytes_moved: BytesRead


@dataclass(slots=True, eq=False)
class RequestState:
    """One job; in each stage one thread works on it, and passes it on."""

    job: GenerationJob
    sink: TokenSink
    left_queue_at: float = field(default_factory=now)
    """When its preparation started; until then, when it arrived."""
    timer: StageTimer = field(default_factory=StageTimer)
    """Runs until its last sequence starts; each sequence has a copy from its own start."""
    stage: RequestStage = "waiting"
    is_cancelled: bool = False
    planned: PlannedPrompt | None = None
    prepared: PreparedRequest | None = None
    memory: LoadedPlan | None = None
    memory_missing_since: float | None = None
    """Since when its experts do not fit."""
    missing_at_freed_count: int | None = None
    """Value of the scheduler's ``freed_count`` when they last did not fit."""
    reclaim_count: int = 0
    """How often other jobs gave their memory to its next sequence."""
    started_count: int = 0
    """Number of its sequences that have started."""
    contexts: dict[int, GenerationContext] = field(default_factory=dict)
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Owner of the job, for fair scheduling."""
        return self.job.owner

    @property
    def priority(self) -> int:
        """0 to 9; 9 is served first."""
        return self.job.priority

    @property
    def cost(self) -> float:
        """Number of answers."""
        return float(self.job.answers)

    @property
    def refs(self) -> tuple[str, ...]:
        """The experts of its plan; before planning, those that were requested."""
        if self.planned is not None:
            return tuple(expert.ref for expert in self.planned.result.plan.experts)
        named = (one.target for one in self.job.request.experts if isinstance(one, ForcedExpert))
        return tuple(str(name.package) for name in named if isinstance(name, Reference))

    def find_stop_reason(self) -> StopReason | None:
        """Return why it must stop; None if it may continue."""
        if self.is_cancelled:
            return "cancelled"
        deadline = self.job.deadline
        return "timeout" if deadline is not None and now() >= deadline else None

    def check_active(self) -> None:
        """Raise if the job must not continue.

        Raises:
            CancelledError: when it was cancelled.
            TimedOutError: when its deadline has passed.
        """
        match self.find_stop_reason():
            case "cancelled":
                raise CancelledError("the job was cancelled")
            case "timeout":
                raise TimedOutError(
                    "the deadline of this request passed before it started",
                    hint="allow more time, or retry when fewer requests are waiting",
                )
            case None:
                return

    @property
    def cache_key(self) -> str | None:
        """The key of KV that its sequences may reuse; those of one job always share one."""
        return self.own_key or self.job.request.cache_key

    @property
    def own_key(self) -> str | None:
        """A key that no other request has; None where the request brings its own."""
        return f"\0{self.job.id}" if self.job.request.cache_key is None else None

    def emit(self, event: JobEvent) -> None:
        """Send an event to the sink of the job."""
        self.sink(event)

    def release(self) -> None:
        """Unpin its plan."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.pins.close()


MAX_COUNTED_EXPERTS = 1_000
OTHER_EXPERTS = "other"
"""Name for all experts that are not counted separately; references always contain a slash."""


@dataclass(slots=True)
class ExpertJobCounts:
    """Number of jobs per expert, for a bounded number of experts.

    Users may install experts of any name, and versions come and go: the first ``limit`` that answer
    are counted separately, all others together.
    """

    limit: int = MAX_COUNTED_EXPERTS
    _jobs: dict[str, int] = field(default_factory=dict)

    def count(self, refs: Iterable[str]) -> None:
        """Count a job once for each expert of its plan."""
        for ref in sorted(set(refs)):
            is_known = ref in self._jobs or len(self._jobs) < self.limit
            name = ref if is_known else OTHER_EXPERTS
            self._jobs[name] = self._jobs.get(name, 0) + 1

    def get(self, ref: str) -> int:
        """Return the number of jobs of an expert; 0 where it is not counted separately."""
        return self._jobs.get(ref, 0)

    def copy(self) -> "ExpertJobCounts":
        """Return a copy of the counts."""
        return ExpertJobCounts(self.limit, dict(self._jobs))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield references and counts."""
        return iter(self._jobs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """Status of one version of an expert on a server."""

    expert: InstalledExpert
    fits: bool
    """Whether it was made for the served base."""
    in_memory: bool
    """Whether its weights are in memory for the next job that uses it."""


KV_BLOCK_TOKENS = 16
"""Tokens of a KV block; packed bases have pages of this size."""


@dataclass(slots=True)
class JobTotals:
    """Counts of jobs so far."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Jobs refused because the queue was full."""
    paused: int = 0
    """Sequences that gave their memory to earlier ones, and resumed later."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    experts: ExpertJobCounts = field(default_factory=ExpertJobCounts)
    """Number of answered jobs per expert."""

    def copy(self) -> "JobTotals":
        """Return a copy of the counts."""
        return replace(self, experts=self.experts.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of the engine at one moment; sizes in bytes, counts since the start."""

    waiting: int
    """Jobs in the queue."""
    preparing: int
    """Jobs that are being planned or loaded, or are ready for a row."""
    running: int
    """Sequences in the batch."""
    rows: int
    """Maximum number of sequences."""
    totals: JobTotals
    counts: StepCounters
    held: Mapping[Purpose, int]
    limit: int
    peak: int
    kv_limit: int
    """Memory available to KV beside everything else that is held."""
    kv_in_use: int
    """KV of running sequences; `held` includes kept KV."""
    kv_kept_limit: int
    """Maximum kept KV."""
    kv_block: int
    """Bytes of a block of `KV_BLOCK_TOKENS` tokens."""
    traffic: Mapping[str, TierTraffic]
    """By tier."""
    running_plans: tuple[tuple[str, ...], ...]
    """The experts of each sequence in the batch."""
    waiting_plans: tuple[tuple[str, ...], ...]
    """The experts of each prepared job, and those that jobs in the queue request."""
    routed: RoutedExpertStats | None = None
    """Routed-expert statistics; None where the base has no such experts."""
    observed: CounterSnapshot | None = None
    """Counts of routed experts, layer by layer; None where nothing is counted."""
    resident_experts: Mapping[int, int] = field(default_factory=dict)
    """Number of experts with a slot, by layer number; empty where none needs one."""
